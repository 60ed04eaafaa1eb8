"""Attention logits: measured for the pairs that attend, and scaled by head in every family."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from tests.feature_problems import problems_of
from tests.launching import LLAMA
from tests.model_families.sweep import FAMILIES
from tests.model_families.toy_configs import toy_config
from zerolm.model import attention_logits
from zerolm.model.attention_logits import (
    AttentionLogits,
    attention_layers,
    intercepted_attention,
    largest_logits,
    unsupported_reason,
)
from zerolm.parts.settings import RunSettings

# Queries and keys in one projection, of all heads or of each; latent attention; biases; ...
USUAL = ("llama", "gpt2", "gpt_neox", "phi3", "deepseek_v3", "qwen2", "opt", "gemma2", "gpt_oss")


def config_of(model_type: str, **more):
    values = toy_config(model_type) | more
    values.pop("time_step_limit", None)  # infinite, which JSON does not have
    return AutoConfig.for_model(values.pop("model_type"), **values)


def scores(model, input_ids) -> dict[str, torch.Tensor]:
    """Return {attention module: products of queries and keys}."""
    names, found = {module: name for name, module in model.named_modules()}, {}

    def observe(module, query, key, *others):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        # A recurrent model calls a module again, with inputs that its own scores have changed.
        found.setdefault(names[module], query @ key.transpose(2, 3))

    with torch.no_grad(), intercepted_attention(model, observe):
        model(input_ids=input_ids, use_cache=False)
    return found


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.soak) for name in FAMILIES],
)
def test_a_factor_of_a_head_is_that_of_its_logits_and_of_no_others(model_type) -> None:
    try:
        config = config_of(model_type)
    except (TypeError, ValueError, StrictDataclassError) as error:
        pytest.skip(f"no causal LM of its own, or none that is small: {error}")
    if why := unsupported_reason(config):
        assert model_type not in USUAL
        pytest.skip(why)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    parameters = dict(model.named_parameters())
    input_ids = torch.randint(8, 500, (2, 16))
    before = scores(model, input_ids)
    for layer in attention_layers(config):
        factors = [1.0] * (layer.num_heads - 1) + [0.3]
        original = {each.parameter: parameters[each.parameter].clone() for each in layer.outputs}
        for outputs in layer.outputs:
            parameter, scale = parameters[outputs.parameter], outputs.factors(factors)
            by_row = parameter.ndim > 1 and not outputs.outputs_last
            parameter.data.mul_(scale[:, None] if by_row else scale)
        after = scores(model, input_ids)[layer.name]
        expected = before[layer.name] * torch.tensor(factors).view(1, -1, 1, 1)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)
        for name, value in original.items():
            parameters[name].data.copy_(value)


def test_models_whose_queries_and_keys_cannot_be_scaled_are_refused_with_the_reason() -> None:
    for model_type, reason in (
        ("qwen3", "normalizes queries and keys (q_norm)"),
        ("olmo2", "normalizes queries and keys (q_norm)"),
        ("deepseek_v32", "indexer"),
        ("falcon", "does not use the attention functions of transformers"),
        ("mamba", "cannot be traced"),
        ("gpt_bigcode", "c_attn"),
        ("zamba", "shares projections between layers"),
    ):
        assert reason in str(unsupported_reason(config_of(model_type))), model_type
    assert "clip_qkv" in str(unsupported_reason(config_of("olmo", clip_qkv=8.0)))
    settings = RunSettings(
        qk_clip=100.0, compile=True, model_config="m.json", attn_implementation="flex_attention",
        origins={"qk_clip": "command line: --qk_clip"},
    )  # fmt: skip
    problems = "\n".join(problems_of(settings, config_of("qwen3"), "cuda"))
    assert "--qk_clip: 100, but qwen3 normalizes queries and keys (q_norm)" in problems
    assert "--qk_clip: 100 is not supported together with --compile" in problems
    assert "--qk_clip: 100 is not supported together with --attn_implementation flex" in problems
    assert not problems_of(RunSettings(qk_clip=100.0), config_of("qwen2"), "cpu")


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["causal", "documents", "bool", "float"])
def test_the_largest_logit_is_that_of_the_pairs_that_attend(monkeypatch, block, window, kind):
    monkeypatch.setattr(attention_logits, "CPU_BLOCK_VALUES", block)
    torch.manual_seed(1)
    batch, heads, groups, length, width = 2, 4, 2, 11, 8
    query, key = torch.randn(batch, heads, length, width), torch.randn(batch, groups, length, width)
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    expected = [-math.inf] * heads
    allowed = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    for b in range(batch):
        for i in range(length):
            for j in range(i + 1):
                if window and i - j >= window:
                    continue
                if kind != "causal" and documents[b, i] != documents[b, j]:
                    continue
                allowed[b, 0, i, j] = True
                for head in range(heads):
                    logit = 0.3 * float(query[b, head, i] @ key[b, head // 2, j])
                    expected[head] = max(expected[head], logit)
    lowest = torch.finfo(torch.float32).min
    mask = {"bool": allowed, "float": torch.zeros(allowed.shape).masked_fill(~allowed, lowest)}
    found = largest_logits(
        query, key, 0.3, mask.get(kind), window=window,
        documents_BT=documents if kind == "documents" else None,
    )  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_logits_of_a_step_are_the_largest_of_its_micro_batches_and_of_forward_passes_only(kernel):
    config = AutoConfig.for_model(**LLAMA)
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    layers = attention_layers(config)
    measured = AttentionLogits(model, layers, torch.device("cpu"))
    batches = torch.randint(0, 500, (3, 2, 16)).unbind()
    hidden = torch.ones(16, 16).tril() == 0
    expected = [
        torch.stack(
            [
                scores(model, ids)[layer.name].masked_fill(hidden, -math.inf).amax((0, 2, 3))
                for ids in batches[:2]
            ]
        ).amax(0)
        * 0.25
        for layer in layers
    ]
    measured.begin()
    for ids in batches[:2]:
        with measured.observing({}):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with torch.no_grad():
        model(input_ids=batches[2], use_cache=False)  # not observed, as a recomputed pass
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # a recomputed pass would measure other logits
    loss.backward()
    for found, values in zip(measured._largest, expected, strict=True):
        torch.testing.assert_close(found, values)
