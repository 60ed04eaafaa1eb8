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
FIX = "zerolm did not write this file. Restore the checkpoint from a copy, or use an earlier one."


def pickle_problems(path: str | Path) -> list[str]:
    """Return a line if a file of `torch.save` contains a class that is not allowed.

    Unpickles nothing.
    """
    import torch

    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in _allowed_classes()}
    unsafe = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - names)
    return [f"{path}: {NOT_DATA}: {', '.join(unsafe)}. {FIX}"] if unsafe else []


def read_data(path: str | Path, *, mapped: bool = False) -> Any:
    """Return the content of a file of `torch.save`, with tensors on the CPU.

    Args:
        mapped: memory-map the file (copy-on-write), so that only the pages in use are read.

    Raises:
        CheckpointError: the file holds a class that is not allowed.
    """
    import torch

    try:
        with torch.serialization.safe_globals(_allowed_classes()):
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0].strip()
        raise CheckpointError(f"{path}: {NOT_DATA}: {reason} {FIX}") from error


def _allowed_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def safe_loading(engine: Any) -> Iterator[None]:
    """Make DeepSpeed's engine read checkpoint files with `read_data` inside this context.

    It also takes the names of the files from its own rules. DeepSpeed 0.19 searches the directory
    for them, and asks on each rank whether the file of every other rank exists: with 4,096 ranks 17
    million calls. The manifest has been compared with the directory before.
    """

    def zero_names(load_dir: str, tag: str, bf16_mode: bool) -> list[str]:
        return engine._get_mp_rank_zero_checkpoint_names(
            load_dir=load_dir,
            tag=tag,
            mp_rank=engine.checkpoint_mp_rank,
            dp_world_size=engine.loaded_checkpoint_dp_world_size,
            bf16_mode=bf16_mode,
        )

    def model_names(load_dir: str, tag: str) -> list[str]:
        names = (f"{rank:02d}" for rank in range(engine.mp_world_size))
        return [engine._get_ckpt_name(load_dir, tag, mp_placeholder=name) for name in names]

    reader = engine.checkpoint_engine
    reader.load = lambda path, map_location=None: read_data(path)
    engine._get_all_zero_checkpoint_names = zero_names
    engine._get_all_ckpt_names = model_names
    try:
        yield
    finally:
        # The methods of the classes are found again.
        del reader.load, engine._get_all_zero_checkpoint_names, engine._get_all_ckpt_names
