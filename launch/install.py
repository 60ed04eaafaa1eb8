"""The part of launch/setup.sh that runs in a new .venv: choose a torch build, and install packages.

    .venv/bin/python -I launch/install.py [EXTRA ...]

Installs with uv, which uses pip's settings and takes a fifth of pip's time (docs/log.md); pip is
the fallback. Standard library only, since this script runs before anything is installed.
"""

import ast
import contextlib
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / ".cache" / "setup.log"
CONSTRAINTS = ROOT / ".cache" / "constraints.txt"

ALWAYS = ("fast-tokenizers",)  # for the demo and the README's tokenize command
BUILD_TOOLS = ("setuptools", "wheel", "ninja", "numpy")  # DeepSpeed's build also imports torch
HEADER = Path(sysconfig.get_path("include")) / "Python.h"
GET_HEADER = "apt-get install python3-dev, or the one of your Python"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's official index
ERROR_CHARACTERS = 300
PROGRESS_SECONDS = 15.0  # between progress lines of a stage

PIP = (sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
SAME_FOR_UV = "index-url|extra-index-url|find-links|no-index|constraint|trusted-host|cert"
DOWNLOADED = re.compile(r"^ *Downloading .*\(([0-9.]+) ?(k|M|G)i?B\)", re.MULTILINE)
MEGABYTES = {"k": 1e-3, "M": 1.0, "G": 1e3}


def main(extras: Sequence[str]) -> None:
    os.chdir(ROOT)
    known = re.findall(r"^([a-z0-9-]+) =$", Path("setup.cfg").read_text(encoding="utf-8"), re.M)
    if unknown := set(extras) - set(known):
        names = ", ".join(sorted(unknown))
        sys.exit(f"setup: no extra {names} in setup.cfg. It has {', '.join(known)}.")
    if "dev" in extras and not HEADER.is_file():
        sys.exit(f"setup: no {HEADER}: the tests compile DeepSpeed's operators: {GET_HEADER}")
    start, wanted = time.monotonic(), ",".join(sorted({*ALWAYS, *extras}))
    LOG.write_bytes(b"")
    os.environ["DS_BUILD_OPS"] = "0"  # DeepSpeed's operators are built on first use
    os.environ.setdefault("UV_HTTP_TIMEOUT", "180")
    installer = Installer()
    torch = choose_torch(installer)
    write_constraints(torch)
    installer.install(f"torch{torch} and build tools", f"torch{torch}", *BUILD_TOOLS)
    installer.install(f"zerolm[{wanted}]", "--no-build-isolation", "-e", f".[{wanted}]")
    if sys.version_info >= (3, 13) and {"pipeline", "dev"} & set(extras):
        print(
            f"setup: note: no fasttext-numpy2-wheel for Python 3.{sys.version_info[1]}: the "
            f"filters fasttext and language cannot be used"
        )
    build_operator()
    print(f"setup: {downloaded():.0f} MB downloaded, {time.monotonic() - start:.0f} s in all")


def pins() -> dict[str, str]:
    """Return {name: version} for the constraints that apply to every Python version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and ";" not in line)


def write_constraints(torch: str) -> None:
    """Write CONSTRAINTS: constraints.txt with the given torch version.

    Packages that the machine provides outside of .venv are omitted.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    others = {each.name for each in importlib.metadata.distributions() if outside(each)} | {"torch"}
    others = {re.sub(r"[-_.]+", "-", name).lower() for name in others}
    kept = [line for line in lines if line.split("==")[0].replace("_", "-").lower() not in others]
    CONSTRAINTS.write_text("\n".join([*kept, f"torch{torch}", ""]), encoding="utf-8")


def installed(name: str) -> importlib.metadata.Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name)), None)


def outside(distribution: importlib.metadata.Distribution) -> bool:
    """Return whether a package comes from outside .venv, as --system-site-packages allows."""
    return not str(distribution.locate_file("")).startswith(sys.prefix)


# ---- The torch build


def choose_torch(installer: "Installer") -> str:
    """Return the version specifier of the torch build to install, and print the reason."""
    pinned, existing = pins()["torch"], installed("torch")
    change = "ZEROLM_TORCH=VERSION bash launch/setup.sh installs another one"
    if wanted := os.environ.get("ZEROLM_TORCH"):
        version, why, change = f"=={wanted}", "as ZEROLM_TORCH says", ""
    elif existing and outside(existing):
        version, why = f"=={existing.version}", "which the machine has"
    elif existing and existing.version.partition("+")[0] == pinned and not wants_cpu(existing):
        version, why = f"=={existing.version}", "which is installed"
    elif has_nvidia_device():
        version = f"=={pinned},!={pinned}+cpu"
        why = "the index's default build, for this machine's NVIDIA device"
    elif installer.offers(f"torch=={pinned}+cpu"):
        version, why = f"=={pinned}+cpu", "a CPU build, since this machine has no NVIDIA device"
    else:
        version = f"=={pinned}"
        why = "the index's default build, since it has no CPU build for this Python and machine"
        change = (
            "On x86-64 it includes 2.5 GB of CUDA libraries. To use an index with CPU builds: "
            f"ZEROLM_TORCH_INDEX={CPU_INDEX} bash launch/setup.sh"
        )
    print(f"setup: torch{version}, {why}. {change}".rstrip(), flush=True)
    return version


def wants_cpu(existing: importlib.metadata.Distribution) -> bool:
    """Return whether a CPU build from ZEROLM_TORCH_INDEX may replace the installed torch."""
    given = os.environ.get("ZEROLM_TORCH_INDEX")
    return bool(given) and "+" not in existing.version and not has_nvidia_device()


def has_nvidia_device() -> bool:
    return Path("/proc/driver/nvidia").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


# ---- Install


class Installer:
    """Installs with uv, or with pip if uv is missing, fails, or cannot see installed packages."""

    def __init__(self) -> None:
        pip = [*PIP, "install", "--progress-bar", "off"]
        self.programs, self.uv_options = [pip], uv_options()
        config = (Path(sys.prefix) / "pyvenv.cfg").read_text(encoding="utf-8")
        present, version = installed("uv"), pins()["uv"]
        if "include-system-site-packages = true" in config:
            print("setup: installing with pip: uv does not see the machine's packages")
        elif (present and present.version == version) or run_stage(
            f"install uv {version}", [*pip, "--retries=0", f"uv=={version}"]
        ):
            uv = [sysconfig.get_path("scripts") + "/uv", "pip", "install", "--python"]
            # Python normally caches bytecode at the first import, but this variable disables the
            # cache.
            compiled = ["--compile-bytecode"] if os.getenv("PYTHONDONTWRITEBYTECODE") else []
            self.programs.insert(0, [*uv, sys.executable, *self.uv_options, *compiled])

    def install(self, title: str, *arguments: str) -> None:
        pinned = ["-c", str(CONSTRAINTS), *arguments]
        run_one_of(f"install {title}", [[*each, *pinned] for each in self.programs])

    def offers(self, requirement: str) -> bool:
        """Return whether an index offers a requirement for this Python. Installs nothing."""
        command = [*self.programs[0], "--dry-run", "--no-deps", requirement]
        return subprocess.run(command, capture_output=True).returncode == 0


def uv_options() -> list[str]:
    """Return pip's settings as uv options; add ZEROLM_TORCH_INDEX to the indexes of uv and pip."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    settings = {"extra-index-url": ""}
    for section in ("global", "install", ":env:"):  # later sections take precedence
        found = re.findall(rf"^{section}\.({SAME_FOR_UV})=(.*)$", listed, re.MULTILINE)
        settings |= {name: ast.literal_eval(value) for name, value in found}
    settings["extra-index-url"] += f" {os.environ.get('ZEROLM_TORCH_INDEX', '')}"
    os.environ["PIP_EXTRA_INDEX_URL"] = settings["extra-index-url"].strip()
    options = ["--no-config", "--index-strategy=unsafe-best-match"]  # newest version in any index
    if settings.pop("no-index", "") in ("1", "true"):
        options += ["--no-index"]
    if "find-links" in settings:
        settings["find-links"] = existing_places(settings["find-links"].split())
    return options + [f"--{name}={each}" for name in settings for each in settings[name].split()]


def existing_places(places: Sequence[str]) -> str:
    """Return find-links without missing directories, where pip continues and uv ends."""
    kept = []
    for place in places:
        path = re.sub("^file:(//)?", "", place)
        if not re.match("[a-z]+://", path) and not Path(path).expanduser().exists():
            print(f"setup: note: find-links {place}: no such file or directory: ignored")
        else:
            kept.append(str(Path(place).expanduser()) if place.startswith("~") else place)
    return " ".join(kept)


def build_operator() -> None:
    """Build DeepSpeed's operator for CPU collectives in the directory that runs load it from."""
    if not HEADER.is_file():
        print(
            f"setup: note: no {HEADER}: collectives on CPUs are slower, and profiles that offload "
            f"to the CPU cannot compile their optimizer: {GET_HEADER}"
        )
        return
    code = (
        "import os\n"
        "from zerolm.common.machine import keep_operators\n"
        "from zerolm.engine.operators import guard_builds\n"
        "keep_operators(os.environ)\n"
        "os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from deepspeed.accelerator import get_accelerator as get\n"
        "guard_builds(print)\n"
        "get().create_op_builder('ShareMemCommBuilder').load()"
    )
    title = "build DeepSpeed's operator for communication on CPUs"
    run_one_of(title, [[sys.executable, "-I", "-c", code]])


def run_one_of(title: str, commands: Sequence[Sequence[str]]) -> None:
    """Run the commands in order until one succeeds; exit if all fail."""
    for command, *others in (commands[place:] for place in range(len(commands))):
        num_before = len(log_lines())
        if run_stage(title, command):
            return
        if others:
            print(f"setup: note: trying pip, since {first_error(log_lines()[num_before:])}")
    print("", *log_lines()[-30:], sep="\n", file=sys.stderr)
    print(f"setup: the command was: {' '.join(commands[-1])}", file=sys.stderr)
    sys.exit(f"setup: its complete output is in {LOG}")


def run_stage(title: str, command: Sequence[str]) -> bool:
    """Run a command, append its output to LOG, and print progress; return whether it succeeded."""
    print(f"setup: {title} ...", flush=True)
    with LOG.open("ab") as log:
        start, before, code = time.monotonic(), downloaded(), None
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    while code is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(PROGRESS_SECONDS)
        size = f", {downloaded() - before:,.0f} MB to download" if downloaded() > before else ""
        outcome = "" if code is None else ": done" if code == 0 else f": failed: {command[0]}"
        print(f"setup:     {time.monotonic() - start:.0f} s{size}{outcome}", flush=True)
    return code == 0


def first_error(lines: Sequence[str]) -> str:
    """Return the first error in a program's output with its causes, as one line."""
    starts = [place for place, line in enumerate(lines) if re.match("error: ", line, re.I)]
    if not starts:
        return f"it printed {lines[-1].strip()!r}" if lines else "it printed nothing"
    causes = itertools.takewhile(lambda line: line.startswith("  cause: "), lines[starts[0] + 1 :])
    return "; ".join([lines[starts[0]], *causes]).replace(";   cause:", ":")[:ERROR_CHARACTERS]


def log_lines() -> list[str]:
    return LOG.read_text(encoding="utf-8", errors="replace").splitlines()


def downloaded() -> float:
    """Return the megabytes downloaded according to LOG."""
    found = DOWNLOADED.findall("\n".join(log_lines()))
    return sum(float(number) * MEGABYTES[unit] for number, unit in found)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run the same command to continue", file=sys.stderr)
        sys.exit(130)
