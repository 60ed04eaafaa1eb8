"""Shards in a store give the same batches as local shards, whatever the store does."""

import errno
import os
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.range_server import RangeServer, range_server
from zerolm.common.errors import ShardError, ShardReadError
from zerolm.data.loader import TokenStream, ValidationStream, make_loader
from zerolm.optim.schedule import BatchSchedule
from zerolm.shards.block_cache import Cache
from zerolm.shards.checksums import BLOCK_BYTES
from zerolm.shards.reader import open_source, verify
from zerolm.shards.writer import ShardWriter
from zerolm.train.metrics import store_row

SEQ_LEN = 1000
TOKENIZER = {"name": "test", "fingerprint": "f", "files": []}
CUT = {"seq_len": SEQ_LEN, "micro_batch_size": 2, "shard": 0, "num_shards": 1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Three shards of 13 blocks each or so, whose ids are a random walk through the vocabulary."""
    directory = tmp_path_factory.mktemp("store") / "web"
    draw = np.random.default_rng(0)
    with ShardWriter(
        directory, vocab_size=50_000, eos_id=0, tokenizer=TOKENIZER, shard_tokens=420_000
    ) as writer:
        for length in draw.integers(200, 3000, 730):
            writer.add(np.append(draw.integers(1, 50_000, length), 0))
    assert len(writer.shards) == 3
    return directory


@pytest.fixture
def server(shards):
    with range_server(shards.parent) as running:
        yield running


@pytest.fixture
def quick(monkeypatch):
    """Shorten the pauses between attempts."""
    monkeypatch.setattr("zerolm.common.store.FIRST_PAUSE_SECONDS", 0.001)


def remote(server: RangeServer, tmp_path: Path, num_slots: int | None = None):
    source = open_source(f"{server.url}/web")
    if num_slots is not None:
        source.files.cache = Cache(tmp_path / f"{source.fingerprint[:16]}-{num_slots}", num_slots)
    return source


def training(source, steps: int, position: int = 0, num_workers: int = 0, **options):
    stream = TokenStream(
        [source], [1.0], seed=3, batch_schedule=BatchSchedule(4), position=position,
        end_position=4 * steps, **CUT, **options
    )  # fmt: skip
    return make_loader(stream, num_workers, pin_memory=False)


def assert_same(batches, expected) -> None:
    count = 0
    for mine, theirs in zip(batches, expected, strict=True):
        count += 1
        for name in theirs:
            assert torch.equal(mine[name], theirs[name]), name
    assert count


def blocks_of(source) -> int:
    return sum(-(-shard["size_bytes"] // BLOCK_BYTES) for shard in source.manifest["shards"])


@pytest.mark.parametrize("num_slots", [None, 16, "all"])
def test_a_store_that_fails_in_every_way_gives_the_batches_of_local_shards(
    shards, server, tmp_path, quick, num_slots
):
    """503s, truncated bodies, short answers and damaged bytes, over two epochs."""
    source = remote(server, tmp_path)
    if num_slots is not None:
        source = remote(server, tmp_path, blocks_of(source) if num_slots == "all" else num_slots)
    server.fail_every, server.cut_every, server.shorten_every = 5, 7, 11
    server.corrupt_every, server.seconds = 13, 0.001
    steps = 2 * (source.num_tokens // SEQ_LEN) // 4
    loader = training(source, steps)
    assert_same(loader, training(open_source(shards), steps))
    assert source.files.counts["repeated"] > 5
    assert loader.stream.traffic == source.files.counts
    if num_slots == "all":
        kept = next(tmp_path.glob("*/blocks")).read_bytes()
        assert source.files.counts["fetched"] <= blocks_of(source) * 1.5
        for number, shard in enumerate(source.manifest["shards"]):
            start = source.files._blocks().key(number, 0) * BLOCK_BYTES
            content = (shards / shard["file"]).read_bytes()
            assert kept[start : start + len(content)] == content


def test_validation_and_loader_workers_read_a_store(shards, server, tmp_path):
    """Workers are forked from a process whose own threads have read from it already."""
    source, local = remote(server, tmp_path, 16), open_source(shards)
    for each in (source, local):
        each.ids(1, 0, 10)
    assert_same(
        make_loader(ValidationStream([source], num_sequences=50, **CUT), 0, False),
        make_loader(ValidationStream([local], num_sequences=50, **CUT), 0, False),
    )
    loader = training(source, 20, 8, num_workers=2)
    assert_same(loader, training(local, 20, 8))
    row = store_row(loader.stream.traffic)  # as reported by the workers
    assert row["data/store_bytes"] > 0 and 0 < row["data/cache_hits"] < 1
    assert store_row(training(local, 1).stream.traffic) == {}


def test_the_bound_of_the_cache_holds_for_all_processes_of_a_node(shards, server, tmp_path):
    source = remote(server, tmp_path, 16)
    before = set(threading.enumerate())
    assert_same(training(source, 60, num_workers=2), training(open_source(shards), 60))
    begun = set(threading.enumerate()) - before
    others = ("process_request_thread", "QueueFeederThread")  # the server's, and torch's loader's
    ours = [one.name for one in begun if not any(name in one.name for name in others)]
    assert ours == []  # only the workers have read
    sizes = {path.name: path.stat().st_blocks * 512 for path in tmp_path.glob("*/*")}
    assert sizes.pop("blocks") <= 16 * BLOCK_BYTES
    assert sum(sizes.values()) < BLOCK_BYTES


def test_cached_blocks_are_not_fetched_again_by_the_next_process(shards, server, tmp_path):
    source = remote(server, tmp_path, 1 << 10)
    source.files.cache = source.files.cache._replace(num_slots=blocks_of(source))
    list(training(source, 100))
    deadline = time.monotonic() + 30
    while source.files.counts["fetched"] < blocks_of(source) and time.monotonic() < deadline:
        time.sleep(0.01)  # the rest is fetched in idle times
    assert source.files.counts["fetched"] >= blocks_of(source)
    before = 0
    while server.count != before:  # one may still be under way
        before = server.count
        time.sleep(0.5)
    again = pickle.loads(pickle.dumps(source))
    assert_same(training(again, 100), training(open_source(shards), 100))
    assert again.files.counts["fetched"] == 0 and server.count == before


def test_counts_of_many_threads_add_up(shards, monkeypatch):
    blocks = open_source(f"file://{shards}").files._blocks()
    blocks.checksums(0)
    content = (shards / "shard-00000.bin").read_bytes()[:BLOCK_BYTES]
    monkeypatch.setattr(blocks, "read", lambda *_: content)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: blocks.fetch(0, 0, 1), range(2000)))
    finally:
        sys.setswitchinterval(before)
    assert blocks.counts["fetched"] == 2000


def test_document_ends_are_fetched_once(shards, server, monkeypatch, tmp_path):
    """People inspect data repeatedly, each time in a new process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ends = open_source(shards).document_ends(1).tolist()
    assert open_source(f"{server.url}/web").document_ends(1).tolist() == ends
    again = open_source(f"{server.url}/web")
    before = server.count
    assert again.document_ends(1).tolist() == ends and server.count == before
    verify(f"{server.url}/web")  # reads from the store
    assert server.count > before + 9


def test_a_damaged_cache_is_a_miss(shards, server, tmp_path):
    source = remote(server, tmp_path)
    source.files.cache = Cache(tmp_path / "cache", blocks_of(source))
    list(training(source, 50))
    blocks = tmp_path / "cache" / "blocks"
    blocks.write_bytes(os.urandom(blocks.stat().st_size))
    assert_same(training(pickle.loads(pickle.dumps(source)), 50), training(open_source(shards), 50))


def test_a_disk_that_fills_stops_the_caching_and_not_the_run(
    shards, server, tmp_path, monkeypatch, capsys
):
    """First writes are short; then a new process has no room for its cache files."""
    source, local = remote(server, tmp_path), open_source(shards)
    source.files.cache = Cache(tmp_path / "cache", blocks_of(source))
    real, room = os.pwrite, [10 * BLOCK_BYTES + 100]

    def write(file, data, at):
        count = min(len(data), room[0])
        room[0] -= count
        return real(file, data[:count], at)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        for start in range(0, 420_000, 10_000):  # three times in each block
            ours, theirs = (each.ids(0, start, start + 10_000) for each in (source, local))
            assert ours.tolist() == theirs.tolist(), start
        assert room == [0]
    monkeypatch.setattr(os, "ftruncate", full)
    other = pickle.loads(pickle.dumps(source))
    other.files.cache = Cache(tmp_path / "other", blocks_of(source))
    assert_same(training(other, 5), training(local, 5))
    assert "No space left on device" in capsys.readouterr().out


def test_blocks_are_requested_ahead_of_their_use(shards, server, tmp_path):
    """While the first batch is in use, all other blocks arrive, each of them once."""
    source = remote(server, tmp_path)
    batches = iter(training(source, 100))
    next(batches)
    deadline = time.monotonic() + 30
    while source.files.counts["fetched"] < blocks_of(source) and time.monotonic() < deadline:
        time.sleep(0.01)
    list(islice(batches, 30))
    assert source.files.counts["fetched"] == blocks_of(source)


def test_an_object_that_is_damaged_in_the_store_ends_the_run_and_is_named(
    shards, server, tmp_path, quick
):
    source = remote(server, tmp_path)
    path = shards / "shard-00001.bin"
    content = path.read_bytes()
    try:
        path.write_bytes(content[: 5 * BLOCK_BYTES] + b"!!" + content[5 * BLOCK_BYTES + 2 :])
        with pytest.raises(ShardReadError, match=r"shard-00001\.bin: block 5 .*4 attempts"):
            list(training(source, 300))
        with pytest.raises(ShardReadError, match=r"shard-00001\.bin: block 5"):
            list(training(source, 300, num_workers=1))
        with pytest.raises(ShardError, match=r"shard-00001\.bin: SHA-256 .* in block 5 "):
            verify(f"{server.url}/web")
    finally:
        path.write_bytes(content)
    assert verify(f"{server.url}/web") == source.manifest


def test_a_store_that_stays_unavailable_ends_the_run_and_its_last_answer_is_named(
    shards, server, tmp_path, quick
):
    source = remote(server, tmp_path)
    source.files.retry_seconds = 0.2
    server.fail_every = 1
    with pytest.raises(ShardReadError, match=r"shard-0000\d\.(bin|sums): .*503.*attempts in \d+ s"):
        list(training(source, 3))


def test_unusable_stores_are_refused_before_training(shards, server, tmp_path, monkeypatch):
    with pytest.raises(ShardError, match=r"/nothing: no manifest\.json there"):
        open_source(f"{server.url}/nothing")
    with pytest.raises(ShardError, match="contains credentials"):
        open_source("s3://key:secret@bucket/web")
    server.ignores_ranges = True
    monkeypatch.setattr("zerolm.shards.remote.STARTUP_RETRY_SECONDS", 0.3)
    with pytest.raises(ShardError, match="complete objects instead of ranges"):
        open_source(f"{server.url}/web")


def test_sizes_are_checked_where_the_store_lists_them(shards, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert open_source(f"file://{copy}").fingerprint == open_source(shards).fingerprint
    (copy / "shard-00002.idx").unlink()
    os.truncate(copy / "shard-00001.bin", 1000)
    with pytest.raises(ShardError) as caught:
        open_source(f"file://{copy}")
    assert "shard-00001.bin: 1000 bytes" in str(caught.value)
    assert f"file://{copy}/shard-00002.idx: missing" in str(caught.value)
