"""What each pipeline stage has: the division of a model's blocks, and its parameter shapes."""

import copy
import math
from collections.abc import Sequence

from zerolm.ds_config.profile import Profile
from zerolm.model.architecture import is_routed_expert, routed_fraction
from zerolm.model.flops import attention_multiply_adds, head_flops_per_token
from zerolm.model.model import Model


def with_layers(profile: Profile, model: Model, seq_len: int, stages: int) -> Profile:
    """Return a profile that names the number of blocks of each stage: as written, or such that the
    costliest stage costs as little as possible.
    """
    if profile.stage_layers:
        return profile
    from zerolm.model.stages import divide

    costs, last = block_costs(model, seq_len)
    written = copy.deepcopy(dict(profile.json))
    written["pipeline"] = {"stages": stages, "layers": divide(costs, stages, last)}
    return Profile.parse(written, profile.name)


def block_costs(model: Model, seq_len: int) -> tuple[list[float], float]:
    """Return the forward multiply-adds of a token in each block, and those in the output head.

    Counts the experts of a token, and the keys in a window.
    """
    from zerolm.model.stages import block_prefix

    prefix = f"{block_prefix(model.config)}."
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
