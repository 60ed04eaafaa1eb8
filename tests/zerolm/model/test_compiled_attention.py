"""Compiled attention on a CPU: torch's output bit for bit, and the gradients of float32."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from zerolm.model import compiled_attention

MODULE = torch.nn.Module()
MODULE.num_key_value_groups = 2


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, as views, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    values = [torch.randn(2, 50, number, 8, generator=generator) for number in heads]
    *parts, gradient = [value.mul(3).to(dtype) for value in values]
    return [*(part.transpose(1, 2).requires_grad_() for part in parts), gradient]


def results(function, dtype: torch.dtype, **more) -> tuple[torch.Tensor, ...]:
    *parts, gradient = inputs(dtype)
    output = function(MODULE, *parts, more.pop("mask", None), **more)[0]
    return output.detach(), *torch.autograd.grad(output, parts, gradient)


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(compiled_attention, "MIN_CHUNK", 16)
    monkeypatch.setattr(compiled_attention, "DTYPES", (torch.float32, torch.bfloat16))
    torch._dynamo.reset()
    yield torch.compile(compiled_attention.attention, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


def test_the_output_is_torchs_and_the_gradients_are_as_close_to_those_of_float32(compiled):
    scaling = 0.2
    expected = results(sdpa_attention_forward, torch.float32, scaling=scaling)
    found = results(compiled, torch.float32, scaling=scaling)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    of_torch = results(sdpa_attention_forward, torch.bfloat16, scaling=scaling)
    found = results(compiled, torch.bfloat16, scaling=scaling)
    assert torch.equal(found[0], of_torch[0])
    parts = [part.float().detach().requires_grad_() for part in inputs(torch.bfloat16)[:3]]
    output = scaled_dot_product_attention(*parts, is_causal=True, scale=scaling, enable_gqa=True)
    gradient = inputs(torch.bfloat16)[3].float().transpose(1, 2)
    exact = torch.autograd.grad(output, parts, gradient)

    def error(gradients: tuple[torch.Tensor, ...]) -> float:
        pairs = zip(gradients, exact, strict=True)
        return sum(float((one - other).norm() / other.norm()) for one, other in pairs)

    assert error(found[1:]) < 1.2 * error(of_torch[1:])


def test_autocast_applies_as_in_torchs_function(compiled):
    """There rotary embeddings give queries and keys in float32, beside values in bf16."""

    def output_of(function):
        query, key, value, _ = inputs(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            return function(MODULE, query, key, value.bfloat16(), None)[0]

    expected, found = output_of(sdpa_attention_forward), output_of(compiled)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_other_attention_and_uncompiled_code_keep_torchs_kernel(compiled, monkeypatch):
    mask = torch.ones(50, 50, dtype=torch.bool).tril(3)
    bias = torch.randn(1, 4, 50, 50)
    cases = [{"mask": mask}, {"is_causal": False}, {"position_bias": bias}]
    for case in cases:
        expected = results(sdpa_attention_forward, torch.float32, **case)
        torch.testing.assert_close(results(compiled, torch.float32, **case), expected)

    def unexpected(*arguments):
        raise AssertionError("called")

    monkeypatch.setattr(compiled_attention._CausalAttention, "apply", unexpected)
    expected = results(sdpa_attention_forward, torch.float32)
    torch.testing.assert_close(results(compiled_attention.attention, torch.float32), expected)
    monkeypatch.undo()
    monkeypatch.setattr(compiled_attention._CausalAttention, "apply", unexpected)
    torch.testing.assert_close(results(compiled, torch.float32), expected)
