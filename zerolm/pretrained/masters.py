"""Copy float32 weights into the optimizer's master weights, after `deepspeed.initialize`.

DeepSpeed creates the master weights of a bf16 or fp16 model from its rounded weights. Without this
copy, a run would start from rounded values of a float32 source.
"""

import torch
from torch import distributed as dist

from zerolm.engine.parameters import full_shape
from zerolm.engine.protocol import Engine
from zerolm.engine.stages import groups_of
from zerolm.engine.states import set_master
from zerolm.pretrained.loaded_weights import LoadedWeights


def set_masters(engine: Engine, weights: LoadedWeights) -> None:
    """Copy the source's values into the optimizer's master weights. Every rank must call this.

    Each rank reads a share of the parameters, and broadcasts one at a time to the other ranks, or
    to those of its pipeline stage. Does not support tensor parallelism, where each rank holds
    slices of the matrices.
    """
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    stage = groups_of(engine.optimizer)
    ranks = range(dist.get_world_size()) if stage is None else stage.copies
    group, index = None if stage is None else stage.data, ranks.index(dist.get_rank())
    units = [
        number
        for number, names in enumerate(weights.units)
        if stage is None or not parameters.keys().isdisjoint(names)
    ]
    for start in range(0, len(units), len(ranks)):
        wave = units[start : start + len(ranks)]
        values = weights.compute(wave[index], torch.float32) if index < len(wave) else {}
        for reader, unit in enumerate(wave):
            for name in weights.units[unit]:
                parameter = parameters.get(name)
                if parameter is None or not parameter.requires_grad:
                    continue  # a buffer or frozen parameter, which has no master weights
                if index == reader:
                    value = values[name].to(engine.device)
                else:
                    shape = full_shape(parameter)
                    value = torch.empty(shape, dtype=torch.float32, device=engine.device)
                dist.broadcast(value, src=ranks[reader], group=group)
                set_master(parameter, value)
