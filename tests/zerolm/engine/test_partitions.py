"""`Partitions` against flat tensors that are padded and split as ZeRO's definition says."""

import numpy as np
import pytest

from zerolm.engine.partitions import Partitions

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
    source = Partitions(REGROUPED, source_world_size, source_per_parameter)
    ours = Partitions(GROUPS, world_size, per_parameter)
    source_parts = parts_of_ranks(REGROUPED, source_world_size, source_per_parameter)
    expected_parts = parts_of_ranks(GROUPS, world_size, per_parameter)
    for rank in range(world_size):
        assert ours.sizes == [len(flat) for flat in expected_parts[rank]]
        filled = [np.zeros(size, np.int64) for size in ours.sizes]
        for copy in ours.copies(rank, source):
            piece = source_parts[copy.source_rank][copy.source_group][copy.source_offset :][
                : copy.length
            ]
            place = filled[copy.group][copy.offset :][: copy.length]
            assert len(piece) == len(place) == copy.length > 0
            assert not place.any(), "a place is filled twice"
            place[:] = piece
        for mine, expected in zip(filled, expected_parts[rank], strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_rank_reads_only_the_shards_it_needs() -> None:
    source = Partitions([{"w": 64_000}], 64, per_parameter=True)
    halved = Partitions([{"w": 64_000}], 32, per_parameter=True)
    assert {copy.source_rank for copy in halved.copies(5, source)} == {10, 11}
    assert halved.parameters() == {"w": 64_000}
