"""Decompression, compared with the compressors."""

import bz2
import gzip
import lzma
import random
import zlib

import pyarrow as pa
import pytest
import zstandard

from data_prep.files import streams
from data_prep.files.streams import Stream

CONTENT = "".join(
    f"line {n} {random.Random(n).getrandbits(n % 400)}\n" for n in range(3000)
).encode()
COMPRESS = {
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
LONG = zstandard.ZstdCompressionParameters.from_level(
    3, window_log=28, write_checksum=True, write_content_size=False
)
OPEN = {
    ".gz": lambda: zlib.decompressobj(31),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
}


def compress_long(content):
    """Return a zstd frame that needs a window of 256 MiB, as `zstd --long=28` writes."""
    member = zstandard.ZstdCompressor(compression_params=LONG).compressobj()
    return member.compress(content) + member.flush()


LONG_OPEN = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj


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


def test_padding_after_a_member_is_no_damage(tmp_path):
    for suffix in (".bz2", ".xz"):
        stored = COMPRESS[suffix](CONTENT) + bytes(8) + COMPRESS[suffix](b"more") + bytes(4)
        stream = stream_of(tmp_path, suffix, stored)
        assert b"".join(stream) == CONTENT + b"more" and stream.failure is None


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
        (".bz2", b"", "cut"),
        (".xz", b"", "cut"),
        (".bz2", b"This is text.\n" * 9, "damaged"),
        (".xz", b"This is text.\n" * 9, "damaged"),
        (".xz", lzma.compress(CONTENT) + b"more" * 9, "damaged"),
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
        expected = OPEN[suffix]().decompress(stored[:cut])
        assert b"".join(stream) == expected
        assert stream.failure.reason == "cut", cut


@pytest.mark.parametrize(("suffix", "fast"), [(".gz", False), *((each, True) for each in COMPRESS)])
def test_damage_is_reported_and_data_before_it_is_read(tmp_path, monkeypatch, suffix, fast):
    """One byte is changed; checksums find damage that can still be decompressed."""
    if not fast:
        monkeypatch.setattr(streams, "_fast_zlib", lambda: zlib)
    stored = COMPRESS[suffix](CONTENT)
    rng = random.Random(1)
    for _ in range(20):
        at = rng.randrange(len(stored))
        damaged = bytearray(stored)
        damaged[at] ^= 1 << rng.randrange(8)
        stream = stream_of(tmp_path, suffix, bytes(damaged))
        found = b"".join(stream)
        assert stream.failure is not None or found == CONTENT, at
        if suffix != ".zst":
            assert found.startswith(OPEN[suffix]().decompress(stored[:at]))


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
    stream = stream_of(tmp_path, suffix, stored, 0, max_expansion=10_000_000)
    assert sum(len(block) for block in stream) == 1 << 24 and stream.failure is None


def test_zstd_frames_with_long_windows_are_read(tmp_path, monkeypatch):
    """In any frame, from any byte, and up to where they are cut or damaged."""
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1500)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    half, short = len(CONTENT) // 2, COMPRESS[".zst"]
    parts = [short(CONTENT[:half]), skippable, compress_long(CONTENT[half:])]
    stored = b"".join(parts)
    for start in (0, 1, half + 5, len(CONTENT)):
        stream = stream_of(tmp_path, ".zst", stored, start)
        assert b"".join(stream) == CONTENT[start:]
        assert stream.failure is None and stream.read_bytes == len(stored)
    for cut in range(1, 5000, 777):
        stream = stream_of(tmp_path, ".zst", stored[:-cut])
        tail = LONG_OPEN().decompress(parts[2][:-cut]) if cut < len(parts[2]) else b""
        assert b"".join(stream) == CONTENT[:half] + tail and stream.failure.reason == "cut"
    damaged = stored[:-1] + bytes([stored[-1] ^ 1])  # of the checksum
    stream = stream_of(tmp_path, ".zst", damaged)
    assert b"".join(stream) == CONTENT and stream.failure.reason == "damaged"


def test_zstd_files_written_by_pyarrow_are_complete(tmp_path):
    """As the stages of a pipeline write them, also without documents."""
    for content in (b"", CONTENT):
        path = tmp_path / "a.zst"
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
        stream = Stream(str(path), ".zst", 0, 200)
        assert b"".join(stream) == content and stream.failure is None
