"""Save and load checkpoints with DeepSpeed's engine (0.19.8), bypassing its own file access.

Saving passes the engine's state to a function instead of writing it. Loading uses the restricted
unpickler and does not make every rank search for the files.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerolm.ds_files.safe_load import read_data
from zerolm.engine import experts, replaced, stages
from zerolm.engine.states import update_weights


class _CapturingEngine:
    """DeepSpeed checkpoint engine that captures the state to be saved and writes no files.

    Loading uses the original engine.
    """

    def __init__(self, original: Any, capture: Callable[[Any, str], None]):
        self._original, self._capture = original, capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create(self, info: Any) -> None:
        """Do nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the writer creates directories."""

    def save(self, state_dict: Any, path: str) -> None:
        self._capture(state_dict, path)

    def commit(self, info: Any) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # DeepSpeed need not clone: `HostCopy` copies only the values in the view


def capture_saves(engine: Any, capture: Callable[[Any, str], None]) -> None:
    """Make an engine pass (state, file path) to `capture` whenever it saves, permanently.

    The engine then writes no files, except for states on NVMe.
    """
    capturing = _CapturingEngine(engine.checkpoint_engine, capture)
    replaced.install(engine, "checkpoint_engine", capturing)
    # `uncaptured_files` copies the script
    replaced.install(engine, "_copy_recovery_script", lambda path: None)


def save(engine: Any, directory: Path) -> None:
    """Make an engine save into a directory. Every rank must call this; it starts with a barrier.

    Raises:
        OSError: DeepSpeed failed to copy the files of states on NVMe.
    """
    with experts.unrecognized(engine):
        engine.save_checkpoint(
            str(directory.parent), tag=directory.name, save_latest=False,
            client_state={
                **experts.description(engine.module), **stages.description(engine.module)
            },
        )  # fmt: skip


def uncaptured_files(directory: Path, rank: int) -> list[Path]:
    """Return the files of a rank's save that `capture` does not receive: NVMe states,
    zero_to_fp32.py.

    zero_to_fp32.py is copied into the directory first.
    """
    states = directory / "offloaded_tensors" / f"rank{rank}"
    files = [path for path in sorted(states.rglob("*")) if path.is_file()]
    if rank == 0:
        from deepspeed.utils import zero_to_fp32

        script = directory / "zero_to_fp32.py"
        files.append(shutil.copyfile(zero_to_fp32.__file__, script))
    return files


@contextmanager
def saving_parts(engine: Any, *, weights: bool, states: bool) -> Iterator[None]:
    """Make an engine save only some of this rank's state inside this context.

    Args:
        weights: also save the weights on ranks that DeepSpeed would not save them on.
        states: save the optimizer states.
    """
    saves = engine.save_non_zero_checkpoint, engine.save_zero_checkpoint
    engine.save_non_zero_checkpoint, engine.save_zero_checkpoint = saves[0] or weights, states
    yield
    engine.save_non_zero_checkpoint, engine.save_zero_checkpoint = saves


def load(engine: Any, directory: Path) -> bool:
    """Load a verified checkpoint with the same topology; return whether DeepSpeed found one.

    At stages 1 and 2, where one file has the weights of all ranks, they are then computed from the
    master weights, so a rank whose weights are not in that file has its own. Every rank must call
    this.
    """
    with safe_loading(engine), names_without_lookups(engine), experts.unrecognized(engine):
        path, _ = engine.load_checkpoint(str(directory.parent), tag=directory.name)
    if path is not None and engine.zero_optimization_stage() < 3:
        update_weights(engine)
    return path is not None


@contextmanager
def safe_loading(engine: Any) -> Iterator[None]:
    """Make DeepSpeed's engine read checkpoint files with `read_data` inside this context."""
    reader = engine.checkpoint_engine
    with replaced.installed(reader, "load", lambda path, map_location=None: read_data(path)):
        yield


@contextmanager
def names_without_lookups(engine: Any) -> Iterator[None]:
    """Inside this context, make DeepSpeed's engine assume that all files of a checkpoint exist.

    The files have been verified. By default, every rank would list the directory and look up the
    files of all ranks: 16.8 million calls at 4,096 ranks.
    """

    def of_weights(load_dir: str, tag: str) -> list[str]:
        ranks = range(engine.mp_world_size)
        return [engine._get_ckpt_name(load_dir, tag, f"{rank:02d}") for rank in ranks]

    def of_states(load_dir: str, tag: str, bf16_mode: bool) -> list[str]:
        size = engine.loaded_checkpoint_dp_world_size
        return engine._get_mp_rank_zero_checkpoint_names(
            load_dir, tag, engine.checkpoint_mp_rank, size, bf16_mode
        )

    with (
        replaced.installed(engine, "_get_all_ckpt_names", of_weights),
        replaced.installed(engine, "_get_all_zero_checkpoint_names", of_states),
    ):
        yield
