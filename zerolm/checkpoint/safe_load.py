"""Read checkpoint files with torch's restricted unpickler, so that they cannot run code.

Unpickling may call any function. These files may hold only what torch's `weights_only` allows and
the four classes of DeepSpeed below; any other class is refused by name. Checksums are compared
before, in zerolm/checkpoint/load.py.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolm.common.errors import CheckpointError

NOT_DATA = "is damaged, or contains objects that are not allowed, and was not loaded"
GETATTR = "builtins.getattr"
FIX = "zerolm did not write this file. Restore the checkpoint from a copy, or use an earlier one."


def pickle_problems(path: str | Path) -> list[str]:
    """Return a line if a file of `torch.save` contains a class that is not allowed.

    Unpickles nothing.
    """
    import torch

    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _allowed_classes()} | {GETATTR}
    unsafe = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - names)
    return [f"{path}: {NOT_DATA}: {', '.join(unsafe)}. {FIX}"] if unsafe else []


def read_data(path: str | Path, *, mapped: bool = False) -> Any:
    """Return the content of a file of `torch.save`, with tensors on the CPU.

    Args:
        mapped: memory-map the file (copy-on-write), so that only the pages in use are read.
    """
    import torch

    try:
        with torch.serialization.safe_globals([*_allowed_classes(), (_member, GETATTR)]):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0].strip()
        raise CheckpointError(f"{path}: {NOT_DATA}: {reason} {FIX}") from error


def _allowed_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _member(kind: Any, name: str) -> Any:
    """Return a member of DeepSpeed's enumeration, which Python 3.11.0 to 3.11.3 pickles by getattr.

    Debian 12 has 3.11.2. Called for every `getattr` in a file; any other is refused.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is ZeroStageEnum and name in ZeroStageEnum.__members__:
        return ZeroStageEnum[name]
    raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}).")


@contextmanager
def safe_loading(engine: Any) -> Iterator[None]:
    """Make DeepSpeed's engine read checkpoint files with `read_data` inside this context."""
    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: read_data(path)
    try:
        yield
    finally:
        del reader.load  # the method of its class is found again
