"""What a program may not do with any input: hang, take much memory, write elsewhere, start others.

`guarded` also captures what it prints. Uses an audit hook of Python, which sees every file that is
opened or changed from Python in this process.
"""

import contextlib
import gc
import io
import os
import re
import resource
import signal
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolm.__main__ import main
from zerolm.common.values import JOINERS, UNPRINTABLE

HANG_SECONDS = 20.0  # of CPU time; most inputs take milliseconds
WAIT_SECONDS = 300.0  # in all, on a busy machine
REPEAT_SECONDS = 5.0  # for a program that catches it
MEMORY_BYTES = 1 << 30  # that one input may take
ADDRESS_BYTES = 8 << 30  # that all may add to its addresses
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # {audit event: places of its paths, each with its dir_fd or None}
    "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)), "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),), "os.symlink": ((1, 2),), "os.link": ((1, 3),), "os.chmod": ((0, 2),),
    "os.truncate": ((0, None),), "shutil.rmtree": ((0, 1),),
}  # fmt: skip
PROCESSES = {"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty"}
NETWORK = {"socket.connect", "socket.sendto", "socket.getaddrinfo"}
ELSEWHERE = ("/dev/null", "/dev/tty")
CACHES = ("__pycache__", "matplotlib")


class Hang(BaseException):
    """A program takes too long. No `except Exception` stops it."""


class _Watch:
    installed = False
    inside: Path | None = None
    seen: list[str]


@contextlib.contextmanager
def guarded(inside: Path) -> Iterator[io.BytesIO]:
    """Run programs that may write below a directory only; yields what they print.

    Raises:
        AssertionError: they did what they must not.
    """
    output = io.BytesIO()
    stream = io.TextIOWrapper(output, encoding="utf-8", errors="surrogateescape",
                              write_through=True)  # fmt: skip
    before = _restarted_peak()
    temporary = inside.with_name("tmp")
    try:
        with (
            _limits(), _watched(inside) as seen, _temporary_files(temporary),
            contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream),
        ):  # fmt: skip
            yield output
    except Hang as hang:
        raise AssertionError(f"hangs: {hang}") from None
    assert not seen, f"reaches outside of its directory: {seen[:5]}"
    grown = _memory("VmHWM") - before
    assert grown < MEMORY_BYTES, f"took {grown >> 20} MiB of memory"
    text = output.getvalue().decode("utf-8", "surrogateescape")
    assert not (bad := unprintable(text, "\n\t\r")), f"prints {bad}: {text[-500:]!r}"
    stream.detach()


def unprintable(text: str, kept: str = "\n\t") -> set[str]:
    """Return the characters of a text that a terminal must not get."""
    allowed = kept + JOINERS
    return {c for c in text if unicodedata.category(c) in UNPRINTABLE and c not in allowed}


def call(*words: object) -> tuple[int, str]:
    """Run a command of zerolm in this process; return its exit code and all of its output."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    handler = signal.getsignal(signal.SIGTERM)  # `zerolm data` replaces it, and freezes objects
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main([str(word) for word in words])
    signal.signal(signal.SIGTERM, handler)
    gc.unfreeze()
    text = output.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert not (bad := unprintable(text, "\n\t\r")), f"{words} prints {bad}: {text[-500:]!r}"
    return code, text


def snapshot(base: Path) -> dict[str, Any]:
    found = {}
    for path in base.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_size)
    return found


def _restarted_peak() -> int:
    """Measure the peak of the memory from now on; return what this process has now, in bytes."""
    with contextlib.suppress(OSError):  # without it, the peak is that of the process
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmHWM")


def _memory(name: str) -> int:
    (line,) = re.findall(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) << 10


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Limit the time and the addresses of this process."""

    running = True

    def expired(number: int, _: object) -> None:
        if running:
            raise Hang(f"more than {HANG_SECONDS} s of CPU time, or {WAIT_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, HANG_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAIT_SECONDS),
    )
    before = [signal.signal(number, expired) for number, _, _ in limits]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESS_BYTES, hard))
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds, REPEAT_SECONDS)
    try:
        try:
            yield
        finally:
            running = False
    finally:  # also if a timer ends here
        for (number, timer, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _temporary_files(directory: Path) -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _watched(inside: Path) -> Iterator[list[str]]:
    if not _Watch.installed:
        _Watch.installed = True
        sys.addaudithook(_audit)
    _Watch.inside, _Watch.seen = inside.parent, []
    try:
        yield _Watch.seen
    finally:
        _Watch.inside = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _Watch.inside is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITES and not os.path.isdir(path):  # noqa: PTH112
            _note(event, path, None)
    elif event in CHANGES:
        for place, directory in CHANGES[event]:
            fits = directory is not None and directory < len(arguments)
            _note(event, arguments[place], arguments[directory] if fits else None)
    elif event in PROCESSES or event in NETWORK:
        _Watch.seen.append(f"{event} {arguments[:2]!r}"[:200])


def _note(event: str, path: Any, directory: Any) -> None:
    """Note a change of a file outside of the directory."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # a descriptor, which was opened
    text = os.fsdecode(path)
    if isinstance(directory, int) and directory >= 0:
        with contextlib.suppress(OSError):
            text = str(Path(f"/proc/self/fd/{directory}").readlink() / text)
    text = os.path.abspath(text)  # noqa: PTH100 - `resolve` would follow links
    outside = not Path(text).is_relative_to(_Watch.inside or "/")
    if outside and text not in ELSEWHERE and not any(name in text for name in CACHES):
        _Watch.seen.append(f"{event} {text}")
