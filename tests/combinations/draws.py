"""The factors of a run, and the draws: all pairs of their values, then runs without features."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from allpairspy import AllPairs

Draw = Mapping[str, str]
ON, OFF = "on", "off"
EXPERTS = ("mixtral", "deepseek_v3", "qwen3_next")
RECURRENT = ("mamba2", "qwen3_next")
SCALABLE = ("llama", "gpt2", "gpt_neox", "mixtral")
UNBOUNDED_LOGITS = (*SCALABLE, "phi", "deepseek_v3")
EAGER = 0.8  # of the runs without features
ANY = 20  # every so many draws one is from all values, and most of these are refused
TRIES, CHANGES = 12, 500  # at random, to find a draw with a pair
# The features that a loop in plain PyTorch does not have.
FEATURES = (
    "ema", "z_loss", "qk_clip", "completep", "chunked_loss", "integrity",
    "memory_copies", "fp8",
)  # fmt: skip
FACTORS: dict[str, tuple[str, ...]] = {
    "model": (
        "llama", "qwen3", "gpt2", "gpt_neox", "gemma3_text", "phi", "mamba2", *EXPERTS,
    ),
    "profile": (
        "zero2", "zero3", "zero1", "zero3_all_sharded", "zero2_offload", "zero3_offload",
        "zero1_experts", "zero2_experts", "zero3_experts", "zero1_stages",
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
    model, experts, optimizer = draw["model"], draw["experts"], draw["optimizer"]
    on = {name for name, value in draw.items() if value == ON}
    expected = [
        experts != "plain" and model not in EXPERTS,
        experts in ("global_router_loss", "router_z_loss") and model == "deepseek_v3",
        experts == "balance_rate" and model != "deepseek_v3",
        "compile" in on and (experts != "plain" or draw["recompute"] == "selective"),
        # torch 2.13 declares a variable twice in its C++ for two biases with one gradient.
        "compile" in on and model == "gpt_neox" and draw["precision"] == "bf16",
        "qk_clip" in on and ("compile" in on or model not in UNBOUNDED_LOGITS),
        "completep" in on and (model not in SCALABLE or optimizer != "adamw"),
        "fp8" in on and (draw["precision"] == "fp32" or model == "gpt2"),
        optimizer == "lion" and not draw["profile"].endswith("offload"),
        draw["schedule"] == "warmup_lr" and (optimizer == "muon" or "completep" in on),
        draw["data"].endswith("masked") and model in RECURRENT,
        draw["profile"].endswith("experts") and not divides_experts(draw),
        draw["profile"].endswith("stages") and not has_stages(draw),
    ]
    return any(expected)


def divides_experts(draw: Draw) -> bool:
    """Return whether the experts of a draw can be divided over two ranks."""
    excluded = draw["fp8"] == ON or draw["schedule"] == "warmup_lr" or draw["ranks"] == "1"
    return not excluded and draw["model"] in EXPERTS and draw["optimizer"] != "lion"


def has_stages(draw: Draw) -> bool:
    """Return whether the layers of a draw can be divided over two ranks."""
    excluded = draw["fp8"] == ON or draw["schedule"] == "warmup_lr" or draw["ranks"] == "1"
    # Faults are injected into the loss of the first rank, which has none.
    return not excluded and draw["between"] not in FAULTS and draw["optimizer"] != "lion"


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
    found = [dict(zip(names, row, strict=True)) for row in rows]
    covered = set().union(*map(pairs, found))
    for pair in sorted(possible_pairs() - covered):  # the library misses some, between exclusions
        if pair not in covered:
            choice = _draws_with(pair, random_) or _draws_with(pair, random.Random(0))
            found.append(max(choice, key=lambda each: len(pairs(each) - covered)))
            covered |= pairs(found[-1])
    return found


@cache
def possible_pairs() -> set[tuple[str, str]]:
    """Return the pairs of values that are in some draw that no rule excludes."""
    written = [[f"{name}={value}" for value in values] for name, values in FACTORS.items()]
    every = {
        pair
        for one, other in itertools.combinations(written, 2)
        for pair in itertools.product(one, other)
    }
    return {pair for pair in every if _draws_with(pair, random.Random(0))}


def _draws_with(pair: tuple[str, str], random_: random.Random) -> list[dict[str, str]]:
    """Return draws at random that have a pair, none of them excluded.

    Half of the values are the first of their factor, which excludes least.
    """
    values = dict(each.split("=") for each in pair)
    free = [name for name in FACTORS if name not in values]
    found = []
    for _ in range(TRIES):
        draw = {name: _value(name, random_) for name in FACTORS} | values
        for name in random_.choices(free, k=CHANGES):
            if not refused(draw):
                found.append(draw)
                break
            draw[name] = _value(name, random_)
    return found


def _value(name: str, random_: random.Random) -> str:
    return FACTORS[name][0] if random_.random() < 0.5 else random_.choice(FACTORS[name])


class _Partly(dict):
    """A draw whose later factors have no value yet, which excludes nothing."""

    def __missing__(self, name: str) -> str:
        return FACTORS[name][0] if name not in ("model", "profile", "precision") else "none"


def draw_number(number: int) -> dict[str, str]:
    """Return a draw: in turn one of all pairs, and a run without features; now and then any."""
    random_ = random.Random(number)
    if number % ANY == ANY - 1:
        return {name: random_.choice(values) for name, values in FACTORS.items()}
    turn, place = 0, number // 2
    if number % 2 == 0:
        while place >= len(all_pairs(turn)):
            place -= len(all_pairs(turn))
            turn += 1
        return all_pairs(turn)[place]
    while True:
        draw = {name: random_.choice(values) for name, values in FACTORS.items()} | PLAIN
        if random_.random() < EAGER:  # slow on a CPU
            draw["compile"] = OFF
        if not refused(draw) and draw["between"] not in FAULTS:
            return draw


def coverage(draws: Iterable[Draw]) -> tuple[int, int]:
    """Return how many pairs these draws have, of all that the design has."""
    wanted = possible_pairs()
    return len(wanted & set().union(*map(pairs, draws))), len(wanted)
