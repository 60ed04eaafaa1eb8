"""Read the files of a checkpoint as data, never as code.

Python's pickle can run anything. A checkpoint's files are compared with the manifest's checksums
before they come here, and here torch's restricted reader takes them: tensors, containers, numbers,
and the few classes below that DeepSpeed writes. Any other class is refused by name.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolm.common.errors import CheckpointError

STRANGE = "holds more than tensors and numbers, and was not opened"
REMEDY = "This program has not written it: restore the checkpoint."


def problems_of(path: str | Path) -> list[str]:
    """Say what a file of torch.save's holds besides data, without making any of it."""
    import torch

    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _known()}
    strange = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - names)
    return [f"{path}: {STRANGE}: {', '.join(strange)}. {REMEDY}"] if strange else []


def read_data(path: str | Path, *, mapped: bool = False) -> Any:
    """Return the content of a file that torch.save has written, on the host.

    Args:
        mapped: tensors are views of the mapped file: only what is looked at is read, and nothing
            of it may be written to.

    Raises:
        CheckpointError: the file holds something else than data.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_known()):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0].strip()
        raise CheckpointError(f"{path}: {STRANGE}: {reason} {REMEDY}") from error


def _known() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def only_data(engine: Any) -> Iterator[None]:
    """Have DeepSpeed read checkpoints through `read_data` while inside."""
    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: read_data(path)
    try:
        yield
    finally:
        del reader.load  # the class's own is there again
