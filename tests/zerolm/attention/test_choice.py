"""Unfused attention is detected by a trial: on a CPU there is no fused kernel with dropout."""

import pytest
import torch
from transformers import AutoConfig

from zerolm.attention.choice import unfused_attention_notice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_only_unfused_attention_gives_a_notice(dtype, masked):
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    for dropout, plain in ((0.0, False), (0.1, True)):
        config = AutoConfig.for_model("llama", **sizes, attention_dropout=dropout)
        notice = unfused_attention_notice(config, "cpu", dtype, document_mask=masked)
        assert (notice is not None) == plain
        if notice:
            assert "dimension 16, with dropout" in notice and ("document mask" in notice) == masked
