"""Compares what is exported from a run whose ranks have different parameters with the curve of a
whole model.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from zerolm.__main__ import main


def require_whole(run_dir: Path, exported: Path, curve: Sequence[Any]) -> None:
    """Require that a run's last export has the norm of the reference's weights, and that a merged
    model has the same tensors.
    """
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    squares = sum(float(each.detach().double().square().sum()) for each in model.parameters())
    assert math.sqrt(squares) == pytest.approx(curve[-1].param_norms[""], rel=1e-6)
    merged = exported.with_name("merged")
    assert main(["merge", str(run_dir), str(merged), "--precision", "fp32"]) == 0
    one, both = (load_file(path / "model.safetensors") for path in (exported, merged))
    assert one.keys() == both.keys() and all(one[key].shape == both[key].shape for key in one)
