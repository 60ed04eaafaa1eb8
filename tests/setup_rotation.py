"""Set up as a user does, check a run of the 160M, and test there: the next of six turns.

    python -m tests.setup_rotation                 # the turn of this commit; part of CI
    python -m tests.setup_rotation --turn 3.13     # the versions of constraints.txt on Python 3.13
    python -m tests.setup_rotation --turn newest   # the newest that setup.cfg allows; or the oldest
    python -m tests.setup_rotation --minutes 3     # ends without a verdict if it takes longer

The number of commits decides, as for soak tests. Works on a clone of the last commit in a temporary
directory; prints the stages of the set-up, the size of .venv, and the seconds. The tests are those
of what differs between Pythons and versions: help of commands, types, JSON, CSV, Unicode, texts,
processes, and what other packages compute.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.install import Installer, pins
from tests import ROOT
from tests.soak_rotation import number_of_commit

PINNED = ""
DEBIAN = {"3.13": "trixie", "3.14": "sid"}  # releases with these Pythons, by tests/debian.sh
TURNS = {  # {name: (Python, how uv resolves the ranges of setup.cfg)}
    **{python: (python, PINNED) for python in ("3.10", "3.11", "3.12", "3.13", "3.14")},
    "oldest": ("3.12", "lowest-direct"),
    "newest": ("3.12", "highest"),
}
BY_HAND = ("oldest",)  # seven minutes: benchmarks/results/versions.md
DISK_BYTES = (
    15e9  # 5 GB of .venv with CUDA libraries, twice if uv's cache cannot be linked, and pip's
)

# Every module, except what needs an extra that users choose.
IMPORT_ALL = """
import importlib, pkgutil
count = 0
for top in "zerolm", "data_prep", "launch":
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, top + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
print(count, "modules imported")
"""
QUICK_TESTS = (
    "tests/zerolm/common",
    "tests/zerolm/config",
    "tests/data_prep/formats/test_csv_rows.py",
    "tests/data_prep/read/test_discovery.py",
    "tests/data_prep/files/test_parse.py",
    "tests/data_prep/dedup/test_decontaminate.py",
    "tests/data_prep/dedup/test_word_hashes.py",
    "tests/data_prep/tasks/test_progress.py",
    "tests/launch/test_install.py",
    "tests/zerolm/test_console.py",
)
VERSION_TESTS = (  # with the oldest and the newest: what changes with torch, transformers, ...
    *("tests/data_prep/files/test_encodings.py", "tests/data_prep/formats/test_pages.py"),
    *("tests/zerolm/attention/test_varlen.py", "tests/zerolm/evaluate/test_sampling.py"),
    *("tests/zerolm/model/test_build.py", "tests/zerolm/ds_config/test_schema.py"),
    *(
        "tests/zerolm/plan",
        "tests/zerolm/preflight/test_check.py",
        "tests/zerolm/report/test_plot.py",
    ),
    *("tests/zerolm/preflight/test_plausibility.py", "tests/data_prep/cli/test_train_tokenizer.py"),
    *("tests/launch/estimate/test_command.py", "tests/test_ladder.py", "tests/test_tables.py"),
)
COMMANDS = (
    "python -c IMPORT_ALL",
    "zerolm data train-tokenizer --input text.jsonl --vocab_size 300 --output tokenizer",
    "zerolm data tokenize --input text.jsonl --tokenizer tokenizer --output shards"
    " --val_fraction 0.1 --val_output val",
    "zerolm train --check --world_size 8 --hardware H100 --deepspeed_config ds_configs/zero2.json"
    " --model_config model_configs/llama-160m.json --data shards --val_data val"
    " --total_tokens 3B --run_dir run",
    f"python -m pytest --maxfail 9 --numprocesses 2 --dist loadfile {' '.join(QUICK_TESTS)}",
)


def resolve(resolution: str, python: str, clone: Path, until: float) -> int | None:
    """Write constraints.txt of the clone with the versions that uv chooses. Return as `run`."""
    installer, file = Installer(), clone / "constraints.txt"
    uv = [installer.programs[0][0], "pip", "compile", *installer.uv_options, "--no-header"]
    command = [*uv, "--quiet", "--no-annotate", "--extra", "dev", "--resolution", resolution]
    command += ["--python", python, "--output-file", str(file), "setup.cfg"]
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    file.unlink()
    code = run(command, clone, environment, until)
    if code == 0:  # set-up looks for a CPU build itself
        lines = [line.partition("+")[0] for line in file.read_text().splitlines()]
        file.write_text("\n".join([*lines, f"uv=={pins()['uv']}", ""]))
        named = [
            line for line in lines if line.startswith(("torch==", "transformers==", "numpy=="))
        ]
        print("setup rotation:", *named, flush=True)
    return code


def find_python(version: str) -> str | None:
    """Return an interpreter of this version that runs, from PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [f"python{version}", *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in found:
        path = shutil.which(candidate)
        command = [str(path), "-c", ""]
        if path and subprocess.call(command, stderr=subprocess.DEVNULL, timeout=60) == 0:
            return path
    return None


def on_debian(version: str, until: float) -> int | None:
    """Take the turn on a fresh Debian that has this Python. Return as `run` does."""
    with tempfile.TemporaryDirectory() as directory:
        script = ["bash", "tests/debian.sh", DEBIAN[version], f"{directory}/{version}"]
        if (code := run([*script, "true"], ROOT, dict(os.environ), until)) == 0:
            minutes = (until - time.monotonic()) / 60
            again = f"python3 -m tests.setup_rotation --turn {version} --minutes {minutes:.1f}"
            return run([*script, again], ROOT, dict(os.environ), until + 60)
    print("setup rotation: no verdict: a fresh Debian was not made in time", flush=True)
    return code


def run(command: list[str], clone: Path, environment: dict[str, str], until: float) -> int | None:
    """Run a command, and return its exit code; None if it was ended at `until`."""
    print("$", *(word for word in command if "\n" not in word), flush=True)
    process = subprocess.Popen(
        command, cwd=clone, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def try_setup(python: str, resolution: str, clone: Path, until: float) -> int | None:
    """Set up in `clone`, and run `COMMANDS` there. Return as `run` does."""
    own = ("PYTHON", "TORCH_EXTENSIONS_DIR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    paths = [path for path in kept["PATH"].split(":") if not path.startswith(str(ROOT))]
    environment = kept | {"PATH": ":".join(paths), "PYTHON": python, "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    code = resolve(resolution, python, clone, until) if resolution else 0
    if code == 0:
        code = run(["bash", "launch/setup.sh", "dev"], clone, environment, until)
    size = sum(file.stat().st_size for file in clone.glob(".venv/**/*") if file.is_file())
    print(f"setup rotation: .venv has {size / 1e9:.1f} GB", flush=True)
    lines = (json.dumps({"text": f"Sentence {place} of a text. " * 40}) for place in range(400))
    (clone / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    environment["PATH"] = f"{clone}/.venv/bin:{environment['PATH']}"
    for command in COMMANDS:
        if code == 0:
            more = VERSION_TESTS if resolution and "pytest" in command else ()
            words = [IMPORT_ALL if word == "IMPORT_ALL" else word for word in command.split()]
            code = run([*words, *more], clone, environment, until)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    in_turn = [name for name in TURNS if name not in BY_HAND]
    turn = in_turn[number_of_commit(ROOT) % len(in_turn)]
    parser.add_argument("--turn", choices=TURNS, default=turn)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    version, resolution = TURNS[arguments.turn]
    name = f"setup rotation: {arguments.turn}, Python {version}"
    start = time.monotonic()
    python = find_python(version)
    if python is None and version in DEBIAN and shutil.which("debootstrap") and os.getuid() == 0:
        return on_debian(version, start + arguments.minutes * 60) or 0
    if python is None:
        print(f"{name}: skipped: it is not installed here, nor debootstrap, for root")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        if (free := shutil.disk_usage(directory).free) < DISK_BYTES:
            print(f"{name}: skipped: {free / 1e9:.0f} GB of disk are free, it may need 15")
            return 0
        clone = Path(directory) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, timeout=120)
        code = try_setup(python, resolution, clone, start + arguments.minutes * 60)
    seconds = time.monotonic() - start
    outcome = "passed" if code == 0 else f"failed with exit code {code}"
    if code is None:
        outcome = f"skipped: not done after --minutes {arguments.minutes:g}"
    print(f"{name}: {outcome} ({seconds:.0f} s)")
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
