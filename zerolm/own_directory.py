"""Directories among the temporary files that are this user's alone. Standard library only.

Their names can be guessed, and whoever makes one first owns it: what lies there would be read, and
what a link there points to would be overwritten. So one that belongs to somebody else, or that
others may write to, is not used.
"""

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def own_directory(name: str) -> Path:
    """Return the place of this user's directory of that name; it need not be there."""
    return Path(tempfile.gettempdir()) / f"zerolm-{name}-{os.getuid()}"


def own_problem(directory: Path) -> str | None:
    """Say why a directory cannot be this user's; None if it can, or is not there."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        return "is no directory, or a link to one"
    if found.st_uid != os.getuid():
        return f"belongs to another user ({found.st_uid})"
    if found.st_mode & 0o022:
        return f"may be written by others (mode {found.st_mode & 0o777:o})"
    return None


def make_own(directory: Path) -> None:
    """Make a directory for this user alone, unless it is there.

    Raises:
        PermissionError: it is there, and not this user's.
    """
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if problem := own_problem(directory):
        raise PermissionError(f"{directory} {problem}")
