"""Checksums of ranges, compared with xxhash itself; who compares which part of a checkpoint."""

import hashlib
import os
from itertools import product

import pytest
import xxhash

from zerolm.checkpoint import checksums
from zerolm.checkpoint.checksums import (
    SHA256,
    XXH3,
    RangeHash,
    checksum_file,
    piece_problem,
    share,
)

RANGE = 1000


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch) -> None:
    monkeypatch.setattr(checksums, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(checksums, "READ_BYTES", 300)


@pytest.mark.parametrize("size", [0, 1, RANGE - 1, RANGE, RANGE + 1, 2 * RANGE, 4321])
def test_the_digest_is_that_of_each_range_however_the_bytes_arrive(tmp_path, size) -> None:
    content = os.urandom(size)
    parts = [content[start : start + RANGE] for start in range(0, size, RANGE)] or [b""]
    expected = "".join(xxhash.xxh3_128_hexdigest(part) for part in parts)
    for step in (1, 7, RANGE, 5000):
        hasher = RangeHash()
        for start in range(0, size, step):
            hasher.update(content[start : start + step])
        assert hasher.hexdigest() == expected
    (tmp_path / "file").write_bytes(content)
    assert checksum_file(tmp_path / "file").digest == expected
    assert checksum_file(tmp_path / "file", SHA256).digest == hashlib.sha256(content).hexdigest()


def entries() -> list[dict]:
    """Return the files of 4 ranks, one file that all ranks read, and one of an earlier release."""
    own = [{"file": f"{rank}.pt", "size_bytes": 2500, "rank": rank} for rank in range(4)]
    common = [{"file": "model.pt", "size_bytes": 9500}]
    content = bytes(9500)
    for entry in own + common:
        hasher = RangeHash()
        hasher.update(content[: entry["size_bytes"]])
        entry[XXH3] = hasher.hexdigest()
    return [*own, *common, {"file": "old.pt", "size_bytes": 3, SHA256: "0" * 64}]


@pytest.mark.parametrize("world_size", [1, 3, 4, 9, 64])
def test_all_ranks_together_read_every_range_once(world_size) -> None:
    found: list[tuple[str, int]] = []
    for rank in range(world_size):
        for entry, number in share(entries(), rank, world_size, written_by=4):
            ranges = range(-(-entry["size_bytes"] // RANGE)) if number is None else [number]
            found += product([entry["file"]], ranges)
    sizes = {entry["file"]: -(-entry["size_bytes"] // RANGE) for entry in entries()}
    assert sorted(found) == sorted((file, n) for file, count in sizes.items() for n in range(count))


def test_a_rank_reads_the_files_that_it_loads_and_an_equal_part_of_the_common_one() -> None:
    for rank in range(4):
        pieces = share(entries(), rank, 4, written_by=4)
        assert (f"{rank}.pt", None) == (pieces[0].entry["file"], pieces[0].number)
        assert all(piece.entry["file"] in ("model.pt", "old.pt") for piece in pieces[1:])
        assert 2 <= len(pieces) - 1 <= 3


def test_damage_is_reported_once_with_its_place(tmp_path) -> None:
    path, listed = tmp_path / "model.pt", entries()
    path.write_bytes(bytes(4200) + b"x" + bytes(5299))
    pieces = [piece for rank in range(4) for piece in share(listed[4:5], rank, 4, 4)]
    (problem,) = [line for piece in pieces if (line := piece_problem(path, piece))]
    assert "from byte 4,000" in problem and xxhash.xxh3_128_hexdigest(bytes(1000)) in problem
    path.write_bytes(b"short")
    (problem,) = [line for piece in pieces if (line := piece_problem(path, piece))]
    assert problem == f"{path}: 5 bytes, but the manifest says 9500"
    path.unlink()
    (problem,) = [line for piece in pieces if (line := piece_problem(path, piece))]
    assert "missing" in problem
