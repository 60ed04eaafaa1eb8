"""Read checkpoint files with torch's restricted unpickler, so that they cannot run code.

Unpickling can call arbitrary functions. These files may contain only what torch's `weights_only`
allows and the four DeepSpeed classes below; any other class is refused by name. Checksums are
verified earlier, in zerolm/checkpoint/load.py.
"""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolm.common.errors import CheckpointError, reason

ZIP = b"PK\x03\x04"
NO_FILE_OF_TORCH = "was not written by torch.save, and was not loaded"
OTHER_CONTENT = "does not contain the data of a checkpoint for this run"
NOT_DATA = "is damaged, or contains objects that are not allowed, and was not loaded"
GETATTR = "builtins.getattr"
FIX = "zerolm did not write this file. Restore the checkpoint from a copy, or use an earlier one."


def pickle_problems(path: str | Path) -> list[str]:
    """Return a list with a problem if a file written by `torch.save` contains disallowed classes.

    Unpickles nothing.
    """
    import torch

    if not _is_file_of_torch(path):
        return [f"{path}: {NO_FILE_OF_TORCH}. {FIX}"]
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _allowed_classes()} | {GETATTR}
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:  # the parser may raise any exception for a damaged file
        return [f"{path}: {NOT_DATA}: {_why(error)}. {FIX}"]
    unsafe = sorted(set(found) - names)
    return [f"{path}: {NOT_DATA}: {', '.join(unsafe)}. {FIX}"] if unsafe else []


def read_data(path: str | Path, *, mapped: bool = False) -> Any:
    """Return the content of a file written by `torch.save`, with tensors on the CPU.

    Args:
        mapped: memory-map the file (copy-on-write), so only accessed pages are read.
    """
    import torch

    if not _is_file_of_torch(path):
        raise CheckpointError(f"{path}: {NO_FILE_OF_TORCH}. {FIX}")
    try:
        with torch.serialization.safe_globals([*_allowed_classes(), (_member, GETATTR)]):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # the unpickler may raise any exception for a damaged file
        raise CheckpointError(f"{path}: {NOT_DATA}: {_why(error)}. {FIX}") from error


@contextmanager
def interpreted(path: str | Path) -> Iterator[None]:
    """Inside this context, report errors caused by data that DeepSpeed did not write as a
    CheckpointError.

    Args:
        path: file or checkpoint to name in the message.

    Raises:
        CheckpointError: the data is invalid; raised only on this rank.
    """
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            raise
        refusal = CheckpointError(f"{path}: {OTHER_CONTENT} ({reason(error)}). {FIX}")
        refusal.on_all_ranks = False
        raise refusal from error


def _is_file_of_torch(path: str | Path) -> bool:
    """Return whether a file is a zip archive, the format of `torch.save` since torch 1.6."""
    with open(path, "rb") as file:
        return file.read(len(ZIP)) == ZIP


def _why(error: Exception) -> str:
    """Return a torch error message on one line, without the advice to load the file unsafely."""
    names = re.findall(r"GLOBAL (\S+) was not an allowed", str(error))
    member = re.search(r"getattr\(.*?\)", str(error))
    return ", ".join(names) or (member[0] if member else type(error).__name__)


def _allowed_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _member(kind: Any, name: str) -> Any:
    """Return a member of DeepSpeed's enum, which Python 3.11.0 to 3.11.3 pickles as a getattr call.

    Debian 12 has 3.11.2. Called for every `getattr` in a file; refuses any other attribute.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is ZeroStageEnum and name in ZeroStageEnum.__members__:
        return ZeroStageEnum[name]
    raise pickle.UnpicklingError(f"getattr({kind!r}, {name!r}).")
