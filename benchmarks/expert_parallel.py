"""Measures what divided experts send, and how fast they train, beside ZeRO-3 and ZeRO-1.

    python -m benchmarks.expert_parallel --output benchmarks/results/expert_parallel.md

Each rank is pretrain.py in a process of its own, which counts what it gives to torch's collectives.
Every contender is started once in each round and takes some steps. Ratios are taken within a round,
so that a change in the machine's speed affects all of them alike. Bytes are those of rings, which
send each value as often as it has to be sent, as NCCL does; gloo sends more in some collectives.
Texts are random ids, so that routers are about as uneven as at the start of a training.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.counted_ranks import ZERO_3, Contender, Counted, Recipe, started
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.tables import parser, show, spread, table

IMBALANCE = "router/rank_imbalance"
SEQ_LEN, MICRO_BATCH, ACCUMULATION = 256, 2, 4
FINE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 4096,
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "intermediate_size": 256, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 512,
    "output_router_logits": True, "router_aux_loss_coef": 0.02, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
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
    return [*whole, *(Contender(stage, experts=ranks) for stage in (1, 2))]


def rounds(
    config: Path, scratch: Path, ranks: int, arguments: argparse.Namespace
) -> dict[Contender, list[Counted]]:
    """Let the contenders take steps in turn; return what each measured in each round."""
    found: dict[Contender, list[Counted]] = {each: [] for each in contenders(ranks)}
    recipe = Recipe(
        config, model_of(config).num_parameters, SEQ_LEN, arguments.micro_batch_size, ACCUMULATION,
        arguments.steps,
    )  # fmt: skip
    for number in range(arguments.rounds):
        for each, measured in found.items():
            measured.append(started(each, recipe, ranks, scratch))
            print(
                f"{config.stem}, {ranks} ranks, round {number + 1}: {each.name}: "
                f"{measured[-1].seconds:.2f} s, {measured[-1].mean_bytes / 1e6:.0f} MB",
                flush=True,
            )
    return found


@cache
def model_of(config: Path) -> Any:
    from zerolm.model.model import Model

    return Model.load(str(config))


def described(
    model: str,
    config: Path,
    ranks: int,
    found: Mapping[Contender, Sequence[Counted]],
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
                f"{measured[0].mean_bytes / 1e6:,.1f}",
                "1" if is_base else f"{measured[0].mean_bytes / found[ZERO_3][0].mean_bytes:.3f}",
                f"{statistics.median(each.seconds for each in measured):.2f}",
                "1" if is_base else spread([ours.seconds / base.seconds for ours, base in pairs]),
                f"{statistics.median(max(each.peak_bytes) for each in measured) / 1e6:,.0f}",
                f"{statistics.fmean(measured[-1].values(IMBALANCE)):.2f}"
                if contender.experts > 1
                else "",
            ]
        )
        parts = ", ".join(
            f"{name} {each / 1e6:,.1f}" for name, each in measured[0].mean_sent.items()
        )
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


if __name__ == "__main__":
    main()
