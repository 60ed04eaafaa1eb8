"""The environment of the other programs: `.cache/readers`, made once from requirements.txt.

mlx-lm asks for transformers 5 because of its tokenizers, which are not used here, so it is
installed without its requirements. llama-cpp-python is built from its source archive: the library
of llama.cpp alone, without the tools of the package, which takes half as long.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from tests import ROOT

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
MLX_LM, LLAMA = "mlx-lm==0.32.2", "llama-cpp-python==0.3.36"
HOME = Path(os.environ.get("ZEROLM_READERS") or ROOT / ".cache" / "readers")
PYTHON, SOURCE, LIBRARY = HOME / "venv/bin/python", HOME / "llama", HOME / "build/bin"
BUILD_MINUTES = 60
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_CURL=OFF",
)  # fmt: skip


class Unavailable(Exception):
    """A program cannot be installed here; the message says why."""


def install() -> None:
    """Make the environment with what PyPI has as wheels, unless it was made from the same list."""
    done = HOME / "installed.txt"
    wanted = f"{REQUIREMENTS.read_text()}{MLX_LM}\n"
    if done.exists() and done.read_text() == wanted:
        return
    _call(sys.executable, "-m", "venv", "--clear", HOME / "venv")
    pip = (PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    (path,) = (HOME / "venv").glob("lib/*/site-packages")
    (path / "torch_of_the_project.pth").write_text(sysconfig.get_path("purelib"))
    _call(*pip, "-r", REQUIREMENTS, minutes=10)
    _call(*pip, "--no-deps", MLX_LM, minutes=5)
    done.write_text(wanted)


def install_llama() -> None:
    """Build the library of llama.cpp, unless it is there: 10 minutes on two idle cores."""
    install()
    done = HOME / "llama.txt"
    if done.exists() and done.read_text() == LLAMA:
        return
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            raise Unavailable(f"{program} is not installed")
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.rmtree(HOME / "build", ignore_errors=True)
    command = ("download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    archives = HOME / "archives"
    _call(PYTHON, "-m", "pip", *command, LLAMA, "-d", archives, minutes=10, may_fail=True)
    found = sorted(archives.glob("llama_cpp_python-*.tar.gz"))
    if not found:
        raise Unavailable(f"{LLAMA} cannot be downloaded")
    with tarfile.open(found[-1]) as archive:
        archive.extractall(HOME, filter="data")
    (HOME / found[-1].name.removesuffix(".tar.gz")).rename(SOURCE)
    _call("cmake", "-S", SOURCE / "vendor/llama.cpp", "-B", HOME / "build", *OPTIONS, minutes=5)
    _call(
        "nice", "-n", "10", "cmake", "--build", HOME / "build", "--target", "llama", "-j", "2",
        minutes=BUILD_MINUTES,
    )  # fmt: skip
    done.write_text(LLAMA)


def variables() -> dict[str, str]:
    """Return the environment variables of a process that reads models."""
    lines = (ROOT / "docs/readers.md").read_text().partition("```python\n")[2].partition("```")[0]
    (HOME / "to_gguf.py").write_text(lines)
    convert = [str(PYTHON), str(HOME / "to_gguf.py")]
    convert += [str(SOURCE / "vendor/llama.cpp/convert_hf_to_gguf.py")]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {
        "PYTHONPATH": f"{SOURCE}:{ROOT}", "LLAMA_CPP_LIB_PATH": str(LIBRARY),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "READERS_CONVERT": json.dumps(convert),
    }  # fmt: skip


def _call(*command: object, minutes: float = 5, may_fail: bool = False) -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    log = HOME / "install.log"
    with open(log, "a") as file:
        try:
            done = subprocess.run(
                [*map(str, command)], stdout=file, stderr=file, timeout=minutes * 60, cwd=HOME
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{error}; see {log}") from None
    if done.returncode and not may_fail:
        raise Unavailable(f"{command[0]} {command[1]} ended with {done.returncode}; see {log}")
