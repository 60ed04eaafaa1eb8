"""The environment of all tests: no network or account, signals as in a terminal."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for name, value in {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "ZEROLM_CACHE": "off",
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
