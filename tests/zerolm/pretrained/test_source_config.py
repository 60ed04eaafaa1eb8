"""A config agrees with that of its weights, but for vocabulary, training choices and positions."""

import pytest

from tests.zerolm.pretrained.small_models import config_of
from zerolm.pretrained.source_config import compare


@pytest.mark.parametrize(
    ("changes", "problem", "notice"),
    [
        ({}, "", ""),
        ({"vocab_size": 96}, "", ""),
        ({"vocab_size": 32}, "NEW: vocab_size: 32, --init_from SOURCE has 64", ""),
        ({"intermediate_size": 64}, "intermediate_size: 64, --init_from SOURCE has 48", ""),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps: 0.001, --init_from SOURCE has 1e-06", ""),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: true", ""),
        ({"attention_dropout": 0.1}, "", "attention_dropout: 0.1"),
        ({"eos_token_id": 5, "use_cache": False, "architectures": ["X"]}, "", ""),
    ],
)  # fmt: skip
def test_only_what_the_weights_mean_must_agree(changes, problem, notice) -> None:
    found = compare(config_of("llama", **changes), "NEW", config_of("llama"), "SOURCE")
    assert len(found.problems) == bool(problem) and len(found.notices) == bool(notice)
    assert problem in "".join(found.problems) and notice in "".join(found.notices)


def test_another_architecture_is_refused_at_once() -> None:
    found = compare(config_of("gpt2"), "NEW", config_of("llama"), "SOURCE")
    assert found.problems == [
        "NEW: model_type: 'gpt2', but the weights in SOURCE are 'llama'. Remove --model_config to "
        "use the source's config."
    ]


LONGER = {"max_position_embeddings": 128}
LIMIT = "NEW: max_position_embeddings: 128, --init_from SOURCE has 32: the longest --seq_len"
GUESSED = "rope_parameters.original_max_position_embeddings: 128 must be below max_position_embed"
LONGROPE = {"short_factor": [1.0] * 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("scaling", "notices", "problem"),
    [
        ({}, ["rope_theta: 80000.0, --init_from SOURCE has 10000.0: a larger base lowers"], ""),
        ({"rope_type": "linear", "factor": 4.0}, ["divides all", "factor: 4.0"], ""),
        ({"type": "dynamic", "factor": 4.0}, ["none in training", "factor: 4.0"], ""),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
         ["keeps high ones", "factor: 4.0", "embeddings: 32, --init_from SOURCE has null"], ""),
        ({"rope_type": "yarn", "factor": 4.0}, ["keeps high ones", "factor", "original"], GUESSED),
        ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32},
         ["slower than", "factor: 4", "low_freq", "high_freq", "original"], ""),
        ({"rope_type": "longrope", "long_factor": [2.0] * 4, **LONGROPE},
         ["its own factor", "long_factor", "short_factor", "original"], ""),
        ({"rope_type": "longrope", "long_factor": [2.0] * 3, **LONGROPE},
         ["its own factor", "long_factor", "short_factor", "original"], "as long as short_f"),
    ],
)  # fmt: skip
def test_rotary_positions_may_be_others_and_a_notice_says_what_that_does(
    scaling, notices, problem
) -> None:
    keys = {"rope_scaling": dict(scaling)} if scaling else {"rope_theta": 8e4}
    config = config_of("llama", **LONGER, **keys)
    found = compare(config, "NEW", config_of("llama"), "SOURCE")
    assert len(found.problems) == bool(problem) and problem in "".join(found.problems)
    assert len(found.notices) == 1 + len(notices) and LIMIT in found.notices[0]
    assert all(any(part in notice for notice in found.notices) for part in notices), found.notices
    parameters = {"rope_theta": 1e4, **scaling} if scaling else {"rope_theta": 8e4}
    newer = config_of("llama", **LONGER, rope_parameters=parameters)
    assert compare(newer, "NEW", config_of("llama"), "SOURCE") == found, "either way of writing it"


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("gpt2", {"n_positions": 64}, "n_positions"),
        ("xlm-roberta", {"max_position_embeddings": 64}, "max_position_embeddings"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("gpt_neox", {"rope_theta": 5e5}, "rope_theta"),  # which nothing there reads
    ],
)
def test_positions_that_are_weights_or_change_what_is_rotated_are_refused(
    family, changes, key
) -> None:
    (problem,) = compare(config_of(family, **changes), "NEW", config_of(family), "SOURCE").problems
    assert f"{key}: " in problem


def test_rotary_positions_are_no_excuse_for_other_changes() -> None:
    changes = {"rope_theta": 8e4, "vocab_size": 32, "hidden_act": "gelu", **LONGER}
    found = compare(config_of("llama", **changes), "NEW", config_of("llama"), "SOURCE")
    assert [line.split(":")[1] for line in found.problems] == [" hidden_act", " vocab_size"]
