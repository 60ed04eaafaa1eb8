"""What a rank looks for when it loads a checkpoint."""

import os
from pathlib import Path
from types import MethodType

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from zerolm.ds_files.checkpoints import names_without_lookups

NAMES = ("_get_all_ckpt_names", "_get_all_zero_checkpoint_names")
DERIVED = (
    "_get_ckpt_name",
    "_get_mp_rank_zero_checkpoint_names",
    "_get_rank_zero_ckpt_name",
    "_get_zero_ckpt_prefix",
)


class Engine:
    """The part of DeepSpeed's engine that finds files: of 3 replicas of 2 tensor-parallel ranks."""

    mp_world_size, checkpoint_mp_rank, loaded_checkpoint_dp_world_size = 2, 1, 3

    def __init__(self) -> None:
        for name in (*NAMES, *DERIVED):
            setattr(type(self), name, getattr(DeepSpeedEngine, name))

    def load_universal_checkpoint(self) -> bool:
        return False

    def zero_optimization_partition_weights(self) -> bool:
        return False


@pytest.mark.parametrize("bf16", [True, False])
def test_the_names_are_those_that_deepspeed_finds_and_no_file_is_looked_for(
    tmp_path, monkeypatch, bf16
) -> None:
    engine, directory = Engine(), tmp_path / "step"
    directory.mkdir()
    for tensor in range(2):
        (directory / f"mp_rank_{tensor:02d}_model_states.pt").touch()
        for replica in range(3):
            rank = f"zero_pp_rank_{replica}_mp_rank_{tensor:02d}_optim_states.pt"
            (directory / (f"bf16_{rank}" if bf16 else rank)).touch()

    def names() -> list[list[str]]:
        states = engine._get_all_zero_checkpoint_names(str(tmp_path), "step", bf16)
        return [engine._get_all_ckpt_names(str(tmp_path), "step"), states]

    found = names()
    assert [len(paths) for paths in found] == [2, 3]
    assert all(Path(path).exists() for paths in found for path in paths)
    with names_without_lookups(engine):
        assert not isinstance(engine._get_all_ckpt_names, MethodType)
        with monkeypatch.context() as patch:
            for name in ("exists", "isfile", "isdir", "lexists"):
                patch.setattr(os.path, name, None)
            patch.setattr(os, "scandir", None)
            assert names() == found
    assert isinstance(engine._get_all_ckpt_names, MethodType) and names() == found
