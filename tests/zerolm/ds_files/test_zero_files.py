"""Weights read from files like those that DeepSpeed writes."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zerolm.common.errors import CheckpointError
from zerolm.ds_files.zero_files import Weights


def test_frozen_parameters_of_stage_3_are_joined_from_the_files_of_all_ranks(tmp_path):
    """They have no master, and the module's state has an empty tensor in their place."""
    frozen, trained = torch.arange(7.0).view(7, 1), torch.arange(10.0, 14.0)
    padded = torch.cat([frozen.flatten(), torch.zeros(1)])
    for rank in range(2):
        state = {
            "module": {"table": torch.empty(0), "weight": torch.empty(0)},
            "param_shapes": [{"weight": trained.shape}],
            "frozen_param_shapes": {"table": frozen.shape},
            "frozen_param_fragments": {"table": padded.view(2, 4)[rank]},
            "shared_params": {},
            "buffer_names": [],
        }
        torch.save(state, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        shard = {
            "fp32_flat_groups": [trained.view(2, 2)[rank]],
            "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0]}]},
        }
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": shard}, path)
    weights = Weights(tmp_path, {"world_size": 2, "zero_stage": 3})
    assert torch.equal(weights["weight"], trained)
    assert torch.equal(weights["table"], frozen)


MODEL, SHARD = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
SHAPE = torch.Size([2, 3])


def write_stage_2(directory: Path) -> None:
    model = {
        "module": {"weight": torch.zeros(SHAPE), "table": torch.arange(3)},
        "param_shapes": [{"weight": SHAPE}],
        "shared_params": {},
        "buffer_names": ["table"],
    }
    base = {"state": {}, "param_groups": [{"params": [0]}]}
    shard = {
        "single_partition_of_fp32_groups": [torch.arange(6.0)],
        "base_optimizer_state": base,
    }
    torch.save(model, directory / MODEL)
    torch.save({"optimizer_state_dict": shard}, directory / SHARD)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    weights = Weights(directory, {"world_size": 1, "zero_stage": 2})
    return {name: weights[name] for name in weights.listed}


def changed(value: Any, *keys: Any, new: Any) -> Any:
    """Return a nested dict or list with another value, or without the key if it is `...`."""
    if not keys:
        return new
    copy = value.copy()
    copy[keys[0]] = changed(value[keys[0]], *keys[1:], new=new)
    if copy[keys[0]] is ...:
        del copy[keys[0]]
    return copy


STATE = "optimizer_state_dict"
MASTERS = (STATE, "single_partition_of_fp32_groups")
OTHER_CONTENT = [
    *((file, (), value) for file in (MODEL, SHARD) for value in (None, 7, "text", [], {}, [1], ())),
    *((MODEL, (key,), new) for key in ("param_shapes", "module") for new in (..., None, 1, "ab")),
    (MODEL, ("param_shapes",), [{"weight": (2, 3)}]),
    (MODEL, ("param_shapes",), [{"weight": torch.Size([200, 3])}]),
    (MODEL, ("shared_params",), 3),
    (MODEL, ("shared_params",), {"weight": "none"}),
    (MODEL, ("buffer_names",), ["absent"]),
    (MODEL, ("module", "table"), "text"),
    *((SHARD, MASTERS, new) for new in (..., None, [], [None], {}, [torch.ones(1)], torch.ones(6))),
    (SHARD, MASTERS, [torch.arange(6)]),
    (SHARD, MASTERS, [torch.ones(2, 3)]),
    (SHARD, MASTERS, [torch.tensor(1.0)]),
    (SHARD, (STATE, "base_optimizer_state"), ...),
    (SHARD, (STATE, "base_optimizer_state"), {"param_groups": [{}]}),
]


@pytest.mark.parametrize(("file", "keys", "new"), OTHER_CONTENT)
def test_data_that_is_no_checkpoint_is_refused_in_a_sentence(tmp_path, file, keys, new):
    write_stage_2(tmp_path)
    assert torch.equal(read_all(tmp_path)["weight"], torch.arange(6.0).view(SHAPE))
    torch.save(changed(torch.load(tmp_path / file), *keys, new=new), tmp_path / file)
    with pytest.raises(CheckpointError, match="not contain the data of a checkpoint"):
        read_all(tmp_path)


def raw_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def old_format(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def evil(path: Path) -> None:
    torch.save({"a": path.chmod}, path)


@pytest.mark.parametrize("file", [MODEL, SHARD])
@pytest.mark.parametrize(
    "write",
    [raw_pickle, old_format, cut, evil, lambda path: path.write_text("hello " * 100),
     lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99))],
)  # fmt: skip
def test_no_file_of_another_kind_is_read(tmp_path, file: str, write: Callable[[Path], None]):
    """And no refusal repeats torch's advice to load it without restrictions."""
    write_stage_2(tmp_path)
    write(tmp_path / file)
    with pytest.raises(CheckpointError, match="was not loaded") as refusal:
        read_all(tmp_path)
    assert "weights_only" not in str(refusal.value) and file in str(refusal.value)
