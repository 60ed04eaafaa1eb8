"""`NamedSums`: sums figures over ranks by name, all of a step in a single reduction."""

from collections.abc import Hashable, Mapping
from itertools import islice
from typing import TypeVar

import torch

from zerolm.distributed.collectives import gather_objects, sum_over_ranks

Figures = Mapping[str, torch.Tensor]  # {name: float64 tensor of shape () or (n,)}
Key = TypeVar("Key", bound=Hashable)


class NamedSums:
    """Sums groups of figures. Every rank makes the same calls with the same groups.

    Ranks that hold other parts of the model may have other names. When a group first occurs, the
    ranks agree on its names and shapes; a rank adds zero for a name that it lacks. If a name joins
    a group later, every rank must return a new one in that step, for which they agree again.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._zeros: dict[Hashable, dict[str, torch.Tensor]] = {}  # for each agreed name

    def sum(self, groups: Mapping[Key, Figures]) -> dict[Key, dict]:
        """Return the sums over ranks: {group: {name: number or list of numbers}}."""
        self._agree(groups)
        parts = []
        for group, figures in groups.items():
            agreed = [zero.shape for zero in self._zeros[group].values()]
            own = [*{**self._zeros[group], **figures}.values()]
            changed = f"{group}: other shapes than before"
            assert [each.shape for each in own] == agreed, changed
            parts += [each.reshape(-1) for each in own]
        sums = iter(sum_over_ranks(torch.cat(parts)).tolist())
        return {
            group: {
                name: [*islice(sums, len(zero))] if zero.ndim else next(sums)
                for name, zero in self._zeros[group].items()
            }
            for group in groups
        }

    def _agree(self, groups: Mapping[Key, Figures]) -> None:
        new = {
            group: {name: tuple(each.shape) for name, each in figures.items()}
            for group, figures in groups.items()
            if group not in self._zeros or figures.keys() - self._zeros[group].keys()
        }
        for of_rank in gather_objects(new) if new else ():
            for group, shapes in of_rank.items():
                zeros = {name: self._zero(shape) for name, shape in shapes.items()}
                self._zeros[group] = self._zeros.get(group, {}) | zeros

    def _zero(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)
