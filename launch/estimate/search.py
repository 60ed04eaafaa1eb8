"""`plan --search`: rank every combination of stage, offload, recomputation and micro-batch.

Only profiles that pretrain.py accepts are tried; of a mixture also with experts divided over as
many ranks of a host as possible, and on several hosts also a pipeline stage for each. Tensor and
sequence parallelism are not tried, because their time estimates have been compared with few
benchmarks. A plan for a single profile lists faster ones if the run would wait for its collectives.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.estimate.estimate import Assumptions, Estimate, estimate
from launch.estimate.planned_run import PlannedRun, plan_run
from zerolm.common.errors import ConfigError, Findings
from zerolm.common.shipped import DS_CONFIGS
from zerolm.common.values import shown_bytes
from zerolm.config import defaults
from zerolm.config.settings import NOT_GIVEN, SELECTIVE, Recompute, Settings
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.model.activation_checkpointing import command_line_arguments, describe
from zerolm.model.architecture import num_experts
from zerolm.model.model import Model
from zerolm.plan.hardware import Hardware
from zerolm.plan.resolve import resolve_settings

CPU = {"device": "cpu", "pin_memory": True}
OFFLOADS = {1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "both")}
TIME_RESOLUTION = 0.02  # relative; finer than the accuracy of the time estimate
QUANTIZED = "quantized"
CHANGES_CURVE = "ZeRO++ sends weights in 8 bits and gradients in 4, which changes the loss curve."
WAITING_SHARE, WORTH_NAMING = 0.15, 0.05  # shares of the step time
LINKS = (0.01, 12_800.0)  # Gb/s a host, between which `break_even` looks
NOT_TRIED = (
    "Stage 0 is not tried: pretrain.py refuses it, and stage 1 has the same results in less "
    "memory. Tensor and sequence parallelism are not tried, and of pipeline stages one a host."
)

RECOMPUTE_LEVELS: tuple[Recompute, ...] = (False, SELECTIVE, True)
RECOMPUTE_LABELS = {False: "no", SELECTIVE: SELECTIVE, True: "yes"}


@dataclass(frozen=True)
class Candidate:
    """A profile with the micro-batch that makes it fastest.

    Attributes:
        profile: the profile, with unresolved "auto" values; its name is the candidate's name.
        found: the estimate; None if the profile was refused before an estimate was computed.
        rejected: why the profile cannot be used; None if it is usable.
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
    """Return all candidates for the same batch: usable ones first, ordered by step time.

    Args:
        settings: settings without a DeepSpeed JSON. A given micro-batch size or
            `gradient_checkpointing` is kept; otherwise all values are tried.
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
        Findings([]),  # ignored: the candidates report the same problems
        layout=Layout(devices),
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
    candidates: list[Candidate] = []
    profiles: list[Profile] = []
    for stage, offloads in OFFLOADS.items():
        profiles += [profile_of(stage, offload, hardware) for offload in offloads]
    given = settings.gradient_checkpointing
    options = [(profile, settings) for profile in profiles + zeropp_profiles(*place)]
    alone = [profile_of(stage, "none", hardware) for stage in (1, 2, 3)]
    if (staged := in_stages(model, *place)) is not None:
        options.append((staged, settings))
        alone.append(staged)
    if not settings.expert_parallel and (degree := expert_degree(model, *place[1:])) > 1:
        options += [divided(profile, degree, settings) for profile in alone]
    for profile, own in options:
        for recompute in (given,) if given else RECOMPUTE_LEVELS:
            variant = dataclasses.replace(own, gradient_checkpointing=recompute)
            candidates.append(_best(model, variant, profile, place, assumed))
    reasons = {each.rejected for each in candidates}
    if len(reasons) == 1 and (reason := reasons.pop()) and candidates[0].found is None:
        raise ConfigError(reason)  # about the batch or the model, not the profile
    return sorted(candidates, key=_rank)


def faster(
    profile: Profile, settings: Settings, found: Estimate, assumed: Assumptions
) -> list[Candidate]:
    """Return faster alternatives, fastest first, for a stage-3 run that waits for its collectives.

    Tries the run's own profile, stages 1 and 2, hpZ, tensor parallelism within a host, divided
    experts, and a pipeline stage for each host. The batch and recomputation stay the same, but any
    micro-batch may be used. Returns [] for other runs.

    Args:
        profile, settings: the run's profile and settings before they were resolved.
        found: estimate for the run.
    """
    run, step = found.run, found.step
    if run.profile.zero_stage < 3 or step.exposed < WAITING_SHARE * step.seconds:
        return []
    settings = dataclasses.replace(
        settings,
        seq_len=run.settings.seq_len,
        batch_tokens=run.settings.batch_tokens,
        total_tokens=run.settings.total_tokens,
        gradient_checkpointing=run.settings.gradient_checkpointing,
        micro_batch_size=NOT_GIVEN,
        deepspeed_config=None,
    )
    hardware, place = run.hardware, (run.hardware, run.devices, run.devices_per_node)
    first, second = (profile_of(stage, "none", hardware) for stage in (1, 2))
    profiles = [profile, first, second, *zeropp_profiles(*place)[:1]]
    if (degree := run.devices_per_node) > 1:
        tensor = {"tensor_parallel": {"autotp_size": degree}}
        name = f"ZeRO-1 + {degree} tensor parallel"
        profiles.append(Profile.parse({**first.json, **tensor}, name))
    alone = [first, second, profile_of(3, "none", hardware)]
    if (staged := in_stages(run.model, *place)) is not None:
        profiles.append(staged)
        alone.append(staged)
    tried = [_best(run.model, settings, each, place, assumed) for each in profiles]
    if (degree := expert_degree(run.model, *place[1:])) > 1:
        for each in alone:
            other, variant = divided(each, degree, settings)
            tried.append(_best(run.model, variant, other, place, assumed))
    enough = (1 - WORTH_NAMING) * step.seconds
    usable = [each for each in tried if each.rejected is None and each.step_seconds < enough]
    return sorted(usable, key=lambda each: each.step_seconds)


def _rank(one: Candidate) -> tuple[bool, float, int, int]:
    """Return a sort key: usable candidates first, then step time, recomputation and stage.

    Step times are rounded to `TIME_RESOLUTION`. Rejected candidates come last.
    """
    if one.rejected is not None or one.found is None:
        return True, 0.0, RECOMPUTE_LEVELS.index(one.checkpointing), 0
    stage = one.found.run.profile.zero_stage
    steps = round(math.log(one.step_seconds) / math.log(1 + TIME_RESOLUTION))
    return False, steps, RECOMPUTE_LEVELS.index(one.checkpointing), stage


def profile_of(stage: int, offload: str, hardware: Hardware) -> Profile:
    """Return the shipped profile for a stage, with an offload and a precision that is supported.

    Args:
        offload: `none`, `optimizer`, or `both` (the optimizer and the weights).
    """
    changes = {}
    if offload != "none":
        changes["offload_optimizer"] = dict(CPU)
    if offload == "both":
        changes["offload_param"] = dict(CPU)
    return _changed(f"zero{stage}", _name(stage, offload), hardware, changes)


def expert_degree(model: Model, devices: int, devices_per_node: int) -> int:
    """Return the largest number of ranks of a host over which experts can be divided; 1: none."""
    experts, _ = num_experts(model.config)
    return math.gcd(experts or 1, devices, devices_per_node)


def in_stages(
    model: Model, hardware: Hardware, devices: int, devices_per_node: int
) -> Profile | None:
    """Return a profile with a pipeline stage for each host; None if that is not possible."""
    stages = -(-devices // devices_per_node)
    blocks = getattr(model.config.get_text_config(), "num_hidden_layers", 0) or 0
    if stages == 1 or devices % devices_per_node or stages > blocks:
        return None
    profile = _changed("zero1", f"ZeRO-1 + {stages} stages", hardware, {})
    return Profile.parse({**profile.json, "pipeline": {"stages": stages}}, profile.name)


def break_even(candidates: list[Candidate], assumed: Assumptions) -> str | None:
    """Return a note that names the links at which the best run with pipeline stages and the best
    with ZeRO-3 take the same time; None if one of them does not fit.
    """
    best: dict[bool, Estimate] = {}
    for one in sorted((each for each in candidates if each.rejected is None), key=_rank):
        if one.found is not None:
            is_staged, stage = one.found.run.layout.stages > 1, one.found.run.profile.zero_stage
            if is_staged or stage == 3:
                best.setdefault(is_staged, one.found)
    if len(best) < 2:
        return None

    def ahead(gigabits: float) -> bool:
        seconds = []
        for found in (best[True], best[False]):
            run = found.run
            link = gigabits * 1e9 / 8 / run.devices_per_node
            hardware = dataclasses.replace(run.hardware, inter_node=link)
            moved = dataclasses.replace(run, hardware=hardware)
            seconds.append(estimate(moved, assumed).step.seconds)
        return seconds[0] < seconds[1]

    low, high = LINKS
    staged, other = best[True].run, best[False].run
    names = (
        f"{staged.layout.stages} pipeline stages",
        f"ZeRO-3 (micro-batch {other.settings.micro_batch_size})",
    )
    here = staged.hardware.inter_node * staged.devices_per_node * 8 / 1e9
    if ahead(low) == ahead(high):
        faster = names[0] if ahead(low) else names[1]
        return f"note: {faster} is faster at all links from {low:g} to {high:g} Gb/s a host"
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ahead(middle) else (low, middle)
    return (
        f"note: {names[0]} are faster than {names[1]} below about {low:.2g} Gb/s a host; this plan "
        f"has {here:.3g}"
    )


def divided(profile: Profile, degree: int, settings: Settings) -> tuple[Profile, Settings]:
    """Return the profile and settings of a run with experts divided over `degree` ranks."""
    named = Profile.parse(profile.json, f"{profile.name} + experts over {degree}")
    return named, dataclasses.replace(settings, expert_parallel=degree)


def zeropp_profiles(hardware: Hardware, devices: int, devices_per_node: int) -> list[Profile]:
    """Return profiles that send less data between hosts: ZeRO-3 with hpZ, and zeropp.json.

    Each host is one hpZ group. Returns [] for a single host.
    """
    if hardware.is_cpu or not 1 < devices_per_node < devices:
        return []
    group = {"zero_hpz_partition_size": devices_per_node}
    return [
        _changed("zero3", f"ZeRO-3 + hpZ over {devices_per_node}", hardware, group),
        _changed("zeropp", f"ZeRO++ over {devices_per_node}, {QUANTIZED}", hardware, group),
    ]


def _changed(shipped: str, name: str, hardware: Hardware, changes: Mapping[str, Any]) -> Profile:
    """Return a shipped profile with some values of its `zero_optimization` block changed.

    The precision is changed too if the hardware does not support bf16.
    """
    ds = Profile.read(DS_CONFIGS / f"{shipped}.json").json
    ds["zero_optimization"].update(changes)
    if hardware.is_cpu and hardware.device.lacks_bf16:
        ds["bf16"] = {"enabled": False}
    if hardware.bf16 is None:
        del ds["bf16"]
        ds["fp16"] = {"enabled": True}
    return Profile.parse(ds, name)


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
    """Return a candidate for the profile with its fastest micro-batch that fits in memory.

    If none fits, the candidate is rejected with the reason.
    """
    assert settings.batch_tokens and settings.seq_len
    stages = profile.stages
    per_rank = settings.batch_tokens // settings.seq_len * stages // place[1]
    sizes = [settings.micro_batch_size] if settings.micro_batch_size else None
    if stages > 1 and sizes is None:  # each stage needs a micro-batch
        every = defaults.micro_batch_candidates(max(1, per_rank))
        sizes = [size for size in every if per_rank // size >= stages] or [1]
    best: Estimate | None = None
    smallest: Estimate | None = None
    for micro in sizes or defaults.micro_batch_candidates(max(1, per_rank)):
        variant = dataclasses.replace(
            settings,
            micro_batch_size=micro,
            explicit=settings.explicit | {"batch_tokens", "micro_batch_size"},
        )
        try:
            run: PlannedRun = plan_run(
                model, profile, variant, *place, rank_imbalance=assumed.rank_imbalance
            )
        except ConfigError as error:
            return Candidate(profile, settings.gradient_checkpointing, None, str(error))
        found = estimate(run, assumed)
        smallest = smallest or found
        if not found.memory.fits:
            break
        # A larger micro-batch must be faster, since a smaller one leaves more memory free.
        if best is None or found.step.seconds < 0.995 * best.step.seconds:
            best = found
    assert smallest is not None
    rejected = None if best else rejection_reason(smallest)
    return Candidate(profile, settings.gradient_checkpointing, best or smallest, rejected)


def rejection_reason(found: Estimate) -> str:
    """Return a message that says which memory is too small and which component uses most of it."""
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
            f"{shown_bytes(memory.host)} on the host, which exceeds a device's share of "
            f"{shown_bytes(memory.host_capacity)}"
        )
    return "; ".join(reasons)


def as_text(candidates: list[Candidate]) -> str:
    """Return the table of ranked profiles, followed by the rejected profiles with their reasons."""
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
    changed = [CHANGES_CURVE] if any(QUANTIZED in one.profile.name for one in candidates) else []
    return "\n".join([*lines, *rejected, *changed, NOT_TRIED])


def instead(found: Estimate, others: list[Candidate]) -> str:
    """Return a note that lists the alternatives found by `faster`."""
    share = found.step.exposed / found.step.seconds
    options = [
        f"{one.profile.name}, micro-batch {one.found.run.settings.micro_batch_size}: "
        f"{found.step.seconds / one.step_seconds:.2g} times as fast"
        for one in others
        if one.found is not None
    ]
    return (
        f"note: {share:.0%} of a step is spent waiting for weights and gradients sharded over "
        f"{found.run.devices:,} devices. Faster with the same batch: {'; '.join(options)}"
    )


def usage(best: Candidate, path: Path) -> str:
    """Return a line with the pretrain.py flags to use the profile that was written to `path`."""
    assert best.found is not None
    settings = best.found.run.settings
    flags = f"--deepspeed_config {path} --micro_batch_size {settings.micro_batch_size} "
    flags += f"--batch_tokens {settings.batch_tokens}"
    if (degree := best.found.run.layout.experts) > 1:
        flags += f" --expert_parallel {degree}"
    flags = " ".join([flags, *command_line_arguments(best.checkpointing)])
    return f"wrote {path}; for pretrain.py: {flags}"


def to_json(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Return the candidates for `--json`."""
    from launch.estimate.estimate import to_json as figures

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
