"""`plan --search`: rank every combination of stage, offload, recomputation and micro-batch.

Only profiles that pretrain.py accepts are tried. Tensor and sequence parallelism are not tried,
because their time estimates have not been compared with benchmarks.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from launch.plan.estimate import Assumptions, Estimate, estimate
from launch.plan.hardware import Hardware
from launch.plan.planned_run import PlannedRun, plan_run
from zerolm.common.errors import ConfigError, Findings
from zerolm.common.shipped import DS_CONFIGS
from zerolm.common.values import shown_bytes
from zerolm.config import defaults
from zerolm.config.settings import SELECTIVE, Recompute, Settings
from zerolm.ds_config.profile import Profile
from zerolm.model.activation_checkpointing import command_line_arguments, describe
from zerolm.model.model import Model
from zerolm.plan.resolve import resolve_settings

CPU = {"device": "cpu", "pin_memory": True}
OFFLOADS = {1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "both")}
TIME_RESOLUTION = 0.02  # relative; the time estimate cannot tell smaller differences apart
NOT_TRIED = (
    "Stage 0 is not tried: pretrain.py refuses it, and stage 1 has the same results in less "
    "memory. Tensor, pipeline and sequence parallelism are not tried."
)

RECOMPUTE_LEVELS: tuple[Recompute, ...] = (False, SELECTIVE, True)
RECOMPUTE_LABELS = {False: "no", SELECTIVE: SELECTIVE, True: "yes"}


@dataclass(frozen=True)
class Candidate:
    """One profile with its fastest micro-batch.

    Attributes:
        profile: a profile with "auto" values, whose name is the candidate's.
        found: its figures; None if the profile was refused before any were computed.
        rejected: why it cannot be used; None if it can.
    """

    profile: Profile
    checkpointing: Recompute
    found: Estimate | None
    rejected: str | None

    @property
    def step_seconds(self) -> float:
        return self.found.step.seconds if self.found is not None else float("inf")


def search(
    model: Model,
    settings: Settings,
    hardware: Hardware,
    devices: int,
    devices_per_node: int,
    assumed: Assumptions,
) -> list[Candidate]:
    """Return all candidates, usable ones first, by step time; all train the same batch.

    Args:
        settings: settings without a DeepSpeed JSON. A given micro-batch or gradient checkpointing
            is kept; otherwise all values are tried.
    """
    if settings.deepspeed_config:
        raise ConfigError(
            f"{settings.where('deepspeed_config')}: {settings.deepspeed_config}, but --search "
            f"chooses it. Remove one of them."
        )
    sized = resolve_settings(
        settings,
        model,
        Profile.parse({}),
        Findings([]),  # the candidates report them
        world_size=devices,
        memory_bytes=None,
        round_batch=True,
    )
    settings = dataclasses.replace(
        settings,
        seq_len=sized.seq_len,
        batch_tokens=sized.batch_tokens,
        total_tokens=sized.total_tokens,
    )
    place = (hardware, devices, devices_per_node)
    candidates = []
    for stage, offloads in OFFLOADS.items():
        for offload in offloads:
            profile = profile_of(stage, offload, hardware)
            given = settings.gradient_checkpointing
            for recompute in (given,) if given else RECOMPUTE_LEVELS:
                variant = dataclasses.replace(settings, gradient_checkpointing=recompute)
                candidates.append(_best(model, variant, profile, place, assumed))
    return sorted(candidates, key=_rank)


def _rank(one: Candidate) -> tuple[bool, float, int, int]:
    """Rank by time; if times are equal within `TIME_RESOLUTION`, the lower stage comes first."""
    if one.rejected is not None or one.found is None:
        return True, 0.0, RECOMPUTE_LEVELS.index(one.checkpointing), 0
    stage = one.found.run.profile.zero_stage
    steps = round(math.log(one.step_seconds) / math.log(1 + TIME_RESOLUTION))
    return False, steps, RECOMPUTE_LEVELS.index(one.checkpointing), stage


def profile_of(stage: int, offload: str, hardware: Hardware) -> Profile:
    """Return the shipped profile of a stage, with offload, in a precision the device supports.

    Args:
        offload: `none`, `optimizer`, or `both` optimizer and weights.
    """
    ds = Profile.read(DS_CONFIGS / f"zero{stage}.json").json
    if offload != "none":
        ds["zero_optimization"]["offload_optimizer"] = dict(CPU)
    if offload == "both":
        ds["zero_optimization"]["offload_param"] = dict(CPU)
    if hardware.is_cpu and hardware.device.lacks_bf16:
        ds["bf16"] = {"enabled": False}
    if hardware.bf16 is None:
        del ds["bf16"]
        ds["fp16"] = {"enabled": True}
    return Profile.parse(ds, _name(stage, offload))


def _name(stage: int, offload: str) -> str:
    suffixes = {"none": "", "optimizer": " + optimizer on the host"}
    return f"ZeRO-{stage}" + suffixes.get(offload, " + optimizer and weights on the host")


def _best(
    model: Model,
    settings: Settings,
    profile: Profile,
    place: tuple[Hardware, int, int],
    assumed: Assumptions,
) -> Candidate:
    """Return the profile with the fastest micro-batch that fits, or the reason that none does."""
    assert settings.batch_tokens and settings.seq_len
    per_rank = settings.batch_tokens // settings.seq_len // place[1]
    sizes = [settings.micro_batch_size] if settings.micro_batch_size else None
    best: Estimate | None = None
    smallest: Estimate | None = None
    for micro in sizes or defaults.micro_batch_candidates(max(1, per_rank)):
        variant = dataclasses.replace(
            settings,
            micro_batch_size=micro,
            explicit=settings.explicit | {"batch_tokens", "micro_batch_size"},
        )
        try:
            run: PlannedRun = plan_run(model, profile, variant, *place)
        except ConfigError as error:
            return Candidate(profile, settings.gradient_checkpointing, None, str(error))
        found = estimate(run, assumed)
        smallest = smallest or found
        if not found.memory.fits:
            break
        # At equal times the smaller micro-batch is better, since it leaves memory free.
        if best is None or found.step.seconds < 0.995 * best.step.seconds:
            best = found
    assert smallest is not None
    rejected = None if best else rejection_reason(smallest)
    return Candidate(profile, settings.gradient_checkpointing, best or smallest, rejected)


def rejection_reason(found: Estimate) -> str:
    """Return which memory is too small, and the largest component."""
    memory = found.memory
    micro = found.run.settings.micro_batch_size
    reasons = []
    over = memory.used + memory.margin - memory.capacity
    if over > 0:
        components = {
            name: getattr(memory, name)
            for name in (
                "weights", "gradients", "optimizer", "master", "secondary", "buckets", "gathered",
                "activations", "loss",
            )
        }  # fmt: skip
        largest = max(components, key=lambda name: components[name])
        reasons.append(
            f"{shown_bytes(over)} too much on the device at micro-batch {micro}, mostly {largest} "
            f"({shown_bytes(components[largest])})"
        )
    if memory.host > memory.host_capacity:
        reasons.append(
            f"{shown_bytes(memory.host)} on the host, more than a device's share of "
            f"{shown_bytes(memory.host_capacity)}"
        )
    return "; ".join(reasons)


def as_text(candidates: list[Candidate]) -> str:
    """Return the ranked table, and the rejected profiles with reasons."""
    head = f"{'profile':<42} {'recompute':>9} {'micro':>5} {'memory':>9} {'step s':>8} {'MFU':>6} "
    lines = [head + f"{'tokens/s':>11} {'days':>8}  bound by"]
    rejected = []
    for one in candidates:
        if one.rejected is not None or one.found is None:
            name = ", ".join(filter(None, [one.profile.name, describe(one.checkpointing)]))
            rejected.append(f"rejected  {name}: {one.rejected}")
            continue
        found = one.found
        lines.append(
            f"{one.profile.name:<42} {RECOMPUTE_LABELS[one.checkpointing]:>9} "
            f"{found.run.settings.micro_batch_size:>5} {shown_bytes(found.memory.used):>9} "
            f"{found.step.seconds:>8.3g} {found.mfu:>6.1%} {found.tokens_per_second:>11,.0f} "
            f"{found.days:>8.3g}  {found.step.bound}"
        )
    if len(lines) == 1:
        lines = ["no profile fits: use more devices, or devices with more memory"]
    return "\n".join([*lines, *rejected, NOT_TRIED])


def usage(best: Candidate, path: str) -> str:
    """Return a line with pretrain.py's flags for the written profile."""
    assert best.found is not None
    settings = best.found.run.settings
    flags = f"--deepspeed_config {path} --micro_batch_size {settings.micro_batch_size} "
    flags += f"--batch_tokens {settings.batch_tokens}"
    flags = " ".join([flags, *command_line_arguments(best.checkpointing)])
    return f"wrote {path}; for pretrain.py: {flags}"


def to_json(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Return the candidates for `--json`."""
    from launch.plan.estimate import to_json as figures

    return [
        {
            "profile": one.profile.name,
            "gradient_checkpointing": one.checkpointing,
            "rejected": one.rejected,
            "ds_config": one.profile.json,
            "figures": None if one.found is None else figures(one.found),
        }
        for one in candidates
    ]
