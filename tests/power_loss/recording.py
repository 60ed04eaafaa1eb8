"""Records what processes do to the files below a directory; `recorder.c` is loaded into them."""

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from tests import ROOT

SOURCE = ROOT / "tests" / "power_loss" / "recorder.c"
HEAD = struct.Struct("<BQIIQ")
KINDS = {
    "c": "create", "m": "make directory", "w": "write", "t": "truncate", "s": "sync",
    "r": "rename", "u": "remove", "l": "link", "y": "symlink",
}  # fmt: skip


class Operation(NamedTuple):
    """One operation that has succeeded. Paths are relative to the recorded directory.

    Attributes:
        kind: a key of `KINDS`.
        offset: of a write; the new size of a truncation.
        other: the new name of a rename or link, the target of a symlink.
    """

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


class Recorder:
    """Environment variables that make processes record, and what they have recorded.

    Args:
        work: where the library and the log are written, outside of the directory.
        directory: must exist.
    """

    def __init__(self, work: Path, directory: Path):
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        self.directory, self.log = directory, work / "operations.log"
        library = work / "recorder.so"
        command = [compiler, "-shared", "-fPIC", "-O2", "-w", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.variables = {
            "RECORDED_FILES": str(directory), "RECORDED_LOG": str(self.log),
            "LD_PRELOAD": str(library),
        }  # fmt: skip

    def operations(self) -> list[Operation]:
        return list(_parsed(self.log.read_bytes(), self.directory))


def _parsed(content: bytes, directory: Path) -> Iterator[Operation]:
    at = 0
    while at < len(content):
        kind, offset, path_size, other_size, data_size = HEAD.unpack_from(content, at)
        at += HEAD.size
        parts = []
        for size in (path_size, other_size, data_size):
            parts.append(content[at : at + size])
            at += size
        kind = chr(kind)
        path, other = (part.decode() for part in parts[:2])
        assert kind != "x", f"{path}: written in a way that is not recorded"
        if path.endswith(" (deleted)"):
            continue  # a file without a name is not there after a power loss
        if kind in "rl":
            other = _relative(other, directory)
        yield Operation(kind, _relative(path, directory), other, offset, parts[2])


def _relative(path: str, directory: Path) -> str:
    return str(PurePosixPath(path).relative_to(directory))
