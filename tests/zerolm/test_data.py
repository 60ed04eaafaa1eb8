"""Batches: what they hold, against a plain reference, and that nothing but the seed orders them."""

import multiprocessing
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from zerolm.data import TokenStream, ValidationStream, make_loader, prefetch_to_device
from zerolm.errors import ShardError
from zerolm.order import Order, num_windows
from zerolm.schedule import BatchSchedule
from zerolm.shard_writer import ShardWriter
from zerolm.shards import open_source

SEQ_LEN, EOS = 16, 3


def write_source(directory, num_tokens, seed, vocab_size=1000, shard_tokens=700):
    """Write documents of random lengths; windows cross the ends of its small shards."""
    generator = np.random.default_rng(seed)
    tokenizer = {"name": "none", "fingerprint": "0", "files": []}
    with ShardWriter(
        directory,
        vocab_size=vocab_size,
        eos_id=EOS,
        tokenizer=tokenizer,
        shard_tokens=shard_tokens,
    ) as writer:
        while num_tokens:
            length = min(num_tokens, int(generator.integers(1, 40)))
            document = generator.integers(4, vocab_size, length)
            document[-1] = EOS
            writer.add(document)
            num_tokens -= length
    return open_source(directory)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return [
        write_source(root / "web", 5000, seed=1),
        write_source(root / "code", 1500, seed=2, vocab_size=70_000),  # uint32 beside uint16
    ]


def stream(sources, **changes):
    settings = {
        "weights": [0.7, 0.3],
        "seq_len": SEQ_LEN,
        "seed": 9,
        "batch_schedule": BatchSchedule(16),
        "micro_batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "position": 0,
        "end_position": 320,
    }
    return TokenStream(sources, **{**settings, **changes})


def whole(source):
    """All ids of a source, read without the project's reader."""
    files = sorted(source.directory.glob("*.bin"))
    return np.concatenate([np.fromfile(file, source.dtype) for file in files]).astype(np.int64)


@dataclass
class Ledger:
    """What all ranks saw, by global batch: the rows in order of sequence number."""

    ids: list
    inputs: list
    targets: list

    def __eq__(self, other):
        return self.ids == other.ids and all(
            torch.equal(mine, theirs)
            for name in ("inputs", "targets")
            for mine, theirs in zip(getattr(self, name), getattr(other, name), strict=True)
        )


def ledger(sources, world_size=1, num_workers=0, **changes):
    """Read every rank's stream in this process and put the global batches together."""
    streams = [
        stream(sources, rank=rank, world_size=world_size, **changes) for rank in range(world_size)
    ]
    loaders = [iter(make_loader(one, num_workers, pin_memory=False)) for one in streams]
    joined = Ledger([], [], [])
    position = streams[0].position
    while position < streams[0].end_position:
        size = streams[0].batch_schedule(position)
        micro_steps = size // (streams[0].micro_batch_size * world_size)
        batches = [next(loader) for loader in loaders for _ in range(micro_steps)]
        ids = torch.cat([batch["sequence_ids"] for batch in batches])
        rows = torch.argsort(ids)
        joined.ids.append(ids[rows].tolist())
        joined.inputs.append(torch.cat([batch["input_ids"] for batch in batches])[rows])
        joined.targets.append(torch.cat([batch["targets"] for batch in batches])[rows])
        position += size
    assert all(next(loader, None) is None for loader in loaders)
    return joined


def test_batches_hold_the_windows_that_the_order_names(sources):
    placed = Order([num_windows(5000, SEQ_LEN), num_windows(1500, SEQ_LEN)], [0.7, 0.3], 9)(
        np.arange(320)
    )
    tokens = [whole(source) for source in sources]
    row = 0
    for batch in stream(sources):
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        assert all(tensor.is_contiguous() for tensor in batch.values())
        assert set(batch) == {"input_ids", "targets", "sources", "sequence_ids"}
        for inputs, targets, source, number in zip(
            batch["input_ids"],
            batch["targets"],
            batch["sources"].tolist(),
            batch["sequence_ids"].tolist(),
            strict=True,
        ):
            assert (number, source) == (row, placed.source[row])
            start = placed.window[row] * SEQ_LEN
            assert inputs.tolist() == tokens[source][start : start + SEQ_LEN].tolist()
            assert targets.tolist() == tokens[source][start + 1 : start + SEQ_LEN + 1].tolist()
            row += 1
    assert row == 320


@pytest.mark.parametrize("schedule", [BatchSchedule(16), BatchSchedule(32, 16, 160)])
def test_global_batches_do_not_depend_on_ranks_micro_batches_or_workers(sources, schedule):
    expected = ledger(sources, batch_schedule=schedule)
    ends = np.cumsum([len(ids) for ids in expected.ids])
    assert [number for ids in expected.ids for number in ids] == list(range(ends[-1]))
    assert ends[-1] >= 320
    if schedule.ramp_sequences:
        assert len(set(map(len, expected.ids))) > 1
    for world_size in (1, 2, 4):
        for micro_batch_size in (1, 4):
            assert expected == ledger(
                sources,
                batch_schedule=schedule,
                world_size=world_size,
                micro_batch_size=micro_batch_size,
            )


@pytest.mark.parametrize("schedule", [BatchSchedule(16), BatchSchedule(32, 16, 160)])
def test_left_out_windows_are_the_only_gap_on_any_number_of_ranks(sources, schedule):
    windows = [[24, 40], [64, 67], [100, 180]]  # they need not begin where a batch does
    left_out = {number for start, end in windows for number in range(start, end)}
    expected = ledger(sources, batch_schedule=schedule, skipped_windows=windows)
    seen = [number for ids in expected.ids for number in ids]
    assert seen == [number for number in range(max(seen) + 1) if number not in left_out]
    whole_order = ledger(sources, batch_schedule=schedule)
    assert list(map(len, expected.ids)) == list(map(len, whole_order.ids)), "batches stay as large"
    for world_size, micro_batch_size in ((2, 4), (4, 1), (4, 4)):
        changes = {"world_size": world_size, "micro_batch_size": micro_batch_size}
        again = ledger(sources, batch_schedule=schedule, skipped_windows=windows, **changes)
        assert again == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loader_workers_change_nothing(
    sources, monkeypatch, num_workers, world_size, micro_batch_size
):
    # Messages of a few micro-batches, so that workers take turns and the last one is not full.
    monkeypatch.setattr("zerolm.data.MESSAGE_BYTES", 3 * 4 * (SEQ_LEN + 1) * 4)
    schedule = BatchSchedule(32, 16, 160)
    changes = {"batch_schedule": schedule, "micro_batch_size": micro_batch_size}
    assert ledger(sources, **changes) == ledger(
        sources, world_size=world_size, num_workers=num_workers, **changes
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_may_be_spawned_and_a_plain_loader_gives_the_same(sources):
    expected = list(stream(sources, end_position=64))
    spawning = make_loader(stream(sources, end_position=64), 2, pin_memory=False)
    spawning.multiprocessing_context = "spawn"
    plain = torch.utils.data.DataLoader(
        stream(sources, end_position=64), batch_size=None, num_workers=3
    )
    for loader in (spawning, plain):
        for batch, same in zip(loader, expected, strict=True):
            assert all(torch.equal(batch[name], same[name]) for name in same)


def test_workers_outlive_signals_that_are_not_their_parents(sources, monkeypatch):
    """DeepSpeed's launcher and Ctrl-C signal workers too; the rank still has to save and stop."""
    monkeypatch.setattr("zerolm.data.MESSAGE_BYTES", 1)
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
import zerolm.data
zerolm.data.MESSAGE_BYTES = 1 << 19  # more than a pipe holds
stream = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
batches = iter(zerolm.data.make_loader(stream, 2, pin_memory=False))
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


def test_every_window_comes_once_an_epoch(sources):
    windows = num_windows(5000, SEQ_LEN)
    epoch = stream(
        sources[:1],
        weights=[1],
        end_position=windows,
        batch_schedule=BatchSchedule(8),
        micro_batch_size=8,
    )
    first_epoch = torch.cat([batch["targets"] for batch in epoch])[:windows]
    in_order = torch.from_numpy(whole(sources[0])[1 : 1 + windows * SEQ_LEN]).view(-1, SEQ_LEN)
    assert sorted(first_epoch.tolist()) == sorted(in_order.tolist())
    assert first_epoch.tolist() != in_order.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_yields_the_same_tail(sources, num_workers):
    schedule = BatchSchedule(32, 16, 160)
    full = ledger(sources, batch_schedule=schedule)
    position = 0
    for step, ids in enumerate(full.ids):
        tail = Ledger(full.ids[step:], full.inputs[step:], full.targets[step:])
        if step % 4 == 1:
            changes = {"batch_schedule": schedule, "position": position}
            assert tail == ledger(sources, num_workers=num_workers, **changes)
            assert tail == ledger(sources, world_size=4, micro_batch_size=1, **changes)
        position += len(ids)


def test_a_far_position_is_reached_at_once(sources):
    far = stream(sources, position=10**15, end_position=10**15 + 16)
    ids = torch.cat([batch["sequence_ids"] for batch in far])
    assert ids.tolist() == list(range(10**15, 10**15 + 16))


def test_the_recipe_in_the_documentation_names_the_documents_of_a_step(
    tmp_path, monkeypatch, capsys
):
    web = write_source(tmp_path / "shards" / "web", 40_000, seed=1, shard_tokens=7000)
    code = write_source(tmp_path / "shards" / "code", 20_000, seed=2, shard_tokens=9000)
    text = (Path(__file__).parents[2] / "docs" / "data_order.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})
    lines = iter(capsys.readouterr().out.splitlines())
    changes = {"seq_len": 512, "seed": 1234, "batch_schedule": BatchSchedule(64)}
    for batch in stream([web, code], position=128, end_position=192, **changes):
        for row, source in enumerate(batch["sources"].tolist()):
            tokens = whole([web, code][source])
            number = int(batch["sequence_ids"][row])
            window = [*batch["input_ids"][row].tolist(), int(batch["targets"][row, -1])]
            start = next(  # wherever the text of this sequence is found
                start
                for start in range(0, len(tokens), 512)
                if tokens[start : start + 513].tolist() == window
            )
            before = (tokens[:start] == EOS).sum()
            upto = (tokens[: start + 512] == EOS).sum()
            line = next(lines)
            assert line.startswith(f"sequence {number}: source {source}, epoch ")
            assert line.endswith(f"documents {before} to {upto}")
    assert next(lines, None) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_document_mask_restarts_positions_and_drops_targets_across_documents(sources, num_workers):
    masked = make_loader(stream(sources, document_mask=True), num_workers, pin_memory=False)
    plain = list(stream(sources))
    for batch, bare in zip(masked, plain, strict=True):
        assert torch.equal(batch["input_ids"], bare["input_ids"])
        for row, inputs in enumerate(batch["input_ids"].tolist()):
            position = document = 0
            for column, token in enumerate(inputs):
                assert batch["position_ids"][row, column] == position
                assert batch["document_ids"][row, column] == document
                target = batch["targets"][row, column]
                if token == EOS:
                    assert target == -100
                    position, document = 0, document + 1
                else:
                    assert target == bare["targets"][row, column]
                    position += 1
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def validation(sources, **changes):
    settings = {
        "seq_len": SEQ_LEN,
        "num_sequences": 21,
        "micro_batch_size": 4,
        "rank": 0,
        "world_size": 1,
    }
    return ValidationStream(sources, **{**settings, **changes})


@pytest.mark.parametrize("world_size, micro_batch_size", [(1, 1), (1, 4), (2, 4), (4, 1), (5, 8)])
@pytest.mark.parametrize("document_mask", [False, True])
def test_validation_is_the_same_on_any_number_of_ranks(
    sources, world_size, micro_batch_size, document_mask
):
    tokens = [whole(source) for source in sources]
    expected = {
        number: (source, tokens[source][start : start + SEQ_LEN + 1])
        for number, (source, start) in enumerate(
            [(0, window * SEQ_LEN) for window in range(11)]
            + [(1, window * SEQ_LEN) for window in range(10)]
        )
    }
    lengths, seen = set(), []
    for rank in range(world_size):
        batches = list(
            validation(
                sources,
                world_size=world_size,
                rank=rank,
                micro_batch_size=micro_batch_size,
                document_mask=document_mask,
            )
        )
        lengths.add(len(batches))
        for batch in batches:
            assert batch["input_ids"].shape == (micro_batch_size, SEQ_LEN)
            for row, number in enumerate(batch["sequence_ids"].tolist()):
                if number == -1:
                    assert (batch["targets"][row] == -100).all()
                    continue
                source, window = expected[number]
                seen.append(number)
                assert batch["sources"][row] == source
                assert batch["input_ids"][row].tolist() == window[:-1].tolist()
                targets = window[1:].copy()
                if document_mask:
                    targets[window[:-1] == EOS] = -100
                assert batch["targets"][row].tolist() == targets.tolist()
    assert len(lengths) == 1 and sorted(seen) == list(range(21))


@pytest.mark.parametrize(
    "asked, split", [(1, [1, 0]), (20, [10, 10]), (300, [207, 93]), (10**6, [312, 93])]
)
def test_validation_splits_evenly_as_far_as_it_goes(sources, asked, split):
    used = torch.cat(
        [batch["sources"] for batch in validation(sources, num_sequences=asked, micro_batch_size=1)]
    )
    assert torch.bincount(used, minlength=2).tolist() == split


def test_validation_goes_through_loader_workers(sources):
    expected = list(validation(sources))
    for batch, same in zip(make_loader(validation(sources), 2, False), expected, strict=True):
        assert all(torch.equal(batch[name], same[name]) for name in same)


def test_sources_too_short_for_one_sequence_are_refused(sources, tmp_path):
    short = [write_source(tmp_path / name, 16, seed=0) for name in ("one", "two")]
    for make in (
        lambda: stream([*short, sources[0]], weights=[1, 1, 1]),
        lambda: validation(short),
    ):
        with pytest.raises(ShardError, match="16 tokens are too few") as refusal:
            make()
        assert len(refusal.value.problems) == 2
        assert str(tmp_path / "one") in refusal.value.problems[0]
    assert num_windows(write_source(tmp_path / "three", 17, seed=0).num_tokens, SEQ_LEN) == 1


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
def test_prefetching_to_a_gpu_changes_nothing(sources, num_workers):
    expected = list(stream(sources, document_mask=True))
    loader = make_loader(stream(sources, document_mask=True), num_workers, pin_memory=True)
    assert all(tensor.is_pinned() for tensor in next(iter(loader)).values())
    seen = 0
    for batch, same in zip(prefetch_to_device(loader, "cuda"), expected, strict=True):
        assert all(tensor.is_cuda for tensor in batch.values())
        assert all(torch.equal(batch[name].cpu(), same[name]) for name in same)
        seen += 1
    assert seen == len(expected)
