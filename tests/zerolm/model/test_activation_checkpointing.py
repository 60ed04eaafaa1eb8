"""Recomputed activations are those of the forward pass."""

import pytest
import torch
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3, zero3_linear_wrap
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launching import LLAMA
from zerolm.config.settings import SELECTIVE
from zerolm.engine.zero3_hooks import fit_zero3_to_recomputation
from zerolm.model.activation_checkpointing import checkpoint_kwargs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_zero3_selective_checkpointing_adds_biases_once(monkeypatch, dtype) -> None:
    forward = LinearFunctionForZeroStage3.forward
    config = AutoConfig.for_model(**LLAMA | {"model_type": "qwen2"})
    ids = torch.arange(32).view(2, 16)

    def gradients(recompute) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first
                torch.nn.init.normal_(parameter.data)
        if recompute:
            model.gradient_checkpointing_enable(checkpoint_kwargs(recompute))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)
    monkeypatch.setattr(LinearFunctionForZeroStage3, "forward", staticmethod(forward))
    expected = gradients(False)
    fit_zero3_to_recomputation()
    for recompute in (False, True, SELECTIVE):
        assert all(map(torch.equal, gradients(recompute), expected)), recompute
