"""Read the files of a checkpoint as data, never as code.

Python's pickle can run anything. A checkpoint's files are compared with the manifest's checksums
before they come here, and here torch's restricted reader takes them: tensors, containers, numbers,
and the few classes below that DeepSpeed writes. Any other class is refused by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolm.errors import CheckpointError


def read_data(path: str | Path, *, mapped: bool = False) -> Any:
    """Return the content of a file that torch.save has written, on the host.

    Args:
        mapped: tensors are views of the mapped file: only what is looked at is read, and nothing
            of it may be written to.

    Raises:
        CheckpointError: the file holds something else than data.
    """
    import pickle

    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0].strip()
        raise CheckpointError(
            f"{path}: holds more than tensors and numbers, and was not read: {reason}. It is not "
            f"a file that this program has written: restore the checkpoint."
        ) from error


@contextmanager
def only_data(engine: Any) -> Iterator[None]:
    """Have DeepSpeed read checkpoints through `read_data` while inside."""
    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: read_data(path)
    try:
        yield
    finally:
        del reader.load  # the class's own is there again
