"""The environment of all tests: no network or account, signals as in a terminal, no stale locks."""

import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

for name, value in {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)
# Tests start hundreds of processes, each of which would compile this project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A suite that nohup or a script started in the background ignores these, and so would every run.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
extensions = Path(sys.prefix, "torch_extensions")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions))
# A rank that is killed while it builds an operator leaves a lock, for which the next run would wait
# forever. A build takes two minutes; a younger lock may belong to a concurrent run.
STALE_SECONDS = 600
for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
    if time.time() - lock.stat().st_mtime > STALE_SECONDS:
        lock.unlink()
# Tests kill ranks that hold such a lock, so each pytest process uses its own copy.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    shared = os.environ["TORCH_EXTENSIONS_DIR"]
    private = f"{shared}-{worker}"
    shutil.rmtree(private, ignore_errors=True)
    if Path(shared).is_dir():
        shutil.copytree(shared, private, ignore=shutil.ignore_patterns("lock"))
    os.environ["TORCH_EXTENSIONS_DIR"] = private


# Collecting tests makes a million objects that stay: looking for garbage takes a fifth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files whose tests wait most of the time, so that none is left alone at the end."""
    items.sort(key=lambda item: "zerolm/watchdog" not in item.nodeid)


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Undo what commands set that run in this process; forked workers would inherit it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
