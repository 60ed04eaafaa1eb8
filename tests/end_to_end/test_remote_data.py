"""A run whose token shards are in a local S3 behind a proxy that fails in every way."""

import contextlib
import http.client
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from recipe import BATCH, SEQ_LEN, profile, recipe

from tests.endpoints import (
    BUCKET,
    NO_S3,
    SECRET,
    FaultyProxy,
    s3_environment,
    s3_server,
)
from tests.launching import launch, rows, write_shards
from zerolm import ledger
from zerolm.order import Order, num_windows
from zerolm.shards import open_source

STEPS = 10
SLOTS = 32  # two sources of 16 slots of 64 KiB each, less than half of what they have
CACHE_BYTES = SLOTS * (65_536 + 16) + 400_000

pytestmark = pytest.mark.skipif(bool(NO_S3), reason=NO_S3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[Path]:
    """Two sources of a dozen and more shards of 128 KiB."""
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


class LargestSize(threading.Thread):
    """Looks how much a directory holds, again and again."""

    def __init__(self, directory: Path):
        super().__init__(daemon=True)
        self.directory, self.largest, self.done = directory, 0, threading.Event()
        self.looked_to_the_end = False

    def run(self) -> None:
        while not self.done.wait(0.05):
            size = 0
            for path in list(self.directory.rglob("*")):
                with contextlib.suppress(FileNotFoundError):  # written aside, and renamed just now
                    size += path.stat().st_blocks * 512
            self.largest = max(self.largest, size)
        self.looked_to_the_end = True


def test_a_store_that_fails_gives_the_ledger_and_the_losses_of_local_shards(tmp_path, llama, data):
    """503s, delays, truncated objects, cut connections and bytes that are others, on two ranks;
    and a cache, with room for less than half of the blocks, that never exceeds its bound."""
    json_file = profile(tmp_path / "ds.json", 2, bf16=False)
    for name in ("here", "there"):
        (tmp_path / f"ledger-{name}").mkdir()
    saving = ["--checkpoint_interval", STEPS, "--wandb", "off"]

    def words(sources, name):
        first, second = (
            f"{source}={weight}" for source, weight in zip(sources, (3, 1), strict=True)
        )
        arguments = recipe(llama, first, tmp_path / name, json_file, STEPS, micro=2)
        return [*arguments, "--data", second, *saving]

    local = launch(2, *words(data, "here"), ZEROLM_LEDGER=str(tmp_path / "ledger-here"))
    assert local.returncode == 0, local.stdout[-4000:]
    with s3_server() as port, FaultyProxy(port) as proxy:
        for directory in data:
            put(port, directory)
        proxy.fail_every, proxy.truncate_every, proxy.cut_every = 9, 11, 13
        proxy.corrupt_every, proxy.delay_seconds = 17, 0.01
        cache = tmp_path / "cache"
        watch = LargestSize(cache)
        watch.start()
        urls = [f"s3://{BUCKET}/data/{directory.name}" for directory in data]
        remote = launch(
            2, *words(urls, "there"),
            "--data_cache", cache, "--data_cache_bytes", CACHE_BYTES,
            ZEROLM_LEDGER=str(tmp_path / "ledger-there"), **s3_environment(proxy.port),
        )  # fmt: skip
        watch.done.set()
        watch.join()
        asked = [path for method, path in proxy.requests if ".bin" in path]
    assert remote.returncode == 0, remote.stdout[-6000:]
    assert SECRET not in remote.stdout
    seen = ledger.read(tmp_path / "ledger-there")
    assert seen == ledger.read(tmp_path / "ledger-here")
    assert seen == {
        step: list(range((step - 1) * BATCH, step * BATCH)) for step in range(1, STEPS + 1)
    }
    assert rows(tmp_path / "there", "train/loss") == rows(tmp_path / "here", "train/loss")
    assert list(rows(tmp_path / "there", "data/store_bytes").values())[-1] > SLOTS * 65_536
    assert not rows(tmp_path / "here", "data/store_bytes")
    held = sum(path.stat().st_size for directory in data for path in directory.glob("*.bin"))
    assert held > 2 * SLOTS * 65_536 and len(asked) > SLOTS
    assert watch.looked_to_the_end and 0 < watch.largest <= CACHE_BYTES
    record = json.loads((tmp_path / "there" / "run.json").read_text())
    same = json.loads((tmp_path / "here" / "run.json").read_text())
    assert record["data_fingerprint"] == same["data_fingerprint"]
    sources = [open_source(directory) for directory in data]
    windows = [num_windows(source.num_tokens, SEQ_LEN) for source in sources]
    placed = Order(windows, [3, 1], record["settings"]["seed"])
    assert set(placed(np.arange(STEPS * BATCH)).source.tolist()) == {0, 1}
