"""Checks what a run combines with `pipeline.stages`, which divides the layers over ranks.

What was not compared with plain PyTorch is refused; tests/end_to_end/test_stages.py compares the
rest, and `zerolm.preflight.stage_proof` proves the cut of the model. docs/parallelism.md explains
the reasons.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zerolm.common.remembered import recall
from zerolm.config.settings import Settings, flags_of
from zerolm.distributed.layout import Layout
from zerolm.ds_config.optimizers import NEEDS_MUP
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.topology import LAYERS_KEY, STAGES_KEY
from zerolm.model.architecture import ConfigKey, meta_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NOT_COMPARED = {"lion", *NEEDS_MUP}
REMOVE = "Remove it, or the block"


def problems(settings: Settings, config: "PretrainedConfig", profile: Profile) -> Iterator[str]:
    """Yield why the model, the profile or a flag does not support pipeline stages."""
    if profile.stages == 1:
        return
    where = f"{profile.name}: {STAGES_KEY}: {profile.stages}"
    for why in _model_reasons(config, profile):
        yield f"{where}: {settings.model_config}: {why}."
    for why, fix in _profile_reasons(config, profile):
        yield f"{where} is not supported with {why}. {fix}."
    for flag, about in flags_of(settings).items():
        if getattr(settings, flag) and (why := about["not_with"].get("stages")):
            yield f"{settings.where(flag)}: not supported with {where}: {why}. Remove one of them."


def batch_problems(settings: Settings, profile: Profile, layout: Layout) -> Iterator[str]:
    """Yield why the batch has too few micro-batches.

    Args:
        settings: with the sizes of batch and micro-batch filled in.
    """
    if profile.stages == 1 or not (settings.batch_tokens and settings.micro_batch_size):
        return
    tokens = settings.batch_ramp_start or settings.batch_tokens
    per_replica = tokens // (settings.seq_len or 1) // layout.replicas
    count = per_replica // settings.micro_batch_size
    if 0 < count < profile.stages:
        yield (
            f"{profile.name}: {STAGES_KEY}: {profile.stages} stages, but a replica has only "
            f"{count} micro-batch(es) a step, so stages would mostly wait. Lower "
            f"--micro_batch_size, use fewer stages, or raise --batch_tokens."
        )


def _model_reasons(config: "PretrainedConfig", profile: Profile) -> Iterator[str]:
    inputs = ConfigKey.of(config).inputs()
    facts: dict[str, Any] = recall("stages", inputs, lambda: _facts(config))
    if facts["why"]:
        yield f"{facts['why']}. Use ZeRO-3 instead of the block"
        return
    blocks = config.get_text_config().num_hidden_layers
    if profile.stages > blocks:
        yield f"the model has {blocks} blocks ({facts['path']}). Use at most as many stages"
    elif profile.stage_layers and sum(profile.stage_layers) != blocks:
        yield (
            f"{LAYERS_KEY}: {list(profile.stage_layers)} has {sum(profile.stage_layers)} blocks, "
            f"but the model has {blocks}. Correct it"
        )
    for key, value in facts["random"].items():
        yield f"{key} is {value}: stages draw other numbers than a whole model. Set it to 0"


def _facts(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the name of the list of blocks, why there is none, and keys of random changes."""
    from zerolm.model.stages import blocks_path

    found: dict[str, Any] = {"path": "", "why": "", "random": {}}
    model = meta_model(ConfigKey.of(config).config)
    try:
        found["path"] = blocks_path(model)
    except ValueError as error:
        found["why"] = str(error)
    for key, value in model.config.get_text_config().to_dict().items():
        heads = key.startswith(("classifier", "summary"))  # causal LMs do not have these
        is_random = "drop" in key or "jitter" in key
        if is_random and not heads and isinstance(value, (int, float)) and value > 0:
            found["random"][key] = value
    return found


def _profile_reasons(config: "PretrainedConfig", profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield what in the profile is not supported, and what to change."""
    if profile.zero_stage not in (1, 2):
        yield (
            f"ZeRO stage {profile.zero_stage}: weights would be gathered in each micro-batch",
            "Use stage 1 or 2",
        )
    if profile.zero_stage == 2 and getattr(config, "tie_word_embeddings", False):
        yield (
            "ZeRO stage 2 and tie_word_embeddings: gradients are reduced before both ends have "
            "added theirs",
            "Use stage 1",
        )
    if profile.optimizer.kind in NOT_COMPARED:
        yield f"optimizer.type {profile.optimizer.name}", "Use AdamW"
    if profile.uses_muon and profile.uses_bf16_optimizer:
        yield (
            "Muon at stage 1 in bf16 with fp32 gradients: DeepSpeed refuses it",
            "Use AdamW or stage 2",
        )
    if profile.precision == "fp16":
        yield "fp16: a stage gets gradients that are scaled already", "Use bf16"
    for name, device in profile.offloads.items():
        if device != "none":
            yield f"zero_optimization.{name}", REMOVE
    if profile.block("torch_autocast").get("enabled") is True:
        yield "torch_autocast", REMOVE
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (profile.json.get(name) or default) != default:
            yield name, REMOVE
    for name in ("round_robin_gradients", "parameter_alignment"):
        if profile.zero.get(name):
            yield f"zero_optimization.{name}", REMOVE
    if profile.json.get("scheduler") is not None:
        yield "scheduler", "Use --schedule"
