"""A checkpoint file whose pickle holds more than data is refused, and its code does not run."""

import os
from pathlib import Path

import pytest
import torch

from zerolm.common.errors import CheckpointError
from zerolm.ds_files import safe_load
from zerolm.ds_files.checkpoints import safe_loading


class Malicious:
    """Unpickling it would call `os.mkdir`."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("mapped", [False, True])
def test_pickle_with_a_call_is_refused_and_not_executed(tmp_path, mapped) -> None:
    path, mark = tmp_path / "model_states.pt", tmp_path / "mark"
    torch.save({"module": {"weight": torch.ones(3)}, "more": Malicious(mark)}, path)
    assert (
        "posix.mkdir" in safe_load.pickle_problems(path)[0]
        and str(path) in (safe_load.pickle_problems(path)[0])
    )
    with pytest.raises(CheckpointError, match=r"model_states\.pt: is damaged, or contains objects"):
        safe_load.read_data(path, mapped=mapped)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "unpickling runs the call"


def test_files_of_deepspeed_are_accepted(tmp_path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    path = tmp_path / "optim_states.pt"
    scaler = DynamicLossScaler(2**16, 2.0, 1000, 1.0, 1, False, False)
    written = {
        "loss_scaler": scaler,
        "zero_stage": ZeroStageEnum.weights,
        "slices": [{"w": fragment_address(3, 4)}],
        "shape": torch.Size([2, 3]),
        "flat": torch.arange(5.0),
    }
    torch.save(written, path)
    assert safe_load.pickle_problems(path) == []
    for mapped in (False, True):
        read = safe_load.read_data(path, mapped=mapped)
        assert read["zero_stage"] is ZeroStageEnum.weights
        assert read["loss_scaler"].cur_scale == 2**16
        assert read["slices"] == written["slices"] and torch.equal(read["flat"], written["flat"])


class Attribute:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the member of an enumeration."""

    def __init__(self, kind: type, name: str):
        self.pair = kind, name

    def __reduce__(self):
        return getattr, self.pair


def test_members_of_deepspeeds_enumeration_are_the_only_attributes(tmp_path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    path = tmp_path / "optim_states.pt"
    torch.save({"zero_stage": Attribute(ZeroStageEnum, "gradients")}, path)
    assert safe_load.pickle_problems(path) == []
    assert safe_load.read_data(path) == {"zero_stage": ZeroStageEnum.gradients}
    for kind, name in ((ZeroStageEnum, "__class__"), (LossScaler, "backward")):
        torch.save({"zero_stage": Attribute(kind, name)}, path)
        with pytest.raises(CheckpointError, match="objects that are not allowed"):
            safe_load.read_data(path)


def test_deepspeed_reads_safely_inside_the_context_only(tmp_path) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Engine:
        checkpoint_engine = TorchCheckpointEngine()

    path, mark = tmp_path / "states.pt", tmp_path / "mark"
    torch.save(Malicious(mark), path)
    with safe_loading(Engine), pytest.raises(CheckpointError):
        Engine.checkpoint_engine.load(path, map_location="cpu")
    assert not mark.exists()
    Engine.checkpoint_engine.load(path, map_location="cpu")
    assert mark.exists(), "DeepSpeed's own reader runs the call"
