"""Where each parameter's values lie in the flat tensors that ZeRO's ranks keep. Pure arithmetic.

An optimizer works on flat tensors, one for each group of parameters ("group" here also means one of
stage 3's sub-groups); each rank has its part of each. The two ways to cut:

    stages 1, 2   the group's parameters are laid end to end, filled up to a multiple of
                  2 * ranks, and the whole is cut into equal parts
    stage 3       each parameter is cut into equal parts, the last one filled up, and a rank's
                  part of the group is its parts of the parameters laid end to end

Either way a rank has at most one run of consecutive values of each parameter, and consecutive
ranks have consecutive runs. Source: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT_VALUES = 2  # nccl_start_alignment_factor of DeepSpeed


class Run(NamedTuple):
    """Values `start` to `stop` of a parameter, `offset` values into a rank's part of a group."""

    group: int
    offset: int
    start: int
    stop: int


class Copy(NamedTuple):
    """`length` values from one rank's part of a group to a place in this rank's part of another."""

    source_rank: int
    source_group: int
    source_offset: int
    group: int
    offset: int
    length: int


class Partitions:
    """How the parameters of a model are cut over ranks.

    Args:
        groups: the number of values of each parameter, by name, in order, for each group.
        world_size: number of ranks.
        each: every parameter is cut by itself, as stage 3 does.
    """

    def __init__(self, groups: Sequence[Mapping[str, int]], world_size: int, each: bool):
        self.groups, self.world_size, self.each = groups, world_size, each
        self.sizes: list[int] = []  # of a rank's part of each group, what fills it up included
        self._places: dict[str, tuple[int, int, int]] = {}  # group, offset in it, values in all
        for number, group in enumerate(groups):
            lengths = [-(-size // world_size) if each else size for size in group.values()]
            offsets = [0, *accumulate(lengths)]
            for name, offset in zip(group, offsets, strict=False):
                assert name not in self._places, f"{name} is in two groups"
                self._places[name] = number, offset, group[name]
            unit = ALIGNMENT_VALUES * world_size
            part = offsets[-1] if each else -(-offsets[-1] // unit) * ALIGNMENT_VALUES
            self.sizes.append(part)

    def parameters(self) -> dict[str, int]:
        """Return the number of values of every parameter."""
        return {name: size for group in self.groups for name, size in group.items()}

    def run(self, name: str, rank: int) -> Run:
        """Return what a rank has of a parameter; start and stop are equal when it has nothing."""
        group, offset, size = self._places[name]
        if self.each:
            length = -(-size // self.world_size)
            start = min(rank * length, size)
            return Run(group, offset, start, min(start + length, size))
        first = rank * self.sizes[group]  # of the group laid end to end
        start = min(max(first - offset, 0), size)
        stop = min(max(first + self.sizes[group] - offset, 0), size)
        return Run(group, max(offset - first, 0), start, stop)

    def copies(self, rank: int, source: "Partitions") -> list[Copy]:
        """Return what fills a rank's parts from those of `source`, by rank of the source."""
        found = []
        for group in self.groups:
            for name in group:
                ours = self.run(name, rank)
                for source_rank in source._owners(name, ours.start, ours.stop):
                    theirs = source.run(name, source_rank)
                    start = max(ours.start, theirs.start)
                    count = min(ours.stop, theirs.stop) - start
                    found.append(
                        Copy(
                            source_rank,
                            theirs.group,
                            theirs.offset + start - theirs.start,
                            ours.group,
                            ours.offset + start - ours.start,
                            count,
                        )
                    )
        return sorted(found)

    def _owners(self, name: str, start: int, stop: int) -> range:
        """Return the ranks that have any of these values of a parameter."""
        if start == stop:
            return range(0)
        group, offset, size = self._places[name]
        length = -(-size // self.world_size) if self.each else self.sizes[group]
        shift = 0 if self.each else offset
        return range((shift + start) // length, (shift + stop - 1) // length + 1)
