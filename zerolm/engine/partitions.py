"""`Partitions`: where each parameter is located in the flat tensors that ZeRO shards over ranks.

DeepSpeed's optimizer works on flat tensors, one for each parameter group ("group" here also means a
sub-group of stage 3). Each rank stores one part of each flat tensor, in one of two layouts:

    stages 1, 2   the parameters of a group are concatenated, padded to a multiple of 2 * ranks,
                  and split into equal parts
    stage 3       each parameter is padded and split into equal parts; a rank's part of a group is
                  the concatenation of its parts of the parameters

In both layouts, a rank stores at most one contiguous slice of each parameter, and slices are in the
order of ranks. Pure arithmetic; must not depend on torch. Source: DeepSpeed 0.19.8,
stage_1_and_2.py and stage3.py.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

# Manifest key, present if each group stores a copy, so there are fewer shards than ranks.
SHARDS = "shards"
ALIGNMENT_VALUES = 2  # nccl_start_alignment_factor of DeepSpeed


def num_shards(manifest: Mapping[str, Any]) -> int:
    """Return the number of ranks over which a checkpoint's states are sharded.

    This includes the ranks of a tensor-parallel replica, each of which has different shards.
    """
    return int(manifest.get(SHARDS, manifest["world_size"]))


class Slice(NamedTuple):
    """Values `start` to `stop` of a parameter, stored at `offset` in a rank's part of a group."""

    group: int
    offset: int
    start: int
    stop: int


class Copy(NamedTuple):
    """Copies `length` values from a source rank's part of a group to this rank's part of a group.

    Offsets are in values from the start of the part.
    """

    source_rank: int
    source_group: int
    source_offset: int
    group: int
    offset: int
    length: int


class Partitions:
    """The layout of a model's parameters in the flat tensors of all ranks.

    Args:
        groups: {parameter name: number of values} for each group, in order.
        per_parameter: split each parameter separately, as in stage 3.

    Attributes:
        sizes: number of values in a rank's part of each group, including padding.
    """

    def __init__(self, groups: Sequence[Mapping[str, int]], world_size: int, per_parameter: bool):
        self.groups, self.world_size, self.per_parameter = groups, world_size, per_parameter
        self.sizes: list[int] = []
        # {name: (group, offset in its flat tensor, number of values)}; with `per_parameter`, the
        # offset is relative to a rank's part.
        self._places: dict[str, tuple[int, int, int]] = {}
        for number, group in enumerate(groups):
            lengths = [-(-size // world_size) if per_parameter else size for size in group.values()]
            offsets = [0, *accumulate(lengths)]
            for name, offset in zip(group, offsets, strict=False):
                assert name not in self._places, f"{name} is in two groups"
                self._places[name] = number, offset, group[name]
            unit = ALIGNMENT_VALUES * world_size
            part = offsets[-1] if per_parameter else -(-offsets[-1] // unit) * ALIGNMENT_VALUES
            self.sizes.append(part)

    def parameters(self) -> dict[str, int]:
        """Return the number of values in each parameter, by name."""
        return {name: size for group in self.groups for name, size in group.items()}

    def slice_of(self, name: str, rank: int) -> Slice:
        """Return a rank's slice of a parameter; if the rank stores none of it, `start` equals
        `stop`.
        """
        group, offset, size = self._places[name]
        if self.per_parameter:
            length = -(-size // self.world_size)
            start = min(rank * length, size)
            return Slice(group, offset, start, min(start + length, size))
        first = rank * self.sizes[group]  # offset of the rank's part in the flat tensor
        start = min(max(first - offset, 0), size)
        stop = min(max(first + self.sizes[group] - offset, 0), size)
        return Slice(group, max(offset - first, 0), start, stop)

    def copies(self, rank: int, source: "Partitions") -> list[Copy]:
        """Return the copies that fill a rank's parts with values from the layout `source`, sorted
        by source rank.
        """
        found = []
        for group in self.groups:
            for name in group:
                ours = self.slice_of(name, rank)
                for source_rank in source._owners(name, ours.start, ours.stop):
                    theirs = source.slice_of(name, source_rank)
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
        """Return the ranks that store any of a parameter's values from `start` to `stop`."""
        if start == stop:
            return range(0)
        group, offset, size = self._places[name]
        length = -(-size // self.world_size) if self.per_parameter else self.sizes[group]
        shift = 0 if self.per_parameter else offset
        return range((shift + start) // length, (shift + stop - 1) // length + 1)
