"""The loss is chunked if the logits are large and the model supports it."""

import pytest
from transformers import AutoConfig

from tests.feature_problems import problems_of
from tests.launching import write_json
from zerolm.model import activation_memory, loss_chunks
from zerolm.model.config_file import load_model_config
from zerolm.parts.parse import parse_settings

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
PLAIN = ("llama", "gpt2", "gpt_neox", "mistral", "qwen3", "mixtral", "olmoe", "gemma", "phi")
CHANGED = ("gemma2", "cohere", "granite")  # by a cap, by a factor, by a divisor


@pytest.mark.parametrize("family", PLAIN)
def test_models_that_return_their_heads_output_support_chunks(family) -> None:
    assert loss_chunks.unsupported_reason(AutoConfig.for_model(family, **SIZES)) is None


@pytest.mark.parametrize("family", CHANGED)
def test_models_that_change_the_logits_do_not_support_chunks(family) -> None:
    config = AutoConfig.for_model(family, **SIZES)
    assert "changes the logits" in loss_chunks.unsupported_reason(config)
    large = loss_chunks.LARGE_LOGIT_BYTES // 1000
    assert loss_chunks.chunk_tokens(config, large, None) == 0


def test_models_with_a_disabled_logit_cap_support_chunks() -> None:
    config = AutoConfig.for_model("gemma2", **SIZES, final_logit_softcapping=None)
    assert loss_chunks.unsupported_reason(config) is None


def test_chunks_are_the_default_only_for_large_logits() -> None:
    config = AutoConfig.for_model("llama", **{**SIZES, "vocab_size": 128_000})
    limit = loss_chunks.LARGE_LOGIT_BYTES // (4 * 128_000)
    assert loss_chunks.chunk_tokens(config, limit, None) == 0
    assert loss_chunks.chunk_tokens(config, limit + 1, None) == 1024
    assert loss_chunks.chunk_tokens(config, limit + 1, 0) == 0
    assert loss_chunks.chunk_tokens(config, 8, 300) == 300


def test_chunks_are_refused_for_a_model_that_does_not_support_them(tmp_path) -> None:
    file = write_json(tmp_path / "granite.json", {"model_type": "granite", **SIZES})
    words = ["--model_config", str(file), "--loss_chunk_tokens", "512"]
    settings, problems = parse_settings(words)
    assert not problems
    (problem,) = problems_of(settings, load_model_config(file))
    assert problem == (
        "command line: --loss_chunk_tokens: 512, but GraniteForCausalLM changes the logits after "
        f"its output head ({file}). Remove the flag."
    )


def test_values_that_json_has_not_are_not_lost_on_the_way_to_the_trace() -> None:
    """The default upper limit of Mamba-2's time step is infinite."""
    sizes = {"num_heads": 4, "head_dim": 32, "expand": 2, "state_size": 8, "n_groups": 1}
    config = AutoConfig.for_model("mamba2", **SIZES, **sizes)
    assert config.time_step_limit[1] == float("inf")
    assert loss_chunks.unsupported_reason(config) is None
    limit = loss_chunks.LARGE_LOGIT_BYTES // (4 * 1000)
    assert loss_chunks.chunk_tokens(config, limit + 1, None) > 0
    assert activation_memory.trace(config, 64, "bf16", eager=False).layers > 0
