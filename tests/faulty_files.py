"""Directories and a clock that misbehave, for processes that a test starts.

`faulty_files.c` is loaded into them (LD_PRELOAD); its first comment lists what it can do.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

SOURCE = ROOT / "tests" / "faulty_files.c"


class FaultyFiles:
    """The faults of a directory.

    Args:
        work: where the library and the control file are written.
        directory: the directory, which need not exist.
    """

    def __init__(self, work: Path, directory: Path):
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        self.control, library = work / "control", work / "faulty_files.so"
        command = [compiler, "-shared", "-fPIC", "-O2", "-w", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.set()
        self.variables = {
            "FAULTY_FILES": str(directory),
            "FAULTY_CONTROL": str(self.control),
            "LD_PRELOAD": str(library),
        }

    def set(self, **faults: float) -> None:
        """Replace the faults; none are left without arguments."""
        text = " ".join(f"{name} {value}" for name, value in faults.items())
        temporary = self.control.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.control)
