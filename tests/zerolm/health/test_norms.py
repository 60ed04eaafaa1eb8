"""Norms per block, and estimates from windows of a large tensor. With ZeRO: test_parity.py."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from zerolm.health.norms import WINDOW_VALUES, Blocks, sum_of_squares, windows
from zerolm.model.architecture import block_of


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.embed_tokens.weight", "embed_tokens"),
        ("model.layers.3.self_attn.q_proj.weight", "layers.3"),
        ("model.layers.11.block_sparse_moe.experts.5.w1.weight", "layers.11"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "lm_head"),
        ("transformer.h.0.attn.c_attn.bias", "h.0"),
        ("model.decoder.layers.7.fc1.weight", "layers.7"),
        ("weight", "weight"),
    ],
)
def test_the_block_of_a_parameter_is_its_layer_or_its_module(name, block):
    assert block_of(name) == block


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "opt"])
def test_blocks_have_every_parameter_once(family):
    sizes = {"gpt2": {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 32}}.get(
        family,
        {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 32}
        | {"intermediate_size": 16, "num_key_value_heads": 1, "ffn_dim": 16}
        | {"word_embed_proj_dim": 8},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    blocks = Blocks(model)
    assert sum(each.numel() for each, _ in blocks.parameters) == model.num_parameters()
    stacks = [name for name in blocks.names if name.endswith((".0", ".1"))]
    assert len(stacks) == 2 and len(blocks.names) <= 6
    assert ("lm_head" in blocks.names) == (not model.config.tie_word_embeddings)


def test_squares_are_exact_over_dtypes_and_pieces():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = [torch.randn((1 << 22) + 5), torch.randn(3, 7).bfloat16(), torch.empty(0)]
    found = Blocks(model).sums_of_squares(values, [0, 1, 1], torch.device("cpu"), [1.0, 2.0, 1.0])
    assert found.dtype == torch.float64
    assert found[0].item() == pytest.approx(values[0].double().square().sum().item(), rel=2e-6)
    assert found[1].item() == pytest.approx(2 * values[1].double().square().sum().item(), rel=1e-6)


def test_windows_are_a_view_with_about_the_norm_of_the_tensor():
    flat = torch.randn(1 << 20) * torch.linspace(0.1, 3, 1 << 20)  # varies along the tensor
    seen = windows(flat, 16)
    assert seen.data_ptr() == flat.data_ptr() and seen.shape[1] == WINDOW_VALUES
    assert flat.numel() / 18 < seen.numel() < flat.numel() / 15
    estimate = seen.double().square().sum() * (flat.numel() / seen.numel())
    assert estimate.sqrt().item() == pytest.approx(flat.double().norm().item(), rel=0.03)
    rows = seen.storage_offset() + torch.arange(len(seen)) * seen.stride(0)
    assert len({int(row) % 4096 for row in rows}) == len(seen), "columns differ"
    assert windows(flat[:WINDOW_VALUES], 16).numel() == WINDOW_VALUES
    assert windows(flat, 1).numel() == flat.numel()


def test_the_sum_of_squares_of_a_large_tensor_equals_float64():
    values = torch.randn(5_000_003)
    exact = values.double().square().sum().item()
    assert sum_of_squares(values).item() == pytest.approx(exact, rel=2e-6)
