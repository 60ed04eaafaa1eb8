"""The part of launch/setup.sh that runs in a new .venv: installs zerolm and what it depends on.

    .venv/bin/python -I launch/install.py [EXTRA ...]

uv installs them with pip's settings, in a fifth of pip's time (docs/log.md), or pip where uv is not
available. Standard library only, since it runs before anything is installed.
"""

import ast
import configparser
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / ".cache" / "setup.log"
CONSTRAINTS = ROOT / ".cache" / "constraints.txt"

EXIT_INTERRUPTED = 130
ALWAYS = ("fast-tokenizers",)  # the demo and README's tokenizing
BUILD_TOOLS = ("setuptools", "wheel", "ninja", "numpy")  # DeepSpeed's build also imports torch
OFF_WITHOUT = {"fasttext-numpy2-wheel": "the filters fasttext and language cannot be used"}

UV_VARIABLES = {  # {setting of pip: variable of uv}
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
SAME_FOR_UV = {  # settings of pip that do not change what is installed
    "cache-dir", "config-file", "disable-pip-version-check", "no-cache-dir", "no-color",
    "no-compile", "no-input", "no-warn-script-location", "prefer-binary", "progress-bar", "quiet",
    "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own
PROGRESS_SECONDS = 15.0  # between two lines about a stage, where there is no terminal

DOWNLOADED = re.compile(r"^ *Downloading .*\(([0-9.]+) ?(k|M|G)i?B\)", re.MULTILINE)
MEGABYTES = {"k": 1e-3, "M": 1.0, "G": 1e3}


def main(extras: Sequence[str]) -> None:
    extras = sorted({*ALWAYS, *extras})
    known = set(read_setup()["options.extras_require"])
    if unknown := set(extras) - known:
        fail(f"no extra {', '.join(sorted(unknown))} in setup.cfg. It has {', '.join(known)}.")
    os.chdir(ROOT)
    os.environ["DS_BUILD_OPS"] = "0"  # DeepSpeed's operators are built on first use
    start = time.monotonic()
    installer = Installer()
    torch = choose_torch(installer)
    write_constraints(torch)
    installer.install(f"torch{torch} and build tools", f"torch{torch}", *BUILD_TOOLS)
    installer.install(f"deepspeed=={pins()['deepspeed']}", "--no-build-isolation", "deepspeed")
    install_zerolm(installer, extras)
    build_operator()
    seconds = time.monotonic() - start
    print(f"setup: {installer.megabytes:.0f} MB downloaded, {seconds:.0f} s in all")


def fail(*lines: str) -> NoReturn:
    sys.exit("\n".join(f"setup: {line}" for line in lines))


def read_setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def pins() -> dict[str, str]:
    """Return {name: version} of the constraints that hold for every Python."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and ";" not in line)


def write_constraints(torch: str) -> None:
    """Write constraints.txt with this torch, and without the packages that the machine has."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    theirs = {normalized(each.name) for each in importlib.metadata.distributions() if outside(each)}
    kept = [line for line in text.splitlines() if normalized(line.split("==")[0]) not in theirs]
    kept = [line for line in kept if not line.startswith("torch==")]
    CONSTRAINTS.write_text("\n".join([*kept, f"torch{torch}", ""]), encoding="utf-8")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def outside(distribution: importlib.metadata.Distribution) -> bool:
    """Return whether a package is the machine's, not in .venv (--system-site-packages)."""
    return not str(distribution.locate_file("")).startswith(sys.prefix)


# ---- Stages


def run_stage(
    title: str, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[bool, float]:
    """Run a command with its output in LOG; return (whether it succeeded, MB downloaded)."""
    start = shown = time.monotonic()
    line = f"setup: {title} ..."
    print(line, end="", flush=True)
    with LOG.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )  # fmt: skip
    while process.poll() is None:
        time.sleep(0.2)
        if sys.stdout.isatty():
            print(f"\r{line} {downloaded():.0f} MB", end="", flush=True)
        elif time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            size = f", {downloaded():,.0f} MB to download" if downloaded() else ""
            print(f"\nsetup:     {shown - start:.0f} s{size}", end="", flush=True)
    megabytes = downloaded()
    if sys.stdout.isatty():
        print(f"\r{line}", end="")
    elif shown != start:
        print(f"\n{line}", end="")
    seconds = f"{time.monotonic() - start:.0f} s"
    print(" failed after" if process.returncode else f" {megabytes:.0f} MB,", seconds, flush=True)
    return process.returncode == 0, megabytes


def downloaded() -> float:
    """Return the megabytes that the command of this stage said it downloads."""
    text = LOG.read_text(encoding="utf-8", errors="replace")
    return sum(float(number) * MEGABYTES[unit] for number, unit in DOWNLOADED.findall(text))


def fail_stage(command: Sequence[str]) -> NoReturn:
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
    print("", *lines[-30:], sep="\n", file=sys.stderr)
    fail(f"the command was: {' '.join(command)}", f"its complete output is in {LOG}")


class Installer:
    """uv, or pip where uv cannot be had; counts the megabytes."""

    def __init__(self) -> None:
        self.megabytes = 0.0
        settings = pip_settings()
        self.pip_environment = {"PIP_NO_INPUT": "1"}
        if index := os.environ.get("ZEROLM_TORCH_INDEX"):
            indexes = f"{settings.get('extra-index-url', '')} {index}".strip()
            settings["extra-index-url"] = self.pip_environment["PIP_EXTRA_INDEX_URL"] = indexes
        pip = [sys.executable, "-I", "-m", "pip", "install", "--disable-pip-version-check"]
        self.pip = [*pip, "--progress-bar", "off"]
        self.uv: list[str] = []
        self.uv_environment: dict[str, str] = {}
        if reason := self.find_uv(settings):
            print(f"setup: pip installs: {reason}")

    def find_uv(self, settings: Mapping[str, str]) -> str:
        """Install uv, and give it the settings of pip. Return why it cannot be used, or ''."""
        if "true" in pyvenv("include-system-site-packages"):
            return "uv does not see the packages of the machine"
        unknown = sorted(set(settings) - set(UV_VARIABLES) - SAME_FOR_UV - {"no-index"})
        if unknown:
            return f"uv has no equivalent of pip's setting {', '.join(unknown)}"
        version = pins()["uv"]
        command = [*self.pip, "--retries", "0", f"uv=={version}"]
        present = (existing := installed("uv")) and existing.version == version
        if not present and not self.run(f"install uv {version}", command, self.pip_environment):
            return f"uv {version} cannot be had"
        uv = [sysconfig.get_path("scripts") + "/uv", "pip", "install", "--no-config"]
        no_index = ["--no-index"] if "no-index" in settings else []
        self.uv = [*uv, "--python", sys.executable, *no_index]
        # Like pip, and unlike uv by default, take the newest version of all indexes.
        self.uv_environment = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
        # Otherwise Python compiles at the first import, but with this variable at every one.
        if os.environ.get("PYTHONDONTWRITEBYTECODE") and "no-compile" not in settings:
            self.uv_environment["UV_COMPILE_BYTECODE"] = "1"
        for name, variable in UV_VARIABLES.items():
            if name in settings:
                between = "," if name == "find-links" else " "
                self.uv_environment[variable] = between.join(settings[name].split())
        return ""

    def run(self, title: str, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        succeeded, megabytes = run_stage(title, command, environment)
        self.megabytes += megabytes
        return succeeded

    def try_to_install(self, title: str, *arguments: str) -> bool:
        """Install, and return whether it succeeded."""
        command, environment = self.command(arguments)
        return self.run(f"install {title}", command, environment)

    def install(self, title: str, *arguments: str) -> None:
        """Install, by pip if uv fails, or end the set-up."""
        if self.try_to_install(title, *arguments):
            return
        if self.uv:
            print("setup: uv failed (its last line follows); pip installs from here on")
            print("      ", *LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-1:])
            self.uv = []
            if self.try_to_install(title, *arguments):
                return
        fail_stage(self.command(arguments)[0])

    def offers(self, requirement: str) -> bool:
        """Return whether an index has a package for this Python; nothing is installed."""
        command, environment = self.command(["--dry-run", "--no-deps", requirement], pinned=False)
        result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True)
        return result.returncode == 0

    def command(
        self, arguments: Sequence[str], pinned: bool = True
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command that installs, and what it needs in the environment."""
        constraints = ["-c", str(CONSTRAINTS)] if pinned else []
        if self.uv:
            return [*self.uv, *constraints, *arguments], self.uv_environment
        return [*self.pip, *constraints, *arguments], self.pip_environment


def pip_settings() -> dict[str, str]:
    """Return {name: value} of pip's files and variables, as far as they concern installing."""
    listed = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found = [re.match(r"(global|install|:env:)\.([^=]+)=(.*)", line) for line in listed.split("\n")]
    order = ("global", "install", ":env:")  # later ones take precedence
    settings = sorted((match for match in found if match), key=lambda match: order.index(match[1]))
    values: dict[str, Any] = {match[2]: ast.literal_eval(match[3]) for match in settings}
    off = ("", "0", "false", "no", "off")
    return {name: value for name, value in values.items() if value.lower() not in off}


def pyvenv(name: str) -> str:
    lines = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(name)), "")


# ---- What is installed


def choose_torch(installer: Installer) -> str:
    """Return the version of torch to install, as in ==2.13.0, and print why it is that one."""
    pinned = pins()["torch"]
    change = "ZEROLM_TORCH=VERSION bash launch/setup.sh installs another one"
    if wanted := os.environ.get("ZEROLM_TORCH"):
        version, why = f"=={wanted}", "as ZEROLM_TORCH says"
        change = ""
    elif (existing := installed("torch")) and outside(existing):
        version, why = f"=={existing.version}", "which the machine has"
    elif existing and existing.version.partition("+")[0] == pinned and not wants_cpu(existing):
        version, why = f"=={existing.version}", "which is installed"
    elif has_nvidia_device():
        version = f"=={pinned},!={pinned}+cpu"
        why = "the index's default build, for the NVIDIA device of this machine"
    elif installer.offers(f"torch=={pinned}+cpu"):
        version, why = f"=={pinned}+cpu", "a CPU build, as this machine has no NVIDIA device"
    else:
        version = f"=={pinned}"
        why = "the index's default build, as it has no CPU build for this Python and machine"
        change = (
            f"On x86-64 it brings 2.5 GB of CUDA libraries. An index with CPU builds: "
            f"ZEROLM_TORCH_INDEX={CPU_INDEX} bash launch/setup.sh"
        )
    print(f"setup: torch{version}, {why}. {change}".rstrip())
    return version


def wants_cpu(existing: importlib.metadata.Distribution) -> bool:
    """Return whether ZEROLM_TORCH_INDEX may have a CPU build in place of an installed torch."""
    given = os.environ.get("ZEROLM_TORCH_INDEX")
    return bool(given) and "+" not in existing.version and not has_nvidia_device()


def installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_nvidia_device() -> bool:
    return Path("/proc/driver/nvidia").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def install_zerolm(installer: Installer, extras: Sequence[str]) -> None:
    """Install this checkout with extras; leave out what this Python cannot have, with a note."""
    editable = ["--no-build-isolation", "-e"]
    names = ", ".join(extras)
    if installer.try_to_install(f"zerolm with {names}", *editable, f".[{','.join(extras)}]"):
        missing = {name for name, _, applies in requirements_of(extras) if not applies}
    else:
        installer.install("zerolm without extras", *editable, ".")
        missing = set()
        for name, requirement, applies in requirements_of(extras):
            if not applies or not installer.try_to_install(name, requirement):
                missing.add(name)
    for name in sorted(missing):
        off = OFF_WITHOUT.get(name, "what needs it refuses to run, and its tests are skipped")
        print(f"setup: note: no {name} for Python {platform.python_version()}: without it, {off}")


def requirements_of(extras: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, requirement, whether it is for this Python) of extras and what they include."""
    importlib.invalidate_caches()
    from packaging.requirements import Requirement  # was installed with zerolm

    lines = importlib.metadata.requires("zerolm") or []
    queue = list(extras)
    for extra in queue:
        for each in map(Requirement, lines):
            if f'extra == "{extra}"' not in str(each.marker):
                continue
            if each.name == "zerolm":
                queue += sorted(each.extras - set(queue))
            else:
                assert each.marker is not None
                applies = each.marker.evaluate({"extra": extra})
                each.marker = None
                yield each.name, str(each), applies


def build_operator() -> None:
    """Build DeepSpeed's operator for collectives of ranks on CPUs where runs will look for it.

    A killed build leaves a lock, which would make later builds wait.
    """
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        print(
            f"setup: note: no {header}: profiles that offload to the CPU need it to compile their "
            "optimizer (apt-get install python3-dev)"
        )
        return
    for lock in Path(sys.prefix, "torch_extensions").rglob("lock"):
        lock.unlink()
    code = (
        "import os\n"
        "from zerolm.common.machine import keep_operators\n"
        "keep_operators(os.environ)\n"
        "from deepspeed.accelerator import get_accelerator as get\n"
        "get().create_op_builder('ShareMemCommBuilder').load()"
    )
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    environment = {"DS_ACCELERATOR": "cpu", "PATH": path}
    command = [sys.executable, "-I", "-c", code]
    title = "build DeepSpeed's operator for communication on CPUs"
    if not run_stage(title, command, environment)[0]:
        fail_stage(command)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the same command continues", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
