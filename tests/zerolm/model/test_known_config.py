"""A config that answers from what was read before gives what the config itself gives."""

import copy
import json

import pytest
from transformers import CONFIG_MAPPING

from zerolm.model.architecture import (
    ConfigKey,
    causal_lm_class,
    experts_per_token,
    layer_configs,
    num_experts,
    routed_fraction,
)
from zerolm.model.known_config import KnownConfig, actual
from zerolm.model.model import hidden_size, max_positions

FAMILIES = ("llama", "gpt2", "mixtral", "deepseek_v3", "gemma3_text", "dbrx", "gemma3n_text")
QUESTIONS = (
    lambda config: config.get_text_config().vocab_size,
    lambda config: getattr(config.get_text_config(), "head_dim", "none"),
    lambda config: getattr(config, "layer_types", "none"),
    lambda config: config.tie_word_embeddings,
    hidden_size, max_positions, num_experts, routed_fraction, experts_per_token,
    lambda config: len(layer_configs(config)),
    lambda config: ConfigKey.of(config).values,
    lambda config: ConfigKey.of(config).inputs(1),
    lambda config: causal_lm_class(config).__name__,
    lambda config: copy.deepcopy(config).to_dict(),
)  # fmt: skip


def answer(question, config):
    try:
        return question(config)
    except AttributeError:
        return AttributeError


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_config(family):
    config = CONFIG_MAPPING[family]()
    expected = [answer(question, config) for question in QUESTIONS]
    reads = {}
    cold = KnownConfig(reads, lambda: config)
    assert [answer(question, cold) for question in QUESTIONS] == expected
    warm = KnownConfig(json.loads(json.dumps(reads)), lambda: config)
    assert [answer(question, warm) for question in QUESTIONS] == expected
    assert actual(warm) is actual(config) is config


def test_what_was_read_needs_no_config_and_the_rest_builds_it():
    built = []
    config = CONFIG_MAPPING["gpt2"](n_embd=48, n_head=4)
    reads = {}
    first = KnownConfig(reads, lambda: config)
    assert first.get_text_config().hidden_size == 48 and not hasattr(first, "absent_key")
    second = KnownConfig(reads, lambda: built.append(1) or config)
    assert second.get_text_config().hidden_size == 48 and not hasattr(second, "absent_key")
    assert not built
    assert second.n_head == 4 and built
    second.n_head_list = None  # an attribute of this object alone
    assert not hasattr(config, "n_head_list")
