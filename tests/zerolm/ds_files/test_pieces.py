"""`Pieces` against flat tensors that are padded and split as ZeRO's definition says."""

import numpy as np
import pytest

from zerolm.ds_files.pieces import Pieces

SIZES = {"a": 7, "b": 12, "c": 1, "d": 30, "e": 2, "f": 5}
GROUPS = [{"a": 7, "c": 1, "d": 30}, {"b": 12, "e": 2}, {"f": 5}]
REGROUPED = [{"f": 5, "b": 12}, {"e": 2, "d": 30, "c": 1, "a": 7}]


def values(name: str) -> np.ndarray:
    """Return distinct values for each element of each parameter, none of them zero."""
    return 1 + 100 * list(SIZES).index(name) + np.arange(SIZES[name])


def parts_of_ranks(groups, world_size: int, per_parameter: bool) -> list[list[np.ndarray]]:
    """Return each rank's part of each group, by the definition: pad, concatenate, split."""

    def padded(array: np.ndarray, unit: int) -> np.ndarray:
        return np.append(array, np.zeros(-len(array) % unit, array.dtype))

    flats = []
    for group in groups:
        if per_parameter:
            parts = [np.split(padded(values(name), world_size), world_size) for name in group]
            flats.append([np.concatenate(mine) for mine in zip(*parts, strict=True)])
        else:
            whole = np.concatenate([values(name) for name in group])
            flats.append(np.split(padded(whole, 2 * world_size), world_size))
    return [[flat[rank] for flat in flats] for rank in range(world_size)]


@pytest.mark.parametrize("per_parameter", [False, True], ids=["stage 2", "stage 3"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 40])
@pytest.mark.parametrize(
    "source_per_parameter", [False, True], ids=["from stage 2", "from stage 3"]
)
@pytest.mark.parametrize("source_world_size", [1, 2, 5, 64])
def test_copies_convert_between_any_two_layouts(
    per_parameter, world_size, source_per_parameter, source_world_size
) -> None:
    source = Pieces().add(REGROUPED, range(source_world_size), source_per_parameter)
    ours = Pieces().add(GROUPS, range(world_size), per_parameter)
    source_parts = parts_of_ranks(REGROUPED, source_world_size, source_per_parameter)
    expected_parts = parts_of_ranks(GROUPS, world_size, per_parameter)
    for rank in range(world_size):
        assert ours.sizes[rank] == [len(flat) for flat in expected_parts[rank]]
        filled = [np.zeros(size, np.int64) for size in ours.sizes[rank]]
        for (file, number, start, _, length), group, offset in ours.copies(rank, source):
            piece = source_parts[file][number][start:][:length]
            place = filled[group][offset:][:length]
            assert len(piece) == len(place) == length > 0
            assert not place.any(), "a place is filled twice"
            place[:] = piece
        for mine, expected in zip(filled, expected_parts[rank], strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_rank_reads_only_the_shards_it_needs() -> None:
    source = Pieces().add([{"w": 64_000}], range(64), per_parameter=True)
    halved = Pieces().add([{"w": 64_000}], range(32), per_parameter=True)
    assert {copy.piece.file for copy in halved.copies(5, source)} == {10, 11}
    assert halved.parameters() == {"w": 64_000}


@pytest.mark.parametrize("per_parameter", [False, True], ids=["stage 2", "stage 3"])
def test_a_parameter_in_several_sets_of_files_is_joined_in_their_order(per_parameter) -> None:
    """As a matrix of tensor parallelism is; "norm" is the same in each set, and is read once."""
    parts, files = [{"norm": 3, "matrix": 5}, {"norm": 3, "matrix": 7}], ["ab", "cd"]
    found = Pieces()
    for sizes, names in zip(parts, files, strict=True):
        found.add([sizes], names, per_parameter, joined={"matrix"})
    assert found.parameters() == {"norm": 3, "matrix": 12}
    pieces = list(found.between("matrix", 0, 12))
    assert [piece.file for piece in pieces] == list("abcd")
    ends = [piece.start + piece.length for piece in pieces]
    assert ends[-1] == 12 and [piece.start for piece in pieces] == [0, *ends[:-1]]
    assert {piece.file for piece in found.between("norm", 0, 3)} <= set("ab")
    [inside] = found.between("matrix", 6, 7)
    assert (inside.file, inside.start, inside.length) == ("c", 6, 1)


def test_groups_of_a_file_are_counted_over_calls_and_may_be_divided_over_other_files() -> None:
    """As experts are, of which each file has only some; the parts of all groups stay known."""
    found = Pieces().add([{"dense": 9}], "abcd", per_parameter=False)
    for files in ("ac", "bd"):
        found.add([{"experts": 6}], files, per_parameter=False, joined={"experts"})
    found.add([{"norm": 3}], "abcd", per_parameter=False)
    assert found.sizes == {file: [4, 4, 2] for file in "abcd"}
    assert found.parameters() == {"dense": 9, "experts": 12, "norm": 3}
    assert list(found.between("experts", 0, 12)) == [
        ("a", 1, 0, 0, 4), ("c", 1, 0, 4, 2), ("b", 1, 0, 6, 4), ("d", 1, 0, 10, 2),
    ]  # fmt: skip
    assert {piece.group for piece in found.between("norm", 0, 3)} == {2}
    alone = Pieces().add([{"experts": 12}], "x", per_parameter=True)
    copies = alone.copies("x", found)
    assert sorted(copy.offset for copy in copies) == [0, 4, 6, 10]
