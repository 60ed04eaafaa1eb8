"""Decompression, compared with the compressors."""

import gzip
import random
import zlib

import pyarrow as pa
import pytest
import zstandard

from data_prep.read import streams
from data_prep.read.streams import Stream

CONTENT = "".join(
    f"line {n} {random.Random(n).getrandbits(n % 400)}\n" for n in range(3000)
).encode()
COMPRESS = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def stream_of(tmp_path, suffix, stored, start=0, max_expansion=200):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(stored)
    return Stream(str(path), suffix, start, max_expansion)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("start", [0, 1, 12_345, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 9])
def test_a_stream_can_start_anywhere(tmp_path, monkeypatch, suffix, start):
    monkeypatch.setattr(streams, "READ_BYTES", 1000)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1500)
    half = len(CONTENT) // 2
    stored = COMPRESS[suffix](CONTENT[:half]) + COMPRESS[suffix](CONTENT[half:])
    stream = stream_of(tmp_path, suffix, stored, start)
    assert b"".join(stream) == CONTENT[start:]
    assert stream.failure is None and stream.read_bytes == len(stored)


@pytest.mark.parametrize("fast", [True, False])
def test_every_form_of_gzip_is_read(tmp_path, monkeypatch, fast):
    """Empty members, names and comments in the header, and zero padding at the end."""
    if not fast:
        monkeypatch.setattr(streams, "_fast_zlib", lambda: zlib)
    named = b"\x1f\x8b\x08\x18" + bytes(6) + b"name\0comment\0" + gzip.compress(CONTENT)[10:]
    stored = gzip.compress(b"") + named + gzip.compress(b"") + bytes(70_000)
    stream = stream_of(tmp_path, ".gz", stored)
    assert b"".join(stream) == gzip.decompress(stored) == CONTENT
    assert stream.failure is None


@pytest.mark.parametrize(
    ("suffix", "stored", "reason"),
    [
        (".gz", b"", "cut"),
        (".zst", b"", "cut"),
        (".gz", b"This is text.\n" * 9, "damaged"),
        (".zst", b"This is text.\n" * 9, "damaged"),
        (".gz", gzip.compress(CONTENT) + b"more", "damaged"),
        (".zst", COMPRESS[".zst"](CONTENT) + b"more", "damaged"),
        (".gz", gzip.compress(CONTENT)[:-8] + bytes(8), "damaged"),
    ],
)
def test_a_broken_compressed_file_reports_the_reason(tmp_path, suffix, stored, reason):
    stream = stream_of(tmp_path, suffix, stored)
    found = b"".join(stream)
    assert stream.failure.reason == reason
    if len(stored) > 200:
        assert found == CONTENT, "data before the damage is lost"


def test_a_missing_file_is_a_failure(tmp_path):
    stream = Stream(str(tmp_path / "a"), ".gz", 0, 200)
    assert list(stream) == [] and stream.failure.reason == "unreadable"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_all_data_of_a_truncated_file_is_read(tmp_path, suffix):
    """Up to the last byte that the compressor's own library can decompress."""
    stored = COMPRESS[suffix](CONTENT)
    for cut in random.Random(0).sample(range(1, len(stored)), 20):
        stream = stream_of(tmp_path, suffix, stored[:cut])
        if suffix == ".gz":
            expected = zlib.decompressobj(31).decompress(stored[:cut])
        else:
            expected = zstandard.ZstdDecompressor().decompressobj().decompress(stored[:cut])
        assert b"".join(stream) == expected
        assert stream.failure.reason == "cut", cut


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_damage_is_reported_and_data_before_it_is_read(tmp_path, monkeypatch, suffix, fast):
    """One byte is changed; checksums find damage that can still be decompressed."""
    if not fast and suffix == ".gz":
        monkeypatch.setattr(streams, "_fast_zlib", lambda: zlib)
    stored = COMPRESS[suffix](CONTENT)
    rng = random.Random(1)
    for _ in range(60):
        at = rng.randrange(len(stored))
        damaged = bytearray(stored)
        damaged[at] ^= 1 << rng.randrange(8)
        stream = stream_of(tmp_path, suffix, bytes(damaged))
        found = b"".join(stream)
        assert stream.failure is not None or found == CONTENT, at
        if suffix == ".gz":
            before = zlib.decompressobj(31).decompress(stored[:at])
            assert found.startswith(before)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_expands_too_much_ends_at_the_same_place(tmp_path, monkeypatch, suffix):
    """Wherever reading starts; and it is read as far as allowed."""
    monkeypatch.setattr(streams, "MIN_CHECKED_BYTES", 1 << 20)
    stored = COMPRESS[suffix](bytes(1 << 24))
    ends = []
    for start in (0, 5, 1 << 19):
        stream = stream_of(tmp_path, suffix, stored, start, max_expansion=50)
        ends.append(start + sum(len(block) for block in stream))
        assert stream.failure.reason == "expands"
    assert len(set(ends)) == 1 and (1 << 19) < ends[0] <= (1 << 24)
    stream = stream_of(tmp_path, suffix, stored, 0, max_expansion=100_000)
    assert sum(len(block) for block in stream) == 1 << 24 and stream.failure is None


def test_zstd_files_written_by_pyarrow_are_complete(tmp_path):
    """As the stages of a pipeline write them, also without documents."""
    for content in (b"", CONTENT):
        path = tmp_path / "a.zst"
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
        stream = Stream(str(path), ".zst", 0, 200)
        assert b"".join(stream) == content and stream.failure is None
