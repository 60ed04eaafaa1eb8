"""What each pipeline stage has: the division of a model's blocks, and its parameter shapes."""

import copy
import math
from collections.abc import Sequence

from zerolm.ds_config.profile import Profile
from zerolm.model.architecture import is_routed_expert, routed_fraction
from zerolm.model.flops import attention_multiply_adds, head_flops_per_token
from zerolm.model.model import Model
from zerolm.plan.rank_share import blocks_of


def with_layers(profile: Profile, model: Model, seq_len: int, stages: int) -> Profile:
    """Return a profile that names the number of blocks of each stage: as written, or such that the
    costliest stage costs as little as possible.
    """
    if profile.stage_layers:
        return profile
    costs, last = block_costs(model, seq_len)
    written = copy.deepcopy(dict(profile.json))
    written["pipeline"] = {"stages": stages, "layers": divide(costs, stages, last)}
    return Profile.parse(written, profile.name)


def block_costs(model: Model, seq_len: int) -> tuple[list[float], float]:
    """Return the forward multiply-adds of a token in each block, and those in the output head.

    Counts the experts of a token, and the keys in a window.
    """
    prefix = f"{blocks_of(model.shapes)[0]}."
    text = model.config.get_text_config()
    costs = [0.0] * text.num_hidden_layers
    for number, cost in enumerate(attention_multiply_adds(text, seq_len)[: len(costs)]):
        costs[number] += cost
    for name, shape in model.shapes.items():
        if name.startswith(prefix):
            share = routed_fraction(model.config) if is_routed_expert(name) else 1.0
            costs[int(name.removeprefix(prefix).partition(".")[0])] += share * math.prod(shape)
    return costs, head_flops_per_token(model.config, model.shapes) / 2


def shares(costs: Sequence[float], last: float, layers: Sequence[int]) -> list[float]:
    """Return the cost of each stage, relative to the mean."""
    found, start = [], 0
    for number, count in enumerate(layers):
        cost = sum(costs[start : start + count]) + (last if number == len(layers) - 1 else 0.0)
        found.append(cost)
        start += count
    mean = sum(found) / len(found)
    return [cost / mean for cost in found]


def divide(costs: Sequence[float], stages: int, last: float = 0.0) -> list[int]:
    """Divide blocks into stages; return the number of blocks of each stage.

    The costliest stage costs as little as possible, and then the others are as equal as possible.

    Args:
        costs: of each block.
        stages: at most the number of blocks.
        last: cost of what the last stage computes besides.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def of(start: int, stop: int, stage: int) -> float:
        return sums[stop] - sums[start] + (last if stage == stages - 1 else 0.0)

    count = len(costs)
    infinite = float("inf")
    lowest = [[infinite] * (count + 1) for _ in range(stages + 1)]
    lowest[0][0] = 0.0
    for stage in range(stages):
        for stop in range(stage + 1, count + 1):
            lowest[stage + 1][stop] = min(
                max(lowest[stage][start], of(start, stop, stage)) for start in range(stage, stop)
            )
    limit = lowest[stages][count] * (1 + 1e-9)
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for stage in range(stages):
        reached: dict[int, tuple[float, list[int]]] = {}
        for start, (squares, division) in best[stage].items():
            for stop in range(start + 1, count + 1):
                cost = of(start, stop, stage)
                if cost <= limit:
                    found = (squares + cost * cost, [*division, stop - start])
                    if stop not in reached or found[0] < reached[stop][0]:
                        reached[stop] = found
        best.append(reached)
    return best[stages][count][1]
