"""Ranks of pretrain.py that count what they send and record what they do, for other benchmarks.

    python benchmarks/counted_ranks.py OUTPUT [--live_bytes] FLAGS    one rank; see `started`

Bytes are those of rings, which send each value as often as it has to be sent, as NCCL does; gloo
sends more in some collectives.
"""

import inspect
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ROOT
from benchmarks.contenders import argv, pretrain

LIMITS = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
LARGE_MODEL = 30  # billions of parameters: DeepSpeed's limits are 1e9
WARMUP_STEPS = 1  # of a process, which allocates its memory in it
LIVE_BYTES = "--live_bytes"  # of a rank: trace its tensors' memory


@dataclass(frozen=True)
class Contender:
    """A profile.

    Attributes:
        zero: ZeRO's stage.
        keeps: whether ZeRO-3 may keep a billion values gathered, as DeepSpeed does by default. All
            of a small model then stays gathered; in a large one, few layers do.
        experts: number of ranks over which experts are divided.
        stages: number of pipeline stages.
    """

    zero: int
    keeps: bool = True
    experts: int = 1
    stages: int = 1

    @property
    def name(self) -> str:
        kept = "" if self.keeps else ", as in a large model"
        divided = f", experts over {self.experts}" if self.experts > 1 else ""
        return f"ZeRO-{self.zero}{kept}{divided}" + (
            f", {self.stages} stages" if self.stages > 1 else ""
        )

    def profile(self, num_parameters: int) -> dict[str, Any]:
        """Return the DeepSpeed JSON: the shipped one, with ZeRO-3's limits scaled to the model."""
        found = json.loads((ROOT / f"ds_configs/zero{self.zero}.json").read_text())
        if not self.keeps:
            limit = num_parameters // LARGE_MODEL
            found["zero_optimization"] |= dict.fromkeys(LIMITS, limit)
        if self.stages > 1:
            found["pipeline"] = {"stages": self.stages}
        return found


ZERO_3 = Contender(3, keeps=False)


class Recipe(NamedTuple):
    """What all contenders train.

    Attributes:
        config: the model's config.json, beside which a data directory has its name.
        accumulation: micro-batches of a rank and step, where ranks have sequences of their own.
        precision: bf16 or fp32; None: what the ranks choose.
    """

    config: Path
    num_parameters: int
    seq_len: int
    micro_batch_size: int
    accumulation: int
    steps: int
    precision: str | None = None

    @property
    def rank_tokens(self) -> int:
        return self.seq_len * self.micro_batch_size * self.accumulation


@dataclass(frozen=True)
class Counted:
    """What the ranks of a contender measured.

    Attributes:
        seconds: median seconds of a step.
        sent: bytes that each rank sends in a step, by collective.
        link_bytes: bytes that each rank's host sends to others in a step, as its kernel counts.
        peak_bytes: peak of each rank's memory above that of its imports.
        passes: of each rank's last step, see `recorded_passes`.
        live_bytes: of each rank's tensors, between steps and at the peak; None: not traced.
        rows: the rows of metrics.jsonl.
        profile: the resolved DeepSpeed JSON.
    """

    seconds: float
    sent: Sequence[Mapping[str, float]]
    link_bytes: Sequence[float]
    peak_bytes: Sequence[int]
    passes: Sequence[Sequence[Any]]
    live_bytes: Sequence[Any]
    rows: Sequence[Mapping[str, Any]]
    profile: Mapping[str, Any]

    @property
    def mean_sent(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by collective, the mean over ranks."""
        total: Counter[str] = Counter()
        for of_rank in self.sent:
            total.update(of_rank)
        return {name: value / len(self.sent) for name, value in total.items()}

    @property
    def mean_bytes(self) -> float:
        return sum(self.mean_sent.values())

    @property
    def precision(self) -> str:
        is_bf16 = self.profile.get("bf16", {}).get("enabled")
        return "bf16, gradients summed in float32" if is_bf16 else "float32"

    def values(self, metric: str) -> list[float]:
        """Return a metric of the steps that have it."""
        return [row[metric] for row in self.rows if row.get(metric)]


def on_this_host(ranks: int, *arguments: object) -> None:
    from tests.launching import run_workers

    run_workers(ranks, Path(__file__), *arguments, timeout=900)


def started(
    contender: Contender,
    recipe: Recipe,
    ranks: int,
    scratch: Path,
    *,
    traces_memory: bool = False,
    run: Callable[..., None] = on_this_host,
) -> Counted:
    """Start a contender's ranks, and return what they measured.

    Args:
        scratch: has the recipe's data directory.
        run: takes the number of ranks and the arguments of this file, and waits for the ranks.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        output, steps = Path(directory), WARMUP_STEPS + recipe.steps
        profile = output / "ds.json"
        profile.write_text(json.dumps(contender.profile(recipe.num_parameters)))
        flags = pretrain(
            recipe.rank_tokens * ranks, steps, output / "run", scratch / recipe.config.stem,
            model_config=recipe.config, seq_len=recipe.seq_len, log_interval=1,
            micro_batch_size=recipe.micro_batch_size, deepspeed_config=profile,
            checkpoint_interval=steps,
        )[1:]  # fmt: skip
        if recipe.precision:
            flags += argv(precision=recipe.precision)
        if contender.experts > 1:
            flags += argv(expert_parallel=contender.experts)
        run(ranks, output, *[LIVE_BYTES] * traces_memory, *flags)
        each = [json.loads((output / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        rows = (output / "run" / "metrics.jsonl").read_text().splitlines()
        record = json.loads((output / "run" / "run.json").read_text())
    times = each[0]["times"][WARMUP_STEPS - 1 :]
    sent = []
    for of_rank in each:
        first, last = (of_rank["sent"][place] for place in (WARMUP_STEPS - 1, -1))
        sent.append(
            {name: (value - first.get(name, 0)) / recipe.steps for name, value in last.items()}
        )
    return Counted(
        statistics.median(after - before for before, after in pairwise(times)),
        sent,
        [
            (of_rank["link"][-1] - of_rank["link"][WARMUP_STEPS - 1]) / recipe.steps
            for of_rank in each
        ],
        [of_rank["peak_bytes"] for of_rank in each],
        [of_rank["passes"] for of_rank in each],
        [of_rank["live_bytes"] for of_rank in each],
        [json.loads(row) for row in rows],
        record["ds_config"],
    )


# -------------------------------------------------------------------------------------------------
# A rank


def rank(output: Path, flags: list[str]) -> None:
    """Train as pretrain.py does, and write what this rank sent by the end of each step."""
    import deepspeed  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import pretrain as program
    from zerolm.train import engine_building  # noqa: F401
    from zerolm.train.run import Run

    imported = status_bytes("VmRSS")
    sent: Counter[str] = Counter()
    for name in SENT:
        setattr(torch.distributed, name, counted(getattr(torch.distributed, name), name, sent))
    passes = recorded_passes()
    steps: list[tuple[float, dict[str, float], int, int, list[Any]]] = []
    usual = Run.step

    @wraps(usual)
    def step(run: Run, *arguments: Any) -> Any:
        passes.clear()
        with torch.profiler.record_function(STEP):
            done = usual(run, *arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        steps.append((time.perf_counter(), dict(sent), link_bytes(), peak, list(passes)))
        return done

    Run.step = step  # type: ignore[method-assign]
    live = None
    if flags[:1] == [LIVE_BYTES]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as traced:
            code = program.main(flags[1:])
        live = live_bytes(traced.profiler.kineto_results.events())
    else:
        code = program.main(flags)
    times, counts, links, peaks, orders = zip(*steps, strict=True)
    found = {"times": times, "sent": counts, "link": links, "peak_bytes": peaks[-1] - imported}
    found |= {"passes": orders[-1], "live_bytes": live}
    (output / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    program.process_group.exit_process(code)


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


# ---- Bytes


def link_bytes() -> int:
    """Return the bytes that this host has sent to others."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    sent = {line.split(":")[0].strip(): line.split(":")[1].split()[8] for line in lines}
    return sum(int(value) for device, value in sent.items() if device != "lo")


def counted(usual: Callable[..., Any], name: str, sent: Counter[str]) -> Callable[..., Any]:
    """Return a collective that adds the bytes that this rank sends in a ring."""
    from torch import distributed

    signature = inspect.signature(usual)

    @wraps(usual)
    def call(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        group = given.get("group")
        size = distributed.get_world_size(group)
        sent[name] += SENT[name](given, size, distributed.get_rank(group))
        return usual(*arguments, **named)

    return call


def num_bytes(value: Any) -> int:
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(each.numel() * each.element_size() for each in values)


def to_others(given: Mapping[str, Any], size: int, number: int) -> float:
    """Return the bytes of an all-to-all that do not stay with their rank."""
    rows, splits = given["input"], given.get("input_split_sizes")
    own = splits[number] / max(1, len(rows)) if splits else 1 / size
    return num_bytes(rows) * (1 - own)


def to_neighbours(given: Mapping[str, Any], *_: int) -> float:
    return sum(num_bytes(each.tensor) for each in given["p2p_op_list"] if is_send(each))


def is_send(operation: Any) -> bool:
    return bool(operation.op.__name__ == "isend")


# Bytes that a rank sends, on average over the ranks of a group.
SENT: dict[str, Callable[[Mapping[str, Any], int, int], float]] = {
    "all_reduce": lambda given, size, _: 2 * num_bytes(given["tensor"]) * (size - 1) / size,
    "reduce": lambda given, size, _: num_bytes(given["tensor"]) * (size - 1) / size,
    "broadcast": lambda given, size, _: num_bytes(given["tensor"]) * (size - 1) / size,
    "all_gather": lambda given, size, _: num_bytes(given["tensor"]) * (size - 1),
    "all_gather_into_tensor": lambda given, size, _: num_bytes(given["input_tensor"]) * (size - 1),
    "reduce_scatter": lambda given, size, _: num_bytes(given["input_list"]) * (size - 1) / size,
    "reduce_scatter_tensor": lambda given, size, _: num_bytes(given["input"]) * (size - 1) / size,
    "all_to_all_single": to_others,
    "batch_isend_irecv": to_neighbours,
}


# ---- Passes and memory

STEP = "counted_ranks.step"
FORWARD, BACKWARD, EXCHANGE = "forward", "backward", "exchange"


def recorded_passes() -> list[Any]:
    """Return a list to which a pipeline stage adds its passes and exchanges, in their order:
    [FORWARD or BACKWARD, number of the micro-batch], [EXCHANGE, [[whether it sends, peer], ...]].
    """
    from zerolm.distributed import pipeline
    from zerolm.train.micro_batches import MicroBatches

    found: list[Any] = []

    def recording(usual: Callable[..., Any], of: Callable[[Any], list[Any]]) -> Callable[..., Any]:
        @wraps(usual)
        def call(*arguments: Any) -> Any:
            found.append(of(arguments))
            return usual(*arguments)

        return call

    for method, kind in (("stage_forward", FORWARD), ("stage_backward", BACKWARD)):
        usual = getattr(MicroBatches, method)
        recorded = recording(usual, lambda arguments, kind=kind: [kind, arguments[1]])
        setattr(MicroBatches, method, recorded)
    exchanges = pipeline.wait_for_neighbours
    pipeline.wait_for_neighbours = recording(
        exchanges, lambda given: [EXCHANGE, [[is_send(each), each.peer] for each in given[0]]]
    )
    return found


def live_bytes(events: Any) -> dict[str, int]:
    """Return the bytes of live tensors: most in the last step, and when it begins."""
    begin, end = max((e.start_ns(), e.end_ns()) for e in events if e.name() == STEP)
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live, before, peak = 0, 0, 0
    for moment, size in changes:
        if begin <= moment <= end:
            peak = max(peak, live, live + size)
        elif moment < begin:
            before = live + size
        live += size
    return {"states": before, "peak": peak}


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2:])
