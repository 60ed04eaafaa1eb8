"""Look up, hash and sync files, write them atomically, and create directories private to this user.

Standard library only.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

HASH_CHUNK_BYTES = 1 << 22
# Pointers: small text files that replace files stored elsewhere. First line, program, remedy.
POINTERS = (
    (rb"version https://git-lfs\.github\.com/spec/.*", "Git LFS", "git lfs pull"),
    (rb"version https://hawser\.github\.com/spec/.*", "Git LFS", "git lfs pull"),
    (rb"(\S*\.git/(\S+/)?|/)annex/objects/\S+", "git-annex", "git annex get ."),
    (rb"# xet version .*", "Git-Xet", "git xet install && git lfs pull"),
)
MAX_POINTER_BYTES, MAX_POINTER_LINES = 1024, 12  # the first is Git LFS's limit
VISIBLE_SECONDS, VISIBLE_POLL_SECONDS = 75.0, 0.1  # acdirmax of nfs(5) is 60 s


def exists(path: str | Path) -> bool:
    """Return whether something has this name; a dangling link does not count.

    Since Python 3.14 `Path.exists`, `is_file` and `is_dir` return False for every error. Where a
    run's or a stage's state would then look as if it had never been written, use these functions.

    Raises:
        OSError: the path cannot be looked up (no permission, a failing disk, a stale file handle).
    """
    return _mode(path) != 0


def is_file(path: str | Path) -> bool:
    """Return whether this is a regular file. Raises: as `exists`."""
    return stat.S_ISREG(_mode(path))


def is_dir(path: str | Path) -> bool:
    """Return whether this is a directory. Raises: as `exists`."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: str | Path) -> int:
    """Return the mode of what a path leads to; 0 if there is nothing."""
    try:
        return Path(path).stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise


def sha256_file(path: str | Path) -> str:
    """Return the SHA-256 of a file in hex. The file is read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def file_entry(path: Path, directory: Path) -> dict[str, Any]:
    """Return a file's entry for the manifest in `directory`: relative path, size and SHA-256."""
    name = path.relative_to(directory).as_posix()
    return {"file": name, "size_bytes": path.stat().st_size, "sha256": sha256_file(path)}


def pointer_problem(content: bytes) -> str:
    """Return a message if the content of a file is a pointer to another file; otherwise ""."""
    if len(content) > MAX_POINTER_BYTES or content.count(b"\n") >= MAX_POINTER_LINES:
        return ""
    first = content.partition(b"\n")[0].rstrip(b"\r")
    for pattern, program, command in POINTERS:
        if re.fullmatch(pattern, first):
            return f"is a pointer of {program}, not the file itself. Fetch it: {command}"
    return ""


def pointer_problem_of(path: str | Path) -> str:
    """Return `pointer_problem` for the content of a file; "" if the file cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return pointer_problem(file.read(MAX_POINTER_BYTES + 1))
    return ""


def barrier(path: str | Path) -> Path:
    """Return the path whose permissions must change to access a path.

    This is the first directory that cannot be entered, if any; otherwise the path itself, or its
    directory if the path is accessible or missing.
    """
    path = Path(path)
    for directory in reversed(path.parents):
        if directory.exists() and not os.access(directory, os.X_OK):
            return directory
    is_open = not os.path.lexists(path) or os.access(path, os.R_OK | os.W_OK)
    return path.parent if is_open and path.parent.exists() else path


def require_writable(directory: str | Path) -> None:
    """Check that a directory can be created, by doing so in its nearest existing parent.

    Raises:
        OSError: no directory can be created there. `filename` is the existing parent.
    """
    existing = Path(directory)
    while not os.path.lexists(existing):
        existing = existing.parent
    try:  # os.access always returns True for root and on some read-only mounts
        Path(tempfile.mkdtemp(prefix=".zerolm-", dir=existing)).rmdir()
    except OSError as error:
        error.filename = str(existing)
        raise


def write_problem(path: Path) -> str | None:
    """Return why a file cannot be written, or None; for commands that write it only at the end."""
    directory = path.parent
    if not directory.is_dir():
        return f"{path}: {directory} is not a directory. Create it, or choose another."
    try:
        require_writable(directory)
    except OSError as error:
        return f"{path}: {directory} is not writable ({error.strerror}). Choose another directory."
    return None


def sync_directory(path: str | Path) -> None:
    """Make the creation and renaming of entries in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str | Path) -> None:
    """Make the content of a file durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    """Make a directory durable, including all files and directories below it."""
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
        elif path.is_file():
            sync_file(path)
    sync_directory(directory)


def make_directories(path: str | Path) -> None:
    """Durably create a directory and its missing parents.

    A file may be lost in a power failure if its directory's own entry was never synced.
    """
    path = Path(path).absolute()
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with contextlib.suppress(PermissionError):  # the parent is writable but not readable
            sync_directory(each.parent)


def set_default_modes(directory: Path) -> None:
    """Set the mode of all files in a new directory to the umask's default for new files.

    Libraries that write a temporary file and rename it keep the private mode from `mkstemp`
    (safetensors 0.8), and copies keep the mode of their source.
    """
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        probe = Path(scratch) / "probe"
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def wait_until_visible(path: Path, seconds: float = VISIBLE_SECONDS) -> bool:
    """Wait until a file written by another host is visible; return False after a timeout.

    An NFS client that looked up a name before the file existed may cache "no such file" for a
    minute.
    """
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # listing a directory makes the client query the server
        time.sleep(VISIBLE_POLL_SECONDS)
    return True


# ---- Atomic writes


def write_atomically(
    path: str | Path,
    content: bytes | memoryview | Callable[[BinaryIO], object],
    *,
    many_writers: bool = False,
    durable: bool = True,
) -> None:
    """Write a file so that readers see either the complete new content or the previous state.

    Classes that stream large files (`ShardWriter`, `StageWriter`) implement the same steps
    themselves.

    Args:
        content: the bytes to write, or a function that writes them to the open file.
        many_writers: whether other processes, possibly on other hosts, may write the same file at
            the same time. If such a writer is killed, its temporary file is left behind, since no
            other writer overwrites it.
        durable: whether to sync, so readers see one of the two even after a power failure.

    Raises:
        OSError: the file could not be written. It is unchanged or still absent.
    """
    path = Path(path)
    temporary = temporary_path(path) if many_writers else path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_json(path: str | Path, value: Any, *, many_writers: bool = False) -> None:
    """Write a value atomically and durably as JSON."""
    write_atomically(path, encode_json(value), many_writers=many_writers)


def encode_json(value: Any) -> bytes:
    """Return a value as indented JSON that ends in a newline."""
    text = json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n"
    return text.encode()


def temporary_path(path: Path) -> Path:
    """Return a temporary path next to `path` that no other writer uses."""
    return path.with_name(f"{path.name}.{attempt_token()}.tmp")


def attempt_token() -> str:
    """Return a name that is unique across processes, hosts and calls."""
    return f"{host_name()}-{os.getpid()}-{os.urandom(4).hex()}"


@functools.cache
def host_name() -> str:
    """Return this host's name, reduced to characters that are safe in file names."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32]


# ---- Directories that only this user can write


def private_directory(name: str) -> Path:
    """Return the path of this user's directory for `name` in the temporary directory."""
    return Path(tempfile.gettempdir()) / f"zerolm-{name}-{os.getuid()}"


def privacy_problem(directory: Path) -> str | None:
    """Return why a directory is not private to this user; None if it is private or missing."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        return "is not a directory, or is a symbolic link"
    if status.st_uid != os.getuid():
        return f"belongs to another user ({status.st_uid})"
    if status.st_mode & 0o022:
        return f"is writable by other users (mode {status.st_mode & 0o777:o})"
    return None


def make_private(directory: Path) -> None:
    """Create a directory that only this user can access, unless one exists.

    Raises:
        PermissionError: the directory exists but is not private to this user.
    """
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if problem := privacy_problem(directory):
        raise PermissionError(f"{directory} {problem}")
