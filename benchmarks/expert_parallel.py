"""Measures what divided experts send, and how fast they train, beside ZeRO-3 and ZeRO-1.

    python -m benchmarks.expert_parallel --output benchmarks/results/expert_parallel.md

Each rank is pretrain.py in a process of its own, which counts what it gives to torch's collectives.
Every contender is started once in each round and takes some steps. Ratios are taken within a round,
so that a change in the machine's speed affects all of them alike. Bytes are those of rings, which
send each value as often as it has to be sent, as NCCL does; gloo sends more in some collectives.
Texts are random ids, so that routers are about as uneven as at the start of a training.
"""

import argparse
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
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ROOT
from benchmarks.contenders import argv, pretrain
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.tables import parser, show, spread, table

SEQ_LEN, MICRO_BATCH, ACCUMULATION = 256, 2, 4
WARMUP_STEPS = 1  # of a process, which allocates its memory in it
FINE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 4096,
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "intermediate_size": 256, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 512,
    "output_router_logits": True, "router_aux_loss_coef": 0.02, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A profile.

    Attributes:
        degree: number of ranks over which experts are divided.
        keeps: whether ZeRO-3 may keep a billion values gathered, as DeepSpeed does by default. All
            of a small model then stays gathered; in a large one, few layers do.
    """

    stage: int
    degree: int = 1
    keeps: bool = True

    @property
    def name(self) -> str:
        kept = "" if self.keeps else ", as in a large model"
        return f"ZeRO-{self.stage}{kept}" + (
            f", experts over {self.degree}" if self.degree > 1 else ""
        )

    def profile(self, num_parameters: int) -> dict[str, Any]:
        """Return the DeepSpeed JSON: the shipped one, with ZeRO-3's limits scaled to the model."""
        found = json.loads((ROOT / f"ds_configs/zero{self.stage}.json").read_text())
        if not self.keeps:
            limit = num_parameters // LARGE_MODEL
            found["zero_optimization"] |= dict.fromkeys(LIMITS, limit)
        return found


LIMITS = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
LARGE_MODEL = 30  # billions of parameters: DeepSpeed's limits are 1e9
ZERO_3 = Contender(3, keeps=False)


@dataclass(frozen=True)
class Measured:
    """What the ranks of a contender measured in a round.

    Attributes:
        seconds: seconds of a step.
        sent: bytes that a rank sends in a step, by collective, the mean over ranks.
        peak_bytes: peak of the largest rank's memory above that of its imports.
        imbalance: tokens of the busiest rank's experts, relative to the mean; 0: not divided.
        precision: that of weights and messages.
    """

    seconds: float
    sent: Mapping[str, float]
    peak_bytes: int
    imbalance: float
    precision: str

    @property
    def bytes(self) -> float:
        return sum(self.sent.values())


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), sys.argv[3:])
        return
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--steps", type=int, default=4, help="of a contender in a round")
    flags.add_argument("--micro_batch_size", type=int, default=MICRO_BATCH)
    flags.add_argument("--models", nargs="+", default=["mixtral-tiny", "fine-grained"])
    arguments = flags.parse_args()
    paragraphs = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        configs = {
            "mixtral-tiny": json.loads((ROOT / "model_configs/mixtral-tiny.json").read_text()),
            "fine-grained": FINE,
        }
        for model in arguments.models:
            path = scratch / f"{model}.json"
            path.write_text(json.dumps(configs[model]))
            write_random_shard(scratch / model, path, 200_000)
            for ranks in arguments.ranks:
                found = rounds(path, scratch, ranks, arguments)
                paragraphs += described(model, path, ranks, found, arguments)
                print("\n\n".join(paragraphs[-3:]), flush=True)
    show(paragraphs, hardware(), arguments.output)


def contenders(ranks: int) -> list[Contender]:
    whole = [ZERO_3, Contender(3), Contender(1)]
    return [*whole, *(Contender(stage, ranks) for stage in (1, 2))]


def rounds(
    config: Path, scratch: Path, ranks: int, arguments: argparse.Namespace
) -> dict[Contender, list[Measured]]:
    """Let the contenders take steps in turn; return what each measured in each round."""
    found: dict[Contender, list[Measured]] = {each: [] for each in contenders(ranks)}
    for number in range(arguments.rounds):
        for each, measured in found.items():
            measured.append(started(each, config, scratch, ranks, arguments))
            print(
                f"{config.stem}, {ranks} ranks, round {number + 1}: {each.name}: "
                f"{measured[-1].seconds:.2f} s, {measured[-1].bytes / 1e6:.0f} MB",
                flush=True,
            )
    return found


def started(
    contender: Contender, config: Path, scratch: Path, ranks: int, arguments: argparse.Namespace
) -> Measured:
    """Start a contender's ranks, and return what they measured."""
    from tests.launching import run_workers

    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        output, steps = Path(directory), WARMUP_STEPS + arguments.steps
        profile = output / "ds.json"
        profile.write_text(json.dumps(contender.profile(model_of(config).num_parameters)))
        micro = arguments.micro_batch_size
        flags = pretrain(
            SEQ_LEN * micro * ACCUMULATION * ranks, steps, output / "run", scratch / config.stem,
            model_config=config, seq_len=SEQ_LEN, micro_batch_size=micro, log_interval=1,
            deepspeed_config=profile, checkpoint_interval=steps,
        )[1:]  # fmt: skip
        if contender.degree > 1:
            flags += argv(expert_parallel=contender.degree)
        run_workers(ranks, Path(__file__), "--rank", output, *flags, timeout=900)
        each = [json.loads(path.read_text()) for path in output.glob("rank-*.json")]
        rows = (output / "run" / "metrics.jsonl").read_text().splitlines()
        precision = json.loads((output / "run" / "run.json").read_text())["ds_config"]["bf16"]
    ratios = [json.loads(row).get("router/rank_imbalance") for row in rows]
    assert len(each) == ranks
    times = each[0]["times"][WARMUP_STEPS - 1 :]
    sent: Counter[str] = Counter()
    for of_rank in each:
        first, last = (of_rank["sent"][place] for place in (WARMUP_STEPS - 1, -1))
        for name, value in last.items():
            sent[name] += (value - first.get(name, 0)) / arguments.steps / ranks
    return Measured(
        statistics.median(after - before for before, after in pairwise(times)),
        dict(sent),
        max(of_rank["peak_bytes"] for of_rank in each),
        statistics.fmean([each for each in ratios if each] or [0.0]),
        "bf16, gradients summed in float32" if precision["enabled"] else "float32",
    )


@cache
def model_of(config: Path) -> Any:
    from zerolm.model.model import Model

    return Model.load(str(config))


def described(
    model: str,
    config: Path,
    ranks: int,
    found: Mapping[Contender, Sequence[Measured]],
    arguments: argparse.Namespace,
) -> list[str]:
    """Return a heading, a table and what the collectives of each contender send."""
    loaded, micro = model_of(config), SEQ_LEN * arguments.micro_batch_size
    rows, lines = [], []
    for contender, measured in found.items():
        pairs = list(zip(measured, found[ZERO_3], strict=True))
        is_base = contender == ZERO_3
        rows.append(
            [
                contender.name,
                f"{measured[0].bytes / 1e6:,.1f}",
                "1" if is_base else f"{measured[0].bytes / found[ZERO_3][0].bytes:.3f}",
                f"{statistics.median(each.seconds for each in measured):.2f}",
                "1" if is_base else spread([ours.seconds / base.seconds for ours, base in pairs]),
                f"{statistics.median(each.peak_bytes for each in measured) / 1e6:,.0f}",
                f"{measured[-1].imbalance:.2f}" if contender.degree > 1 else "",
            ]
        )
        parts = ", ".join(f"{name} {each / 1e6:,.1f}" for name, each in measured[0].sent.items())
        lines.append(f"- {contender.name}: {parts}")
    head = [
        "profile", "MB sent by a rank and step", "of ZeRO-3's", "seconds a step", "of ZeRO-3's",
        "peak MB of a rank", "busiest rank's tokens",
    ]  # fmt: skip
    about = (
        f"{loaded.num_parameters:,} parameters, {loaded.num_active_parameters:,} for a token; a "
        f"step has {ACCUMULATION} micro-batches of {micro:,} tokens a rank, in "
        f"{found[ZERO_3][0].precision}; {arguments.rounds} rounds of {arguments.steps} "
        f"steps. MB by collective:"
    )
    return [f"## {model}, {ranks} ranks", table(head, rows), "\n".join([about, "", *lines])]


# ---- A rank


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
    steps: list[tuple[float, dict[str, float], int]] = []
    usual = Run.step

    @wraps(usual)
    def step(run: Run, *arguments: Any) -> Any:
        done = usual(run, *arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        steps.append((time.perf_counter(), dict(sent), peak))
        return done

    Run.step = step  # type: ignore[method-assign]
    code = program.main(flags)
    times, counts, peaks = zip(*steps, strict=True)
    found = {"times": times, "sent": counts, "peak_bytes": peaks[-1] - imported}
    (output / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    program.process_group.exit_process(code)


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


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
}


if __name__ == "__main__":
    main()
