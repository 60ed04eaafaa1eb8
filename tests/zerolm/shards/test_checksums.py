"""The checksums of a file do not depend on the parts in which its bytes were passed."""

import hashlib
import os
import random

import numpy as np
import pytest
import xxhash

from tests.zerolm.shards.small_shards import EOS, without_fine, write
from zerolm.shards.checksums import (
    BLOCK_BYTES,
    CHECKSUM_FILES,
    FINE_BYTES,
    ShardChecksums,
    num_blocks,
    write_sidecars,
)
from zerolm.shards.reader import open_source

SIZES = (1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77)


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_those_of_xxhash_of_each_block(tmp_path, size):
    draw = random.Random(size)
    data, checksums, start = draw.randbytes(size), ShardChecksums(), 0
    while start < size:
        length = draw.choice([1, 2, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES + 3])
        checksums.update(data[start : start + length])
        start += length
    keys = write_sidecars(tmp_path / "shard-00000", checksums.contents())
    for key, (suffix, block_bytes) in CHECKSUM_FILES.items():
        content = (tmp_path / f"shard-00000{suffix}").read_bytes()
        expected = [
            xxhash.xxh3_64_intdigest(data[start : start + block_bytes])
            for start in range(0, size, block_bytes)
        ]
        assert np.frombuffer(content, "<u8").tolist() == expected
        assert len(expected) == num_blocks(size, block_bytes)
        assert keys.pop(key) == f"shard-00000{suffix}"
        assert keys.pop(f"{key}_size_bytes") == len(content)
        assert keys.pop(f"{key}_sha256") == hashlib.sha256(content).hexdigest()
    assert not keys


def test_the_checksum_is_the_published_one():
    """XXH3 of nothing with seed 0, from the test vectors of xxHash 0.8."""
    assert xxhash.xxh3_64_intdigest(b"") == 0x2D06800538D394C2


@pytest.mark.parametrize("block_bytes", [FINE_BYTES, BLOCK_BYTES])
@pytest.mark.parametrize("stays_cached", [False, True])
def test_unverified_ids_are_prefetched_by_whole_blocks_and_verified_ones_as_they_are(
    tmp_path, monkeypatch, stays_cached, block_bytes
):
    """Verified ids of a source that stays in the page cache need no prefetch; of one that does not,
    each read of small blocks is verified."""
    per_block = block_bytes // 2
    data = np.arange(3 * per_block + 5) % 900
    directory = write(tmp_path / "s", [[*data.tolist(), EOS]])
    if block_bytes == BLOCK_BYTES:
        without_fine(directory)
    memory = os.sysconf("SC_PHYS_PAGES")
    pages = {"SC_PHYS_PAGES": memory if stays_cached else 1, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    source = open_source(directory)
    asked = []
    shard = source.files._open_shard(0)
    monkeypatch.setattr(type(shard), "prefetch", lambda self, *ends: asked.append(ends))
    source.files.prefetch([(0, per_block + 1, 2 * per_block + 1)])
    assert asked == [(block_bytes, 3 * block_bytes)]
    assert (
        source.ids(0, per_block, 2 * per_block).tolist() == data[per_block : 2 * per_block].tolist()
    )
    asked.clear()
    source.files.prefetch([(0, per_block + 1, 2 * per_block)])
    if block_bytes == BLOCK_BYTES:
        assert asked == ([] if stays_cached else [(block_bytes + 2, 2 * block_bytes)])
    else:
        assert asked == ([] if stays_cached else [(block_bytes, 2 * block_bytes)])
    assert (source.files._open[0].unverified is None) == (
        block_bytes == FINE_BYTES and not stays_cached
    )
