"""The precision that a run gets from its DeepSpeed JSON, `--precision` and device; its notices.

python -m tests.zerolm.ds_config.test_precision    # prints the table of all combinations
"""

import pytest

from zerolm.distributed.device import Device
from zerolm.ds_config.precision import Begun, with_precision
from zerolm.ds_config.profile import Profile
from zerolm.parts.parse import parse_settings

OFF, ON, AUTO = {"enabled": False}, {"enabled": True}, {"enabled": "auto"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
H100 = Device("cuda", 80 << 30, True, "H100")
V100 = Device("cuda", 32 << 30, True, "V100", "has no native bf16", 12.0)
NATIVE = Device("cpu", None, True, "EPYC 9455")
EMULATING = Device("cpu", None, True, "EPYC 7763", "multiplies bf16 57 times slower", 57.0)
# On a GPU with native bf16: (JSON, --precision, precision, part of the notice or None)
CHOICES = [
    ({"fp16": AUTO}, None, "bf16", 'fp16.enabled is "auto"'),
    ({"fp16": AUTO}, "fp16", "fp16", "as command line: --precision says"),
    ({"fp16": AUTO}, "fp32", "fp32", "as command line: --precision says"),
    ({"bf16": AUTO}, None, "bf16", None),
    ({"bf16": AUTO}, "fp32", "fp32", "as command line: --precision says"),
    ({"fp16": AUTO, "bf16": AUTO}, None, "bf16", None),
    ({"fp16": AUTO, "bf16": AUTO}, "fp16", "fp16", "--precision says"),
    ({"fp16": AUTO, "bf16": OFF}, None, "fp16", "bf16.enabled is false"),
    ({"fp16": OFF, "bf16": AUTO}, None, "bf16", None),
    ({"bfloat16": AUTO}, None, "bf16", None),
    ({}, None, "fp32", "enables neither"),
    ({}, "bf16", "bf16", "--precision says"),
    ({"fp16": OFF}, None, "fp32", "enables neither"),
    ({"fp16": OFF}, "bf16", "bf16", "--precision says"),
    ({"fp16": OFF, "bf16": OFF}, None, "fp32", None),
    ({"bf16": OFF}, None, "fp32", None),
    ({"fp16": OFF, "bf16": OFF}, "fp32", "fp32", "--precision says"),
    ({"bf16": ON}, None, "bf16", None),
    ({"bf16": ON}, "bf16", "bf16", None),
    ({"fp16": ON, "bf16": AUTO}, None, "fp16", None),
    (AUTOCAST, None, "fp32", None),
]
# The same where bf16 is emulated: (JSON, --precision, device, precision, parts of the notices)
EMULATED = [
    ({"bf16": AUTO}, None, EMULATING, "fp32", ["EPYC 7763 multiplies bf16 57 times slower; --pr"]),
    ({"bfloat16": AUTO}, None, EMULATING, "fp32", ['bfloat16.enabled is "auto" and EPYC 7763']),
    ({"fp16": AUTO, "bf16": AUTO}, None, EMULATING, "fp32", ["EPYC 7763 multiplies"]),
    ({"bf16": AUTO}, None, V100, "fp32", ["V100 has no native bf16; --precision fp16 trains"]),
    ({"bf16": AUTO}, "fp16", V100, "fp16", ["as command line: --precision says"]),
    ({"bf16": AUTO}, "fp32", EMULATING, "fp32", ["as command line: --precision says"]),
    ({"bf16": AUTO}, "bf16", EMULATING, "bf16", ["says", "57 times slower than float32 on EPYC "
        "7763, measured with a matrix product. Leave out command line: --precision bf16"]),
    ({"bf16": ON}, None, EMULATING, "bf16", ['Write "bf16": {"enabled": "auto"}']),
    ({"bfloat16": ON}, None, V100, "bf16", ['12 times slower than float32 on V100, measured with a '
        'matrix product. Write "bfloat16": {"enabled": "auto"}']),
    ({"bf16": OFF, "fp16": OFF}, None, EMULATING, "fp32", []),
    ({"fp16": ON}, None, V100, "fp16", []),
    (AUTOCAST, None, EMULATING, "fp32", ["Remove torch_autocast"]),
]  # fmt: skip
# (precision the run began with, device now, precision, parts of the notices), all with "auto"
RESUMED = [
    ("bf16", NATIVE, "bf16", []),
    ("fp32", EMULATING, "fp32", ["EPYC 7763 multiplies bf16 57 times slower; --precision"]),
    ("fp32", NATIVE, "fp32", ["with it on Xeon; a new run would train in bf16 on EPYC 9455"]),
    ("bf16", EMULATING, "bf16", ["with it on Xeon; a new run would train in fp32 on EPYC 7763",
        "57 times slower than float32 on EPYC 7763, measured with a matrix product. Resume the run "
        "on devices like those it started on"]),
    ("fp16", H100, "fp16", ["with it on Xeon; a new run would train in bf16 on H100"]),
]  # fmt: skip


def decide(config, flag, device=NATIVE, begun=None):
    settings, problems = parse_settings(["--precision", flag] if flag else [])
    assert problems == []
    profile = Profile.parse(config, "ds.json")
    profile, notices = with_precision(profile, settings, device, problems, begun)
    return profile, notices, problems


def agrees_with_deepspeed(profile, expected):
    from deepspeed.runtime.config import DeepSpeedConfig

    theirs = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **profile.json})
    enabled = theirs.bfloat16_config.enabled, theirs.float16_config.enabled
    return profile.precision == expected and enabled == (expected == "bf16", expected == "fp16")


@pytest.mark.parametrize(("config", "flag", "expected", "notice"), CHOICES)
def test_the_file_decides_then_the_flag_then_a_default_with_a_notice(
    config, flag, expected, notice
):
    profile, notices, problems = decide(config, flag, H100)
    assert problems == [] and agrees_with_deepspeed(profile, expected)
    assert len(notices) == (notice is not None)
    assert all(f"ds.json: training in {expected}" in line and notice in line for line in notices)


@pytest.mark.parametrize(("config", "flag", "device", "expected", "parts"), EMULATED)
def test_auto_is_float32_where_bf16_is_emulated_and_explicit_bf16_stays_with_a_notice(
    config, flag, device, expected, parts
):
    profile, notices, problems = decide(config, flag, device)
    assert problems == [] and agrees_with_deepspeed(profile, expected)
    assert len(notices) == len(parts)
    assert all(part in notice for part, notice in zip(parts, notices, strict=True))


@pytest.mark.parametrize(("began", "device", "expected", "parts"), RESUMED)
def test_a_resumed_run_keeps_its_precision_on_another_device(began, device, expected, parts):
    begun = Begun("runs/first/run.json", began, "Xeon")
    profile, notices, problems = decide({"bf16": AUTO}, None, device, begun)
    assert problems == [] and agrees_with_deepspeed(profile, expected)
    assert len(notices) == len(parts)
    assert all(part in notice for part, notice in zip(parts, notices, strict=True))


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
    assert problem.startswith(f"ds.json: {against} contradicts command line: --precision {flag}. ")


if __name__ == "__main__":
    print("| device | JSON | --precision | trains in | notices |\n|---|---|---|---|---|")
    cases = [(config, flag, H100) for config, flag, _, _ in CHOICES]
    for config, flag, device in cases + [case[:3] for case in EMULATED]:
        profile, notices, _ = decide(config, flag, device)
        print(f"| {device.name} | `{config}` | {flag or ''} | {profile.precision} | "
              f"{'<br>'.join(notices)} |")  # fmt: skip
