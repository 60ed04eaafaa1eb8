"""Loader workers do not change batches, survive signals, and do not outlive their parent."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from tests.zerolm.data.token_streams import SEQ_LEN, ledger, stream, validation, write_sources
from zerolm.common.errors import ShardReadError
from zerolm.data.loader import make_loader, prefetch_to_device, require_complete_files
from zerolm.optim.schedule import BatchSchedule
from zerolm.shards.reader import open_source


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(
    ("num_shards", "micro_batch_size", "num_workers"), [(1, 4, 3), (2, 1, 3), (4, 1, 1), (4, 4, 1)]
)
def test_loader_workers_do_not_change_batches(
    sources, monkeypatch, num_workers, num_shards, micro_batch_size
):
    # Messages of a few micro-batches, so that workers take turns and the last one is not full.
    monkeypatch.setattr("zerolm.data.loader.MESSAGE_BYTES", 3 * 4 * (SEQ_LEN + 1) * 4)
    schedule = BatchSchedule(32, 16, 160)
    changes = {"batch_schedule": schedule, "micro_batch_size": micro_batch_size}
    assert ledger(sources, **changes) == ledger(
        sources, num_shards=num_shards, num_workers=num_workers, **changes
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.soak
def test_spawned_workers_and_a_plain_loader_give_the_same_batches(sources):
    expected = list(stream(sources, end_position=64))
    spawning = make_loader(stream(sources, end_position=64), 2, pin_memory=False)
    spawning.multiprocessing_context = "spawn"
    plain = torch.utils.data.DataLoader(
        stream(sources, end_position=64), batch_size=None, num_workers=3
    )
    for loader in (spawning, plain):
        for batch, same in zip(loader, expected, strict=True):
            assert all(torch.equal(batch[name], same[name]) for name in same)


def test_workers_survive_signals_that_are_not_their_parents(sources, monkeypatch):
    """DeepSpeed's launcher and Ctrl-C signal workers too; the rank still has to save and stop."""
    monkeypatch.setattr("zerolm.data.loader.MESSAGE_BYTES", 1)
    expected = list(stream(sources))
    loader = iter(make_loader(stream(sources), 1, pin_memory=False))
    received = [next(loader)]
    (worker,) = multiprocessing.active_children()
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True, timeout=60)
        received.append(next(loader))
    received += loader
    for batch, same in zip(received, expected, strict=True):
        assert all(torch.equal(batch[name], same[name]) for name in same)
    unfinished = iter(make_loader(stream(sources), 1, pin_memory=False))
    next(unfinished)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(timeout=60)
    assert worker.exitcode == 0


def test_workers_do_not_outlive_a_killed_parent(sources, tmp_path):
    (tmp_path / "stream").write_bytes(pickle.dumps(stream(sources, end_position=1 << 60)))
    script = """
import multiprocessing, os, pathlib, pickle, signal, sys
from zerolm.data import loader
loader.MESSAGE_BYTES = 1 << 19  # more than a pipe holds
stream = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
batches = iter(loader.make_loader(stream, 2, pin_memory=False))
next(batches)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The workers hold the other end of standard output, so this returns when the last one is gone.
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "stream")], stdout=subprocess.PIPE, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(killed.stdout.split()) == 2


def test_a_worker_killed_by_a_truncated_shard_names_it(sources, tmp_path):
    copy = open_source(shutil.copytree(sources[0].directory, tmp_path / "copy"))
    endless = stream([copy], weights=[1.0], end_position=1 << 60)
    batches = iter(make_loader(endless, 1, pin_memory=False))
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.truncate(copy.directory / "shard-00000.bin", 100)
    os.kill(worker.pid, signal.SIGBUS)
    # torch reports what it sees first, the signal or the death; a fork server's child, only that.
    with pytest.raises(RuntimeError, match=r"Bus error|exited unexpectedly") as caught:
        for _ in batches:
            pass
    with pytest.raises(ShardReadError, match=r"shard-00000\.bin: 100 bytes, but the manifest says"):
        require_complete_files(caught.value, [copy])
    require_complete_files(caught.value, sources)  # a death that the files do not explain
    require_complete_files(RuntimeError("out of memory"), [copy])


def test_validation_goes_through_loader_workers(sources):
    expected = list(validation(sources))
    for batch, same in zip(make_loader(validation(sources), 2, False), expected, strict=True):
        assert all(torch.equal(batch[name], same[name]) for name in same)


def test_a_pickled_stream_carries_no_data(sources):
    used = stream(sources)
    expected = next(iter(used))
    sent = pickle.dumps(used)
    assert len(sent) < 20_000
    again = next(iter(pickle.loads(sent)))
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_prefetching_to_a_cpu_passes_batches_through(sources):
    loader = list(stream(sources, end_position=32))
    moved = list(prefetch_to_device(loader, "cpu"))
    assert [id(batch) for batch in moved] == [id(batch) for batch in loader]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_prefetching_to_a_gpu_does_not_change_batches(sources, num_workers):
    expected = list(stream(sources, document_mask=True))
    loader = make_loader(stream(sources, document_mask=True), num_workers, pin_memory=True)
    assert all(tensor.is_pinned() for tensor in next(iter(loader)).values())
    seen = 0
    for batch, same in zip(prefetch_to_device(loader, "cuda"), expected, strict=True):
        assert all(tensor.is_cuda for tensor in batch.values())
        assert all(torch.equal(batch[name].cpu(), same[name]) for name in same)
        seen += 1
    assert seen == len(expected)
