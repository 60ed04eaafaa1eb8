"""Which profile: every stage, offload, recomputation and micro-batch that a run can use, ranked.

Only what pretrain.py accepts is tried. Tensor and sequence parallelism are not: what they take has
not been measured.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from launch.plan.estimate import Assumptions, Estimate, estimate
from launch.plan.hardware import Hardware
from launch.plan.subject import Subject, resolve_subject
from zerolm.common.errors import ConfigError, Findings
from zerolm.common.shipped import DS_CONFIGS
from zerolm.common.values import shown_bytes
from zerolm.config import defaults
from zerolm.config.settings import SELECTIVE, Recompute, Settings
from zerolm.ds_config.profile import Profile
from zerolm.model.activation_checkpointing import flag_words, title
from zerolm.model.model import Model
from zerolm.plan.resolve import resolve_settings

CPU = {"device": "cpu", "pin_memory": True}
OFFLOADS = {1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "both")}
INDIFFERENT = 0.02  # a smaller difference in time is less than the model of time can tell
NOT_OFFERED = (
    "Stage 0 is not tried: pretrain.py refuses it, stage 1 has the same numbers in less memory. "
    "Tensor, pipeline and sequence parallelism are not tried."
)

LEVELS: tuple[Recompute, ...] = (False, SELECTIVE, True)
AGAIN = {False: "no", SELECTIVE: SELECTIVE, True: "yes"}


@dataclass(frozen=True)
class Candidate:
    """One profile with the micro-batch that is fastest with it.

    Attributes:
        profile: as written, with "auto" in it; its name is the candidate's.
        rejected: why it cannot be used, None when it can.
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
    """Return every candidate, the usable ones first, fastest first; all train the same batch.

    Args:
        settings: without a DeepSpeed JSON. A micro-batch or gradient checkpointing that is given
            is kept, else both are tried.

    Raises:
        ConfigError: the batch does not divide over the devices, or a DeepSpeed JSON is given.
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
            for again in (given,) if given else LEVELS:
                wanted = dataclasses.replace(settings, gradient_checkpointing=again)
                candidates.append(_best(model, wanted, profile, place, assumed))
    return sorted(candidates, key=_rank)


def _rank(one: Candidate) -> tuple[bool, float, int, int]:
    """Rank by time; of times that differ by less than we can tell, the lower stage is first."""
    if one.rejected is not None or one.found is None:
        return True, 0.0, LEVELS.index(one.checkpointing), 0
    subject = one.found.subject
    steps = round(math.log(one.step_seconds) / math.log(1 + INDIFFERENT))
    return False, steps, LEVELS.index(one.checkpointing), subject.profile.zero_stage


def profile_of(stage: int, offload: str, hardware: Hardware) -> Profile:
    """Return the shipped profile of a stage, with the offload and the device's precision.

    Args:
        offload: `none`, `optimizer`, or `both` optimizer and weights.
    """
    ds = Profile.read(DS_CONFIGS / f"zero{stage}.json").json
    if offload != "none":
        ds["zero_optimization"]["offload_optimizer"] = dict(CPU)
    if offload == "both":
        ds["zero_optimization"]["offload_param"] = dict(CPU)
    if hardware.bf16 is None:
        del ds["bf16"]
        ds["fp16"] = {"enabled": True}
    return Profile.parse(ds, _name(stage, offload))


def _name(stage: int, offload: str) -> str:
    what = {"none": "", "optimizer": " + optimizer on the host"}
    return f"ZeRO-{stage}" + what.get(offload, " + optimizer and weights on the host")


def _best(
    model: Model,
    settings: Settings,
    profile: Profile,
    place: tuple[Hardware, int, int],
    assumed: Assumptions,
) -> Candidate:
    """Return the fastest micro-batch of a profile that fits, or why none does."""
    assert settings.batch_tokens and settings.seq_len
    per_rank = settings.batch_tokens // settings.seq_len // place[1]
    sizes = [settings.micro_batch_size] if settings.micro_batch_size else None
    best: Estimate | None = None
    smallest: Estimate | None = None
    for micro in sizes or defaults.micro_batch_candidates(max(1, per_rank)):
        wanted = dataclasses.replace(
            settings,
            micro_batch_size=micro,
            explicit=settings.explicit | {"batch_tokens", "micro_batch_size"},
        )
        try:
            subject: Subject = resolve_subject(model, profile, wanted, *place)
        except ConfigError as error:
            return Candidate(profile, settings.gradient_checkpointing, None, str(error))
        found = estimate(subject, assumed)
        smallest = smallest or found
        if not found.memory.fits:
            break
        # Of equal times the smaller micro-batch: it leaves memory free.
        if best is None or found.step.seconds < 0.995 * best.step.seconds:
            best = found
    assert smallest is not None
    rejected = None if best else why_not(smallest)
    return Candidate(profile, settings.gradient_checkpointing, best or smallest, rejected)


def why_not(found: Estimate) -> str:
    """Say what does not fit, and what takes most of it."""
    memory = found.memory
    micro = found.subject.settings.micro_batch_size
    reasons = []
    over = memory.used + memory.margin - memory.capacity
    if over > 0:
        parts = {
            name: getattr(memory, name)
            for name in (
                "weights", "gradients", "optimizer", "master", "buckets", "gathered",
                "activations", "loss",
            )
        }  # fmt: skip
        most = max(parts, key=lambda name: parts[name])
        reasons.append(
            f"{shown_bytes(over)} too much on the device at micro-batch {micro}, of which {most} "
            f"{shown_bytes(parts[most])}"
        )
    if memory.host > memory.host_capacity:
        reasons.append(
            f"{shown_bytes(memory.host)} on the host, a device's share is "
            f"{shown_bytes(memory.host_capacity)}"
        )
    return "; ".join(reasons)


def as_text(candidates: list[Candidate]) -> str:
    """Return the ranked table, and the reasons of the rest."""
    head = f"{'profile':<42} {'again':>9} {'micro':>5} {'memory':>9} {'step s':>8} {'MFU':>6} "
    lines = [head + f"{'tokens/s':>11} {'days':>8}  bound by"]
    rejected = []
    for one in candidates:
        if one.rejected is not None or one.found is None:
            again = title(one.checkpointing)
            rejected.append(f"rejected  {one.profile.name}{again and f', {again}'}: {one.rejected}")
            continue
        found = one.found
        lines.append(
            f"{one.profile.name:<42} {AGAIN[one.checkpointing]:>9} "
            f"{found.subject.settings.micro_batch_size:>5} {shown_bytes(found.memory.used):>9} "
            f"{found.step.seconds:>8.3g} {found.mfu:>6.1%} {found.tokens_per_second:>11,.0f} "
            f"{found.days:>8.3g}  {found.step.bound}"
        )
    if len(lines) == 1:
        lines = ["no profile fits: use more devices, or larger ones"]
    return "\n".join([*lines, *rejected, NOT_OFFERED])


def next_words(best: Candidate, path: str) -> str:
    """Say how to run what was written."""
    assert best.found is not None
    settings = best.found.subject.settings
    flags = f"--deepspeed_config {path} --micro_batch_size {settings.micro_batch_size} "
    flags += f"--batch_tokens {settings.batch_tokens}"
    flags = " ".join([flags, *flag_words(best.checkpointing)])
    return f"wrote {path}; for pretrain.py: {flags}"


def to_json(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Return the table for `--json`."""
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
