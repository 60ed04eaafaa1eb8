"""Finds a model config given as the DeepSpeed JSON, and the reverse."""

import contextlib

from zerolm.common.errors import ConfigError
from zerolm.common.records import read_json
from zerolm.common.shipped import find_config
from zerolm.config.settings import Settings

DEEPSPEED_KEYS = {  # every DeepSpeed JSON has some of these keys; no model config has any
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
}  # fmt: skip


def exchanged_problems(settings: Settings) -> list[str]:
    """Return a problem if the model config is actually a DeepSpeed JSON or vice versa.

    Without this check dozens of keys would be reported as unknown.
    """
    model, profile = settings.model_config, settings.deepspeed_config
    is_profile = bool(DEEPSPEED_KEYS & _keys(model)) and "model_type" not in _keys(model)
    is_model = "model_type" in _keys(profile)
    where = {name: settings.where(name) for name in ("model_config", "deepspeed_config")}
    if is_profile and is_model:
        return [
            f"{where['model_config']}: {model} is a DeepSpeed JSON, and --deepspeed_config "
            f"{profile} is a model config. Swap the two."
        ]
    if is_profile:
        return [
            f"{where['model_config']}: {model} is a DeepSpeed JSON. Name the config.json of a "
            f"model: --model_config model_configs/llama-160m.json."
        ]
    if is_model:
        return [
            f"{where['deepspeed_config']}: {profile} is a model config. Name a ZeRO profile: "
            f"--deepspeed_config ds_configs/zero2.json."
        ]
    return []


def _keys(path: str | None) -> set[str]:
    """Return the keys in a JSON file, or an empty set if it cannot be read, which is reported
    later.
    """
    with contextlib.suppress(ConfigError):
        return set(read_json(find_config(path), "")) if path else set()
    return set()
