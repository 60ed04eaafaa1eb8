"""A user's DeepSpeed JSON, and short forms of the checks, for the tests of this folder."""

import json

from tests import ROOT
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.resolve import resolve_profile
from zerolm.ds_config.rules import rule_notices, rule_problems
from zerolm.parts.settings import RunSettings

# A user's file that must work unchanged.
USER = json.loads(
    """{"zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": true},
    "bf16": {"enabled": true}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "steps_per_print": 100, "wall_clock_breakdown": false}"""
)
SETTINGS = RunSettings(
    learning_rate=3e-4, min_learning_rate=3e-5, weight_decay=0.1, beta1=0.9, beta2=0.95
)


def found(config, on_gpu=False, world_size=2):
    profile = Profile.parse(config, "ds.json")
    return profile.problems + rule_problems(profile, on_gpu=on_gpu, world_size=world_size)


def resolved(config, settings=SETTINGS, **more):
    sizes = {"hidden_size": 64, "micro_batch_size": 2, "accumulation": 4, "replicas": 2}
    steps = {"warmup_steps": 5, "total_steps": 100}
    profile = Profile.parse(config, "ds.json")
    return resolve_profile(profile, settings, **{**sizes, **steps, **more}).json


def shipped(name, **more):
    """Return a file of ds_configs/, resolved with a rate at which a few steps change weights."""
    settings = RunSettings(learning_rate=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
    config = json.loads((ROOT / "ds_configs" / name).read_text())
    return resolved(config, settings, warmup_steps=1, total_steps=1, **more)


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def notices(config, on_gpu=False, world_size=2):
    profile = Profile.parse(config, "ds.json")
    return rule_notices(profile, on_gpu=on_gpu, world_size=world_size)
