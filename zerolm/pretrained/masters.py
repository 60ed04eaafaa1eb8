"""Copy float32 weights into the optimizer's master weights, after `deepspeed.initialize`.

DeepSpeed creates the master weights of a bf16 or fp16 model from its rounded weights. Without this
copy, a run would start from rounded values of a float32 source.
"""

import torch
from torch import distributed as dist

from zerolm.engine.parameters import full_shape
from zerolm.engine.protocol import Engine
from zerolm.engine.states import set_master
from zerolm.pretrained.loaded_weights import LoadedWeights


def set_masters(engine: Engine, weights: LoadedWeights) -> None:
    """Copy the source's values into the optimizer's master weights. Every rank must call this.

    Each rank reads a share of the parameters, and broadcasts one at a time to the other ranks. Does
    not support tensor parallelism, where each rank holds slices of the matrices.
    """
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for start in range(0, len(weights.units), world_size):
        wave = weights.units[start : start + world_size]
        values = weights.compute(start + rank, torch.float32) if rank < len(wave) else {}
        for reader, names in enumerate(wave):
            for name in names:
                parameter = parameters.get(name)
                if parameter is None or not parameter.requires_grad:
                    continue  # a buffer or frozen parameter, which has no master weights
                if rank == reader:
                    value = values[name].to(engine.device)
                else:
                    shape = full_shape(parameter)
                    value = torch.empty(shape, dtype=torch.float32, device=engine.device)
                dist.broadcast(value, src=reader)
                set_master(parameter, value)
