"""Check at the start of a run that loaded weights are finite and equal to the values read.

The statistics that `check_initialization` compares are meaningless for trained weights.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zerolm.common.errors import ConfigError
from zerolm.distributed.collectives import gather_objects
from zerolm.engine.parameters import gathered
from zerolm.model.build import weighted_bit_sum
from zerolm.model.init_check import CHUNK, InitializationReport
from zerolm.model.stages import of_all_stages
from zerolm.pretrained.initial_source import InitialSource
from zerolm.pretrained.loaded_weights import LoadedWeights


class Sums:
    """Wrapper around `LoadedWeights` that records checksums of the values read by this rank.

    `build_model` accepts it as the source of initial values.
    """

    def __init__(self, weights: LoadedWeights):
        self.weights, self.units = weights, weights.units
        self.read: dict[str, tuple[int, int]] = {}

    def compute_all(
        self, units: Sequence[int], dtype: torch.dtype
    ) -> Iterator[dict[str, torch.Tensor]]:
        for unit in units:
            values = self.weights.compute(unit, dtype)
            for name, value in values.items():
                self.read[name] = (weighted_bit_sum(value), _non_finite(value))
            yield values

    def is_rounded_to(self, dtype: torch.dtype) -> bool:
        """Return whether converting the weights to `dtype` may round them."""
        return dtype.itemsize < max(getattr(torch, name).itemsize for name in self.weights.dtypes)


def verified(source: InitialSource | None) -> Sums | None:
    """Check a source's files; return the initial values, or None if the run does not need them.

    Every rank must call this.

    Raises:
        ConfigError: a checkpoint file is damaged; raised on every rank.
    """
    if source is None or source.weights is None:
        return None
    share = source.verify(torch.distributed.get_rank(), torch.distributed.get_world_size())
    problems = [line for lines in gather_objects(share) for line in lines]
    if problems:
        fix = f"--init_from {source.source}: it is damaged. Restore it, or choose another step."
        raise ConfigError([*problems, fix])
    return Sums(source.weights)


def check_loaded(model: nn.Module, sums: Sums) -> InitializationReport:
    """Compare every parameter with the values that were read from the source. Every rank must call
    this.

    All ranks return the same report. Partitioned parameters are gathered one at a time.
    """
    read = {name: entry for share in gather_objects(sums.read) for name, entry in share.items()}
    problems, sizes = [], dict[str, int]()
    read_names = {  # a tied weight may have been read under its other name
        id(parameter): name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in read
    }
    for name, parameter in model.named_parameters():
        with gathered([parameter]):
            values = parameter.detach()
            sizes[name] = values.numel()
            total = weighted_bit_sum(values)
        expected, non_finite = read.get(read_names.get(id(parameter), ""), (None, 0))
        if non_finite:
            problems.append(f"{name}: {non_finite} of {values.numel()} values are not finite")
        elif total != expected:
            problems.append(f"{name}: differs from the values that were read")
    merged = [line for lines in gather_objects(problems) for line in lines]
    sizes = of_all_stages(model, sizes)
    return InitializationReport(
        len(sizes), sum(sizes.values()), 0, tuple(dict.fromkeys(merged)),
        "as in the source, finite",
    )  # fmt: skip


def _non_finite(values: torch.Tensor) -> int:
    chunks = values.reshape(-1).split(CHUNK)
    return sum(int((~torch.isfinite(chunk)).sum()) for chunk in chunks)
