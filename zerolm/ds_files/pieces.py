"""`Pieces`: where the values of each parameter are, in the flat tensors that ZeRO shards.

DeepSpeed's optimizer works on flat tensors, one for each parameter group ("group" here also means a
sub-group of stage 3). Each of several files, or ranks, has one part of each flat tensor, in one of
two layouts:

    stages 1, 2   the parameters of a group are concatenated, padded to a multiple of 2 * files,
                  and split into equal parts
    stage 3       each parameter is padded and split into equal parts; a file's part of a group is
                  the concatenation of its parts of the parameters

In both layouts, a file has at most one contiguous slice of each parameter, and slices are in the
order of files. A parameter may also be divided over several sets of files, each with flat tensors
of its own: tensor parallelism divides matrices so. Pure arithmetic; must not depend on torch.
Source: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

# Manifest key, present if each group stores a copy, so there are fewer shards than ranks.
SHARDS = "shards"
# In the manifest's sharding options, if above 1; of stages, the number of blocks of each.
TENSOR_PARALLEL, EXPERT_PARALLEL, STAGES = "tensor_parallel", "expert_parallel", "stages"
ALIGNMENT_VALUES = 2  # nccl_start_alignment_factor of DeepSpeed


def num_shards(manifest: Mapping[str, Any]) -> int:
    """Return the number of ranks over which a checkpoint's states are sharded.

    This includes the ranks of a replica that is tensor-parallel or has pipeline stages, each of
    which has different shards.
    """
    return int(manifest.get(SHARDS, manifest["world_size"]))


def tensor_degree(manifest: Mapping[str, Any]) -> int:
    """Return the number of ranks over which tensor parallelism shards a checkpoint's matrices."""
    return int(manifest.get("cut", {}).get(TENSOR_PARALLEL, 1))


def num_stages(manifest: Mapping[str, Any]) -> int:
    """Return the number of pipeline stages of a checkpoint's model."""
    return len(manifest.get("cut", {}).get(STAGES, "1"))


class Piece(NamedTuple):
    """`length` values of a parameter from index `start` on, at `offset` in a file's part of a
    group.
    """

    file: Any
    group: int
    offset: int
    start: int
    length: int


class Copy(NamedTuple):
    """A piece to copy, and where: the group, and the offset in the target's part of it."""

    piece: Piece
    group: int
    offset: int


class _Flat(NamedTuple):
    """The place of a parameter, or of some of its values, in a flat tensor.

    Attributes:
        files: the files that divide the flat tensor, in order.
        offset: index of the first value in the flat tensor, or in each file's part of it.
        part: number of values of the flat tensor, or of the parameter, in each file.
        start: index of the first value in the parameter.
        size: number of values.
    """

    files: Sequence[Any]
    group: int
    offset: int
    part: int
    start: int
    size: int
    per_parameter: bool

    @property
    def shift(self) -> int:
        return 0 if self.per_parameter else self.offset

    def piece(self, number: int) -> Piece:
        """Return the piece in a file, which may be empty."""
        first = number * self.part - self.shift  # the file's first value, as an index from `start`
        start, stop = (min(max(each, 0), self.size) for each in (first, first + self.part))
        offset = self.offset if self.per_parameter else max(-first, 0)
        return Piece(self.files[number], self.group, offset, self.start + start, stop - start)


class Pieces:
    """The pieces of each parameter of a model, in files or on ranks.

    Attributes:
        sizes: {file: number of values in its part of each group, including padding}.
    """

    def __init__(self) -> None:
        self.sizes: dict[Any, list[int]] = {}
        self._flats: dict[str, list[_Flat]] = {}

    def add(
        self,
        groups: Sequence[Mapping[str, int]],
        files: Sequence[Any],
        per_parameter: bool,
        joined: Container[str] = (),
    ) -> "Pieces":
        """Add a flat tensor for each group, and return this object.

        A file's groups are numbered in the order in which they are added, so groups that are
        divided over other files are added by other calls.

        Args:
            groups: {parameter name: number of values} for each group, in order.
            per_parameter: each parameter is split separately, as in stage 3.
            joined: parameters whose values here follow those added before; the values of other
                parameters that have been added are copies, and are ignored.
        """
        before, known = self.sizes.get(files[0], []), set(self._flats)
        sizes: list[int] = []
        assert all(len(self.sizes.get(file, [])) == len(before) for file in files)
        for number, group in enumerate(groups, start=len(before)):
            lengths = [-(-size // len(files)) if per_parameter else size for size in group.values()]
            *offsets, total = [0, *accumulate(lengths)]
            unit = ALIGNMENT_VALUES * len(files)
            part = total if per_parameter else -(-total // unit) * ALIGNMENT_VALUES
            sizes.append(part)
            for name, offset, length in zip(group, offsets, lengths, strict=True):
                if name in known and name not in joined:
                    continue
                flats = self._flats.setdefault(name, [])
                assert name in known or not flats, f"{name} is in two groups"
                part_of = length if per_parameter else part
                start, size = sum(each.size for each in flats), group[name]
                flats.append(_Flat(files, number, offset, part_of, start, size, per_parameter))
        self.sizes |= {file: self.sizes.get(file, []) + sizes for file in files}
        return self

    def parameters(self) -> dict[str, int]:
        """Return the number of values in each parameter, by name."""
        return {name: sum(each.size for each in flats) for name, flats in self._flats.items()}

    def in_file(self, name: str, file: Any) -> Iterator[Piece]:
        """Yield the pieces of a parameter in a file, which may be empty."""
        for flat in self._flats[name]:
            if file in flat.files:
                yield flat.piece(flat.files.index(file))

    def between(self, name: str, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of a parameter's values from `start` to `stop`, in order."""
        for flat in self._flats[name]:
            first, last = max(start - flat.start, 0), min(stop - flat.start, flat.size) - 1
            if first > last:
                continue
            numbers = (first + flat.shift) // flat.part, (last + flat.shift) // flat.part
            for number in range(numbers[0], numbers[1] + 1):
                piece = flat.piece(number)
                skipped = max(0, start - piece.start)
                end = min(stop, piece.start + piece.length)
                yield piece._replace(
                    offset=piece.offset + skipped,
                    start=piece.start + skipped,
                    length=end - piece.start - skipped,
                )

    def copies(self, file: Any, source: "Pieces") -> list[Copy]:
        """Return the copies that fill a file's parts with values from `source`, sorted by the
        source's file.
        """
        return sorted(
            Copy(piece, ours.group, ours.offset + piece.start - ours.start)
            for name in self._flats
            for ours in self.in_file(name, file)
            for piece in source.between(name, ours.start, ours.start + ours.length)
        )
