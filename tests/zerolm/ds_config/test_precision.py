"""The precision that a run gets from its DeepSpeed JSON and `--precision`, and the notice."""

import pytest

from zerolm.config.flags import parse_settings
from zerolm.ds_config.precision import with_precision
from zerolm.ds_config.profile import Profile

OFF, ON, AUTO = {"enabled": False}, {"enabled": True}, {"enabled": "auto"}
# (JSON, --precision, expected precision, part of the notice; None: no notice)
CHOICES = [
    ({"fp16": AUTO}, None, "bf16", 'fp16.enabled is "auto"'),
    ({"fp16": AUTO}, "fp16", "fp16", "as command line: --precision says"),
    ({"fp16": AUTO}, "fp32", "fp32", "as command line: --precision says"),
    ({"fp16": AUTO, "bf16": AUTO}, None, "bf16", 'bf16.enabled is "auto"'),
    ({"fp16": AUTO, "bf16": AUTO}, "fp16", "fp16", "--precision says"),
    ({"fp16": AUTO, "bf16": OFF}, None, "fp16", "bf16.enabled is false"),
    ({"fp16": OFF, "bf16": AUTO}, None, "bf16", 'bf16.enabled is "auto"'),
    ({"bfloat16": AUTO}, None, "bf16", 'bfloat16.enabled is "auto"'),
    ({}, None, "fp32", "enables neither"),
    ({}, "bf16", "bf16", "--precision says"),
    ({"fp16": OFF}, None, "fp32", "enables neither"),
    ({"fp16": OFF}, "bf16", "bf16", "--precision says"),
    ({"fp16": OFF, "bf16": OFF}, None, "fp32", None),
    ({"fp16": OFF, "bf16": OFF}, "fp32", "fp32", "--precision says"),
    ({"bf16": ON}, None, "bf16", None),
    ({"bf16": ON}, "bf16", "bf16", None),
    ({"fp16": ON, "bf16": AUTO}, None, "fp16", None),
    ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, None, "fp32", None),
]


def decide(config, flag):
    settings, problems = parse_settings(["--precision", flag] if flag else [])
    assert problems == []
    profile, notices = with_precision(Profile.parse(config, "ds.json"), settings, problems)
    return profile, notices, problems


@pytest.mark.parametrize(("config", "flag", "expected", "notice"), CHOICES)
def test_the_file_decides_then_the_flag_then_a_default_with_a_notice(
    config, flag, expected, notice
):
    from deepspeed.runtime.config import DeepSpeedConfig

    profile, notices, problems = decide(config, flag)
    assert problems == [] and profile.precision == expected
    assert len(notices) == (notice is not None)
    assert all(f"ds.json: training in {expected}" in line and notice in line for line in notices)
    theirs = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **profile.json})
    assert theirs.bfloat16_config.enabled is (expected == "bf16")
    assert theirs.float16_config.enabled is (expected == "fp16")


@pytest.mark.parametrize(
    ("config", "flag", "against"),
    [
        ({"bf16": ON}, "fp32", "bf16.enabled: true"),
        ({"fp16": ON, "bf16": AUTO}, "bf16", "fp16.enabled: true"),
        ({"bf16": OFF, "fp16": AUTO}, "bf16", "bf16.enabled: false"),
        ({"bfloat16": {"enabled": 1}}, "fp16", "bfloat16.enabled: true"),
    ],
)
def test_a_flag_against_an_explicit_block_is_refused_with_both_places(config, flag, against):
    _, notices, [problem] = decide(config, flag)
    assert notices == []
    assert problem.startswith(f"ds.json: {against}, contradicts command line: --precision {flag}. ")
