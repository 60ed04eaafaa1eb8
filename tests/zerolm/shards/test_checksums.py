"""The checksums of a file do not depend on the parts in which its bytes were passed."""

import hashlib
import random

import numpy as np
import pytest
import xxhash

from tests.zerolm.shards.small_shards import EOS, write
from zerolm.shards.checksums import BLOCK_BYTES, BlockChecksums, num_blocks
from zerolm.shards.reader import open_source

SIZES = (1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77)


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_those_of_xxhash_of_each_block(tmp_path, size):
    draw = random.Random(size)
    data, checksums, start = draw.randbytes(size), BlockChecksums(), 0
    while start < size:
        length = draw.choice([1, 2, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES + 3])
        checksums.update(data[start : start + length])
        start += length
    keys = checksums.write(tmp_path / "shard-00000.sums")
    content = (tmp_path / "shard-00000.sums").read_bytes()
    expected = [
        xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES])
        for start in range(0, size, BLOCK_BYTES)
    ]
    assert np.frombuffer(content, "<u8").tolist() == expected
    assert len(expected) == num_blocks(size)
    assert keys == {
        "sums": "shard-00000.sums",
        "sums_size_bytes": len(content),
        "sums_sha256": hashlib.sha256(content).hexdigest(),
    }


def test_the_checksum_is_the_published_one():
    """XXH3 of nothing with seed 0, from the test vectors of xxHash 0.8."""
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2


@pytest.mark.parametrize("stays_cached", [False, True])
def test_unverified_ids_are_prefetched_by_whole_blocks_and_verified_ones_as_they_are(
    tmp_path, monkeypatch, stays_cached
):
    """Verified ids of a source that stays in the page cache need no prefetch."""
    per_block = BLOCK_BYTES // 2
    data = np.arange(3 * per_block + 5) % 900
    source = open_source(write(tmp_path / "s", [[*data.tolist(), EOS]]))
    asked = []
    source.files._stays_cached = stays_cached
    shard = source.files._open_shard(0)
    monkeypatch.setattr(type(shard), "prefetch", lambda self, *ends: asked.append(ends))
    source.files.prefetch([(0, per_block + 1, 2 * per_block + 1)])
    assert asked == [(BLOCK_BYTES, 3 * BLOCK_BYTES)]
    assert (
        source.ids(0, per_block, 2 * per_block).tolist() == data[per_block : 2 * per_block].tolist()
    )
    asked.clear()
    source.files.prefetch([(0, per_block + 1, 2 * per_block)])
    assert asked == ([] if stays_cached else [(BLOCK_BYTES + 2, 2 * BLOCK_BYTES)])
