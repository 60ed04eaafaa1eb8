"""Models that support --document_mask, and those that are refused."""

import pytest
from transformers import CONFIG_MAPPING

from zerolm.config.flags import parse_settings
from zerolm.preflight.model_rules import model_problems


def layers(model_type, **more):
    """Return a small config of two layers."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CONFIG_MAPPING[model_type](**sizes, **more)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (layers("mistral", sliding_window=32), None),
        (layers("mistral", sliding_window=31), None),
        (layers("mistral", sliding_window=None), None),
        (layers("qwen2", sliding_window=8), None),  # without use_sliding_window
        (layers("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=0), None),
        (layers("gpt_oss", layer_types=["full_attention"] * 2, num_local_experts=2), None),
        (layers("llama4_text", attention_chunk_size=16, num_local_experts=2), None),
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
    assert "flash_attention_2 does not support chunked attention" in problem
    assert model_problems(settings, layers("mistral", sliding_window=8)) == []
