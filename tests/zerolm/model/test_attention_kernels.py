"""Attention without a fused kernel is found by trying it: on a CPU dropout takes it away."""

import pytest
import torch
from transformers import AutoConfig

from zerolm.model.attention import plain_attention_notice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_computes_all_scores_is_said_and_other_is_not(dtype, masked):
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    for dropout, plain in ((0.0, False), (0.1, True)):
        config = AutoConfig.for_model("llama", **sizes, attention_dropout=dropout)
        notice = plain_attention_notice(config, "cpu", dtype, document_mask=masked)
        assert (notice is not None) == plain
        if notice:
            assert "16 wide, with dropout" in notice and ("mask of documents" in notice) == masked
