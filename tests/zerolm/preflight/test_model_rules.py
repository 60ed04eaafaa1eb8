"""Rules for the settings of a model, compared with forward passes of transformers."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.model_families.toy_configs import toy_config
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.features.expert_balance import ExpertBalance
from zerolm.features.feature import Case
from zerolm.features.fp8 import Fp8
from zerolm.model.document_mask import chunks_restart_at_documents
from zerolm.model.model import max_positions
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import RunSettings
from zerolm.preflight.model_rules import (
    attention_problems,
    model_problems,
    padding_notices,
    precision_problems,
)


def layers(model_type, **more):
    """Return a small config of two layers."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CONFIG_MAPPING[model_type](**sizes, **more)


# transformers 5.17
OLD_CHUNKS = None if chunks_restart_at_documents() else "update transformers"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (layers("mistral", sliding_window=32), None),
        (layers("mistral", sliding_window=31), None),
        (layers("mistral", sliding_window=None), None),
        (layers("qwen2", sliding_window=8), None),  # without use_sliding_window
        (layers("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=0), None),
        (layers("gpt_oss", layer_types=["full_attention"] * 2, num_local_experts=2), None),
        (layers("llama4_text", attention_chunk_size=16, num_local_experts=2), OLD_CHUNKS),
        (layers("mamba"), "carries state from one document"),
        (layers("qwen3_next"), "carries state from one document"),
        (layers("minimax", num_local_experts=2), "linear_attention layers"),
        (layers("bloom", n_layer=2), "no positions"),
        (layers("llama"), None),
        (layers("gpt2"), None),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_document_masks_are_refused_for_models_with_other_masks_or_states(config, reason):
    settings, _ = parse_settings(["--document_mask", "--seq_len", "32"])
    problems = model_problems(settings, config)
    assert len(problems) == (reason is not None)
    for problem in problems:
        assert "--document_mask: true" in problem and reason in problem and "Remove" in problem


def test_document_masks_with_chunks_and_flash_attention_are_refused():
    settings, _ = parse_settings(
        ["--document_mask", "--seq_len", "32", "--attn_implementation", "flash_attention_2"]
    )
    chunked = layers("llama4_text", attention_chunk_size=16, num_local_experts=2)
    (problem,) = model_problems(settings, chunked)
    assert (OLD_CHUNKS or "flash_attention_2 does not support chunked attention") in problem
    assert model_problems(settings, layers("mistral", sliding_window=8)) == []


def test_torchs_varlen_is_refused_with_the_reason():
    settings, _ = parse_settings(["--seq_len", "32", "--attn_implementation", "varlen"])
    assert not attention_problems(settings, "absent", "bf16")
    (problem,) = attention_problems(settings, "cpu", "bf16")
    assert problem.endswith("--attn_implementation: varlen needs a GPU. Use auto.")
    (problem,) = attention_problems(settings, "cuda", "fp32")
    assert "--attn_implementation: varlen needs bf16 or fp16" in problem
    assert model_problems(settings, layers("mistral", sliding_window=8)) == []
    (problem,) = model_problems(settings, layers("gemma2"))
    assert "--attn_implementation: varlen does not support softcap. (" in problem


@pytest.mark.parametrize(
    ("config", "key", "positions"),
    [
        (layers("gpt2", n_positions=32), "max_position_embeddings 32", 32),
        (layers("mpt", max_seq_len=32), "max_seq_len 32", 32),
        (
            layers("roberta", max_position_embeddings=34, is_decoder=True),
            "max_position_embeddings 34, of which 2 precede the first token",
            32,
        ),
        (
            layers("camembert", max_position_embeddings=34, pad_token_id=3, is_decoder=True),
            "max_position_embeddings 34, of which 4 precede the first token",
            30,
        ),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_longest_sequence_is_the_longest_that_transformers_computes(config, key, positions):
    assert max_positions(config) == positions
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.full((1, positions + 1), 7)
    model(input_ids=ids[:, 1:])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)
    accepted, _ = parse_settings(["--seq_len", str(positions)])
    assert model_problems(accepted, config) == []
    longer, _ = parse_settings(["--seq_len", str(positions + 1)])
    (problem,) = model_problems(longer, config)
    assert f"must not exceed the model's {key} " in problem


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (layers("llama", pad_token_id=2), ["m.json: pad_token_id: 2, 'b': ", "like all others"]),
        (layers("gemma"), ["pad_token_id: 0 (the default of GemmaConfig), '<|endoftext|>': "]),
        (layers("opt", ffn_dim=64), ["pad_token_id: 1 (the default of OPTConfig), 'a': "]),
        (layers("roberta", is_decoder=True), ["'a': ", "no position of its own"]),
        (layers("llama"), []),
        (layers("gpt2", pad_token_id=2), []),  # has no padding row
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_row_of_a_padding_token_is_named_with_its_text(config, parts, tmp_path):
    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    Tokenizer(WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    source = SimpleNamespace(tokenizer_directory=lambda: tmp_path)
    settings, _ = parse_settings(["--model_config", "m.json"])
    notices = padding_notices(settings, config, [source])
    assert len(notices) == bool(parts)
    assert all(part in notices[0] for part in parts), notices
    if parts:
        settings, _ = parse_settings(["--model_config", "m.json", "--init_from", "x"])
        assert "starts with the weights of --init_from" in padding_notices(settings, config, [])[0]


def test_a_class_that_gives_a_parameter_no_initial_value_is_refused(monkeypatch):
    from transformers.models.apertus import modeling_apertus

    class Forgetful(torch.nn.SiLU):
        def __init__(self, **_):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.full((1,), float("nan")))

    monkeypatch.setitem(modeling_apertus.ACT2CLS, "xielu", Forgetful)
    settings, _ = parse_settings(["--seq_len", "32", "--model_config", "apertus.json"])
    (problem,) = model_problems(settings, layers("apertus"))
    assert problem.startswith("apertus.json: ApertusForCausalLM sets no initial value for model.")


@pytest.mark.parametrize(
    ("family", "noticed"),
    [
        ("mixtral", True), ("olmoe", True), ("qwen3_moe", True), ("jetmoe", True), ("dbrx", True),
        ("deepseek_v3", False), ("glm4_moe", False), ("llama4_text", False), ("afmoe", False),
        ("llama", False),
    ],
)  # fmt: skip
def test_a_router_loss_is_noticed_only_where_the_model_computes_one(family, noticed):
    """deepseek_v3 and others have the config key, but no code that reads it."""
    config = CONFIG_MAPPING[family]()
    case = Case(RunSettings(), config, Profile.parse({}), Layout(1), "cpu")
    assert list(ExpertBalance.notices(case)) == []
    config.output_router_logits = True
    assert bool(list(ExpertBalance.notices(case))) == noticed


def test_losses_of_routers_are_refused_for_models_without_router_logits():
    settings = RunSettings(global_router_loss=True, router_z_loss=0.001, z_loss=1e-4)

    def found(config):
        return list(
            ExpertBalance.problems(Case(settings, config, Profile.parse({}), Layout(1), "cpu"))
        )

    problems = found(CONFIG_MAPPING["deepseek_v3"]())
    assert len(problems) == 2
    assert "deepseek_v3 computes no router loss" in problems[0]
    assert "0.001, but deepseek_v3 returns no router logits" in problems[1]
    config = CONFIG_MAPPING["mixtral"]()
    assert len(found(config)) == 2
    config.output_router_logits = True
    assert not found(config)
    config.router_aux_loss_coef = 0.0
    [problem] = found(config)
    assert "a coefficient above 0" in problem


def test_families_that_torch_cannot_compute_in_bf16_are_refused():
    """The column bf16 of docs/models.md is from running all of them."""
    settings, _ = parse_settings(["--seq_len", "16"])
    config = CONFIG_MAPPING["xlstm"](**toy_config("xlstm"))
    (problem,) = precision_problems(settings, config, "bf16")
    assert "xlstm works in fp32 only" in problem and "--precision fp32" in problem
    assert precision_problems(settings, config, "fp32") == []
    assert precision_problems(settings, layers("llama"), "bf16") == []


def test_fp8_is_refused_without_bf16_on_older_gpus_and_without_linear_layers(monkeypatch):
    """All three at once, and each alone."""
    settings, _ = parse_settings(["--fp8", "--deepspeed_config", "d.json", "--model_config", "m"])
    bf16, fp32 = (Profile.parse({"bf16": {"enabled": enabled}}) for enabled in (True, False))
    autocast = Profile.parse({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))

    def found(settings, config, profile, device):
        return list(Fp8.problems(Case(settings, config, profile, Layout(1), device)))

    gpt2 = layers("gpt2")  # its Conv1D is no linear layer
    precision, device, model = found(settings, gpt2, fp32, "cuda")
    assert "--fp8: true needs bf16 weights, but d.json sets fp32" in precision
    assert "this GPU has compute capability 8.6 and fp8 needs 8.9" in device
    assert "gpt2 has no linear layers in its blocks (m)" in model
    llama = layers("llama", intermediate_size=96)
    assert found(settings, llama, autocast, "cpu") == [precision]
    assert found(settings, llama, bf16, "cuda") == [device]
    assert len(found(settings, llama, bf16, "xpu")) == 1
    odd = CONFIG_MAPPING["llama"](hidden_size=36, intermediate_size=90, num_attention_heads=3)
    (problem,) = found(settings, odd, bf16, "absent")
    assert "no linear layers whose sizes are multiples of 16" in problem
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert found(settings, llama, bf16, "cuda") == []
    assert found(parse_settings([])[0], gpt2, fp32, "cuda") == []
