"""A run that reads its token shards from a local S3 behind a proxy that fails in many ways."""

import contextlib
import http.client
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.recipe import BATCH, SEQ_LEN, profile, recipe
from tests.endpoints import (
    BUCKET,
    NO_S3,
    SECRET,
    FaultyProxy,
    s3_environment,
    s3_server,
)
from tests.launching import rows, run_ranks, write_shards
from tests.ledger import read_sequences
from zerolm.data.order import Order, num_windows
from zerolm.shards.reader import open_source

STEPS = 10
SLOTS = 32  # 16 slots of 64 KiB for each of two sources: room for less than half of their blocks
CACHE_BYTES = SLOTS * (65_536 + 16) + 400_000

pytestmark = pytest.mark.skipif(bool(NO_S3), reason=NO_S3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[Path]:
    """Return two sources, each of more than a dozen shards of 128 KiB."""
    base = tmp_path_factory.mktemp("remote")
    return [
        write_shards(base / name, count, seed, shard_tokens=1 << 16)
        for seed, (name, count) in enumerate((("web", 20_000), ("code", 15_000)))
    ]


def put(port: int, directory: Path) -> None:
    """Copy a directory's files to the bucket."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for path in sorted(directory.iterdir()):
        where = f"/{BUCKET}/data/{directory.name}/{path.name}"
        connection.request("PUT", where, body=path.read_bytes())
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, path


class SizeMonitor(threading.Thread):
    """Measures the size of a directory again and again, and keeps the largest."""

    def __init__(self, directory: Path):
        super().__init__(daemon=True)
        self.directory, self.largest, self.done = directory, 0, threading.Event()
        self.completed = False

    def run(self) -> None:
        while not self.done.wait(0.05):
            size = 0
            for path in list(self.directory.rglob("*")):
                with contextlib.suppress(
                    FileNotFoundError
                ):  # a temporary file that has just been renamed
                    size += path.stat().st_blocks * 512
            self.largest = max(self.largest, size)
        self.completed = True


@pytest.mark.soak
def test_a_faulty_store_gives_the_sequences_and_losses_of_local_shards(tmp_path, llama, data):
    """With 503s, delays, truncated objects, cut connections and changed bytes, on two ranks.

    The cache has room for less than half of the blocks, and never exceeds its limit.
    """
    json_file = profile(tmp_path / "ds.json", 2, bf16=False)
    for name in ("local", "remote"):
        (tmp_path / f"ledger-{name}").mkdir()
    saving = ["--checkpoint_interval", STEPS, "--wandb", "off"]

    def run_flags(sources, name):
        first, second = (
            f"{source}={weight}" for source, weight in zip(sources, (3, 1), strict=True)
        )
        arguments = recipe(llama, first, tmp_path / name, json_file, STEPS, micro=2)
        return [*arguments, "--data", second, *saving]

    local = run_ranks(2, *run_flags(data, "local"), ZEROLM_LEDGER=str(tmp_path / "ledger-local"))
    assert local.returncode == 0, local.stdout[-4000:]
    with s3_server() as port, FaultyProxy(port) as proxy:
        for directory in data:
            put(port, directory)
        proxy.fail_every, proxy.truncate_every, proxy.cut_every = 9, 11, 13
        proxy.corrupt_every, proxy.delay_seconds = 17, 0.01
        cache = tmp_path / "cache"
        monitor = SizeMonitor(cache)
        monitor.start()
        urls = [f"s3://{BUCKET}/data/{directory.name}" for directory in data]
        remote = run_ranks(
            2, *run_flags(urls, "remote"),
            "--data_cache", cache, "--data_cache_bytes", CACHE_BYTES,
            ZEROLM_LEDGER=str(tmp_path / "ledger-remote"), **s3_environment(proxy.port),
        )  # fmt: skip
        monitor.done.set()
        monitor.join()
        requested = [path for method, path in proxy.requests if ".bin" in path]
    assert remote.returncode == 0, remote.stdout[-6000:]
    assert SECRET not in remote.stdout
    trained = read_sequences(tmp_path / "ledger-remote")
    assert trained == read_sequences(tmp_path / "ledger-local")
    assert trained == {
        step: list(range((step - 1) * BATCH, step * BATCH)) for step in range(1, STEPS + 1)
    }
    assert rows(tmp_path / "remote", "train/loss") == rows(tmp_path / "local", "train/loss")
    assert list(rows(tmp_path / "remote", "data/store_bytes").values())[-1] > SLOTS * 65_536
    assert not rows(tmp_path / "local", "data/store_bytes")
    total = sum(path.stat().st_size for directory in data for path in directory.glob("*.bin"))
    assert total > 2 * SLOTS * 65_536 and len(requested) > SLOTS
    assert monitor.completed and 0 < monitor.largest <= CACHE_BYTES
    record = json.loads((tmp_path / "remote" / "run.json").read_text())
    same = json.loads((tmp_path / "local" / "run.json").read_text())
    assert record["data_fingerprint"] == same["data_fingerprint"]
    sources = [open_source(directory) for directory in data]
    windows = [num_windows(source.num_tokens, SEQ_LEN) for source in sources]
    order = Order(windows, [3, 1], record["settings"]["seed"])
    assert set(order(np.arange(STEPS * BATCH)).source.tolist()) == {0, 1}
