"""Every spelling that DeepSpeed reads as a value is that value in the `Profile`."""

import copy
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zerolm.ds_config.ds_cases import found, notices, resolved, zero
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import deepspeed_problems
from zerolm.ds_config.schema import inner_model, model_fields, read
from zerolm.engine import config_keys
from zerolm.engine.config_keys import known_keys

SWITCH_TYPE = config_keys._SWITCH
TRUE = [True, 1, 1.0, "true", "True", "1", "on", "yes", "Y"]
FALSE = [False, 0, 0.0, "false", "FALSE", "0", "off", "no", "n"]
SWITCH = st.sampled_from([*TRUE, *FALSE] * 4 + ["x", 2, -1, "", 0.5])
NUMBER = st.sampled_from([1, 1.0, "1", True, 2, 2.0, "2", "2.0", 5e8, "500000000"] * 4 + ["x", -1])
STAGE = st.sampled_from(
    [0, 1, 2, 3, 0.0, 1.0, 2.0, 3.0, "1", "2", "3.0", True, False] * 2 + [4, "x"]
)


def read_by_deepspeed(config):
    """Return DeepSpeed's own config object; the world size is 1 without a process group."""
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **copy.deepcopy(config)})


@settings(max_examples=300, deadline=None)
@given(
    stage=STAGE, bf16=SWITCH, fp16=SWITCH, autocast=SWITCH, overflow=SWITCH, norm=SWITCH,
    reduce=NUMBER, overlap=SWITCH, cpu=SWITCH, untested=SWITCH,
)  # fmt: skip
def test_a_profile_has_the_values_of_deepspeeds_config_object(
    stage, bf16, fp16, autocast, overflow, norm, reduce, overlap, cpu, untested
):
    config = {
        **zero(stage, compute_grad_norm=norm, reduce_bucket_size=reduce, overlap_comm=overlap,
               cpu_offload=cpu),
        "bf16": {"enabled": bf16, "check_grad_overflow": overflow},
        "fp16": {"enabled": fp16},
        "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
        "zero_allow_untested_optimizer": untested,
        "wandb": {"enabled": overlap},
    }  # fmt: skip
    profile = Profile.parse(config, "ds.json")
    try:
        theirs = read_by_deepspeed(config)
    except Exception:  # refused: the values stay as written, and so must we refuse them
        assert found(config, on_gpu=True)
        return
    zero_config = theirs.zero_config
    assert profile.zero_stage == max(1, theirs.zero_optimization_stage)
    assert profile.block("bf16")["enabled"] is theirs.bfloat16_config.enabled
    overflow_check = theirs.bfloat16_config.check_grad_overflow
    assert profile.block("bf16")["check_grad_overflow"] is overflow_check
    precision = "bf16" if theirs.bfloat16_config.enabled else "fp32"
    assert profile.precision == ("fp16" if theirs.float16_config.enabled else precision)
    assert profile.zero["compute_grad_norm"] is zero_config.compute_grad_norm
    assert profile.buckets.reduce == zero_config.reduce_bucket_size
    assert profile.overlap_comm is zero_config.overlap_comm
    offload = zero_config.offload_optimizer
    assert profile.optimizer_offload == (offload.device if offload else "none")
    assert profile.block("wandb")["enabled"] is theirs.monitor_config.wandb.enabled
    for ours, value in (
        (profile.block("torch_autocast")["enabled"], theirs.torch_autocast_enabled),
        (profile.json["zero_allow_untested_optimizer"], theirs.zero_allow_untested_optimizer),
    ):
        # DeepSpeed only tests these for truth, and takes the text "false" for true: refused.
        assert ours is bool(value) or (isinstance(ours, str) and found(config, on_gpu=True))


MODELS = {key: model for key, kind in known_keys().items() if (model := inner_model(kind))}
THEIRS = [key for key, model in MODELS.items() if model.__module__.startswith("deepspeed.")]


@pytest.mark.parametrize("name", THEIRS)
def test_every_switch_and_number_of_a_block_is_read_as_by_its_model(name):
    model = MODELS[name]
    for key, field in model_fields(model).items():
        if inner_model(field.annotation):
            continue
        for value in [*TRUE, *FALSE, 7, 7.0, "7", 5e8, None, "x", "auto"]:
            written = {key: value}
            ours = read({name: written})[0][name][field.alias or key]
            try:
                built = model(**written)
            except Exception:  # refused, or only valid with other keys
                continue
            if value == "auto" or (field.json_schema_extra or {}).get("deprecated"):
                continue
            theirs = getattr(built, next(n for n, f in model.model_fields.items() if f is field))
            if key == "overlap_comm" and value is None:
                continue  # DeepSpeed then decides by the stage
            assert ours == theirs and isinstance(ours, type(theirs)), (key, value, ours, theirs)


def switches(types, path=()):
    """Yield the path of each switch in blocks without a model in DeepSpeed, and at the top."""
    for key, kind in types.items():
        model = inner_model(kind)
        if kind in (SWITCH_TYPE, SWITCH_TYPE | None):
            yield (*path, key)
        elif model and model.__module__ == config_keys.__name__:
            inner = {name: field.annotation for name, field in model.model_fields.items()}
            yield from switches(inner, (*path, key))


def test_deepspeed_reads_a_switch_without_a_model_by_its_truth():
    paths = list(switches(known_keys()))
    assert len(paths) > 40
    for path, value in itertools.product(paths, [*TRUE, *FALSE]):
        config = value
        for part in reversed(path):
            config = {part: config}
        ours = read(config)[0]
        for part in path:
            ours = ours[part]
        if isinstance(value, str) and not isinstance(ours, bool):
            assert value in FALSE and any(".".join(path[:1]) in line for line in found(config))
        else:
            assert ours is bool(value)


SPELLINGS = {
    "bf16": ({"bf16": {"enabled": True}}, {"bf16": {"enabled": "true"}}),
    "a stage": (zero(2), zero(2.0)),
    "a gradient check": (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        {"bf16": {"enabled": "yes", "check_grad_overflow": 0}},
    ),
    "a gradient norm": (zero(2, compute_grad_norm=False), zero(2, compute_grad_norm="false")),
    "both precisions": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"fp16": {"enabled": "true"}, "bf16": {"enabled": 1}},
    ),
    "deepcompile": ({"compile": {"deepcompile": True}}, {"compile": {"deepcompile": 1}}),
    "wandb": ({"wandb": {"enabled": True}}, {"wandb": {"enabled": 1}}),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"torch_autocast": {"enabled": 1, "dtype": "float16"}},
    ),
    "8 bits": ({"fp8": {"enabled": True}}, {"fp8": {"enabled": 1}}),
    "data types": (
        {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "torch.float32"}, "communication_data_type": "FP32"},
    ),
    "quantization": (zero(3, zero_quantized_weights=True), zero(3, zero_quantized_weights="1")),
    "untested": (
        {"optimizer": {"type": "NAdam"}, "zero_allow_untested_optimizer": True},
        {"optimizer": {"type": "NAdam"}, "zero_allow_untested_optimizer": 1},
    ),
    "degrees": (
        {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
        {"tensor_parallel": {"autotp_size": "2"}, "sequence_parallel_size": 2.0},
    ),
    "old offload": (zero(2, cpu_offload=True), zero(2, cpu_offload="true")),
    "the first form of ZeRO": (zero(1, allgather_bucket_size=500_000_000), {
        "zero_optimization": True}),
}  # fmt: skip


@pytest.mark.parametrize(("plain", "odd"), SPELLINGS.values(), ids=list(SPELLINGS))
def test_another_spelling_has_the_same_problems_notices_and_result(plain, odd):
    for on_gpu in (False, True):
        assert found(odd, on_gpu=on_gpu) == found(plain, on_gpu=on_gpu)
        assert notices(odd, on_gpu=on_gpu) == notices(plain, on_gpu=on_gpu)
    assert resolved(odd) == resolved(plain)


def test_comments_are_ignored_in_every_section():
    plain = {
        **zero(2, offload_optimizer={"device": "cpu"}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "torch_autocast": {"enabled": False},
    }

    def commented(value):
        if not isinstance(value, dict):
            return value
        more = {"_comment": "x", "_read_the_docs": ["y"], "//": 1, "//2": 2, "$schema": "z"}
        return {**{key: commented(inner) for key, inner in value.items()}, **more, "_comment_2": {}}

    assert found(commented(plain)) == []
    assert resolved(commented(plain)) == resolved(plain)


def test_deepspeeds_own_config_object_has_the_last_word():
    good = Profile.parse(resolved(zero(2)), "ds.json")
    assert deepspeed_problems(good) == []
    bad = Profile.parse({**good.json, "checkpoint": {"tag_validation": "perhaps"}}, "ds.json")
    assert found(bad.json) == []
    [problem] = deepspeed_problems(bad)
    assert "ds.json: DeepSpeed refuses it" in problem and "PERHAPS" in problem
