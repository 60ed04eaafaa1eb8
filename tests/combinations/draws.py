"""The factors of a run, and the draws: all pairs of their values, then runs without features."""

import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from allpairspy import AllPairs

Draw = Mapping[str, str]
ON, OFF = "on", "off"
EXPERTS = ("mixtral", "deepseek_v3", "qwen3_next")
# The features that a loop in plain PyTorch does not have.
FEATURES = (
    "ema", "z_loss", "adaptive_clip", "qk_clip", "completep", "chunked_loss", "integrity",
    "memory_copies", "fp8",
)  # fmt: skip
FACTORS: dict[str, tuple[str, ...]] = {
    "model": (
        "llama", "qwen3", "gpt2", "gpt_neox", "gemma3_text", "phi", "mamba2", *EXPERTS,
    ),
    "profile": (
        "zero2", "zero3", "zero1", "zero3_all_sharded", "zero2_offload", "zero3_offload",
    ),
    "data": ("concat", "mixture", "masked", "packed", "packed_masked", "ramp"),
    "schedule": ("cosine", "wsd", "linear", "constant", "warmup_lr"),
    "optimizer": ("adamw", "muon", "lion"),
    "between": ("nothing", "evaluation", "samples", "skipped_step", "rollback"),
    "interruption": ("killed", "killed_in_a_save", "stopped"),
    "recompute": ("off", "full", "selective"),
    "experts": ("plain", "global_router_loss", "router_z_loss", "balance_rate"),
    "precision": ("fp32", "bf16"),
    "compile": (OFF, ON),
    "ranks": ("2", "1"),
    "workers": ("0", "2"),
    **dict.fromkeys(FEATURES, (OFF, ON)),
}  # fmt: skip
FAULTS = ("skipped_step", "rollback")  # values of `between`
# What a loop in plain PyTorch trains, too, without a fault.
PLAIN = dict.fromkeys(FEATURES, OFF) | {
    "experts": "plain", "data": "concat", "optimizer": "adamw",
}  # fmt: skip


def refused(draw: Draw) -> bool:
    """Return whether two values of a draw exclude each other, as docs or messages of zerolm say."""
    expected = [
        draw["experts"] != "plain" and draw["model"] not in EXPERTS,
        draw["experts"] == "balance_rate" and draw["model"] != "deepseek_v3",
        draw["experts"] != "plain" and draw["compile"] == ON,
        draw["fp8"] == ON and draw["precision"] == "fp32",
        draw["optimizer"] == "lion" and not draw["profile"].endswith("offload"),
        draw["optimizer"] == "muon" and draw["adaptive_clip"] == ON,
        draw["optimizer"] != "adamw" and draw["completep"] == ON,
    ]
    return any(expected)


def pairs(draw: Draw) -> set[tuple[str, str]]:
    """Return the pairs of values of a draw, each written as `factor=value`."""
    values = [f"{name}={draw[name]}" for name in FACTORS]
    return set(itertools.combinations(values, 2))


@cache
def all_pairs(turn: int = 0) -> list[dict[str, str]]:
    """Return draws that together have all pairs of values that no rule of `refused` excludes.

    Args:
        turn: decides the order of the values, and with it which values meet beyond the pairs.
    """
    random_ = random.Random(turn)
    values = {name: random_.sample(each, len(each)) for name, each in FACTORS.items()}
    names = list(FACTORS)

    def allowed(row: Sequence[str]) -> bool:
        return not refused(_Partly(zip(names, row, strict=False)))

    rows = AllPairs(OrderedDict(values if turn else FACTORS), filter_func=allowed)
    return [dict(zip(names, row, strict=True)) for row in rows]


class _Partly(dict):
    """A draw whose later factors have no value yet, which excludes nothing."""

    def __missing__(self, name: str) -> str:
        return FACTORS[name][0] if name not in ("model", "profile", "precision") else "none"


def draw_number(number: int) -> dict[str, str]:
    """Return a draw: in turn one of all pairs, and a run without features."""
    turn, place = 0, number // 2
    if number % 2 == 0:
        while place >= len(all_pairs(turn)):
            place -= len(all_pairs(turn))
            turn += 1
        return all_pairs(turn)[place]
    random_ = random.Random(number)
    while True:
        draw = {name: random_.choice(values) for name, values in FACTORS.items()} | PLAIN
        if not refused(draw) and draw["between"] not in FAULTS:
            return draw


def coverage(draws: Iterable[Draw]) -> tuple[int, int]:
    """Return how many pairs these draws have, of all that the design has."""
    wanted = set().union(*map(pairs, all_pairs()))
    found = Counter(pair for draw in draws for pair in pairs(draw))
    return len(wanted & set(found)), len(wanted)
