"""Batches equal a plain reference, and only the seed decides their order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.zerolm.data.token_streams import (
    EOS,
    SEQ_LEN,
    Ledger,
    all_ids,
    ledger,
    stream,
    validation,
    write_source,
    write_sources,
)
from zerolm.common.errors import ShardError
from zerolm.data import loader, window_stream
from zerolm.data.loader import make_loader
from zerolm.data.order import Order, num_windows
from zerolm.optim.schedule import BatchSchedule


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


def test_batches_hold_the_windows_that_the_order_names(sources):
    placed = Order([num_windows(5000, SEQ_LEN), num_windows(1500, SEQ_LEN)], [0.7, 0.3], 9)(
        np.arange(320)
    )
    tokens = [all_ids(source) for source in sources]
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
    for num_shards in (1, 2, 4):
        for micro_batch_size in (1, 4):
            assert expected == ledger(
                sources,
                batch_schedule=schedule,
                num_shards=num_shards,
                micro_batch_size=micro_batch_size,
            )


@pytest.mark.parametrize("schedule", [BatchSchedule(16), BatchSchedule(32, 16, 160)])
def test_skipped_ranges_are_the_only_gap_for_any_number_of_shards(sources, schedule):
    ranges = [[24, 40], [64, 67], [100, 180]]  # they need not start where a batch does
    skipped = {number for start, end in ranges for number in range(start, end)}
    expected = ledger(sources, batch_schedule=schedule, skipped_windows=ranges)
    seen = [number for ids in expected.ids for number in ids]
    assert seen == [number for number in range(max(seen) + 1) if number not in skipped]
    full_order = ledger(sources, batch_schedule=schedule)
    assert list(map(len, expected.ids)) == list(map(len, full_order.ids)), "same batch sizes"
    for num_shards, micro_batch_size in ((2, 4), (4, 1), (4, 4)):
        changes = {"num_shards": num_shards, "micro_batch_size": micro_batch_size}
        again = ledger(sources, batch_schedule=schedule, skipped_windows=ranges, **changes)
        assert again == expected


def test_every_window_occurs_once_per_epoch(sources):
    windows = num_windows(5000, SEQ_LEN)
    epoch = stream(
        sources[:1],
        weights=[1],
        end_position=windows,
        batch_schedule=BatchSchedule(8),
        micro_batch_size=8,
    )
    first_epoch = torch.cat([batch["targets"] for batch in epoch])[:windows]
    in_order = torch.from_numpy(all_ids(sources[0])[1 : 1 + windows * SEQ_LEN]).view(-1, SEQ_LEN)
    assert sorted(first_epoch.tolist()) == sorted(in_order.tolist())
    assert first_epoch.tolist() != in_order.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_stream_yields_the_same_remaining_batches(sources, num_workers, monkeypatch):
    """Also if its workers take turns, with messages of three micro-batches."""
    monkeypatch.setattr(loader, "MESSAGE_BYTES", 3 * 4 * (SEQ_LEN + 1) * 4)
    schedule = BatchSchedule(32, 16, 160)
    full = ledger(sources, batch_schedule=schedule)
    position = 0
    for step, ids in enumerate(full.ids):
        tail = Ledger(full.ids[step:], full.inputs[step:], full.targets[step:])
        if step % 4 == 1:
            changes = {"batch_schedule": schedule, "position": position}
            assert tail == ledger(sources, num_workers=num_workers, **changes)
            assert tail == ledger(sources, num_shards=4, micro_batch_size=1, **changes)
        position += len(ids)


def test_a_far_position_is_reached_immediately(sources):
    far = stream(sources, position=10**15, end_position=10**15 + 16)
    ids = torch.cat([batch["sequence_ids"] for batch in far])
    assert ids.tolist() == list(range(10**15, 10**15 + 16))


def test_the_code_in_the_documentation_names_the_documents_of_a_step(tmp_path, monkeypatch, capsys):
    web = write_source(tmp_path / "shards" / "web", 40_000, seed=1, shard_tokens=7000)
    code = write_source(tmp_path / "shards" / "code", 20_000, seed=2, shard_tokens=9000)
    text = (ROOT / "docs" / "data_order.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], {})
    lines = iter(capsys.readouterr().out.splitlines())
    changes = {"seq_len": 512, "seed": 1234, "batch_schedule": BatchSchedule(64)}
    for batch in stream([web, code], position=128, end_position=192, **changes):
        for row, source in enumerate(batch["sources"].tolist()):
            tokens = all_ids([web, code][source])
            number = int(batch["sequence_ids"][row])
            window = [*batch["input_ids"][row].tolist(), int(batch["targets"][row, -1])]
            start = next(  # where the text of this sequence is found
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
        starts = torch.nonzero(batch["position_ids"].flatten() == 0).flatten().tolist()
        boundaries = batch.pop("boundaries")
        assert boundaries.dtype == torch.int32
        assert boundaries.tolist() == [*starts, batch["position_ids"].numel()]
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())


@pytest.mark.parametrize("num_shards, micro_batch_size", [(1, 1), (1, 4), (2, 4), (4, 1), (5, 8)])
@pytest.mark.parametrize("document_mask", [False, True])
def test_validation_is_the_same_for_any_number_of_shards(
    sources, num_shards, micro_batch_size, document_mask
):
    tokens = [all_ids(source) for source in sources]
    expected = {
        number: (source, tokens[source][start : start + SEQ_LEN + 1])
        for number, (source, start) in enumerate(
            [(0, window * SEQ_LEN) for window in range(11)]
            + [(1, window * SEQ_LEN) for window in range(10)]
        )
    }
    lengths, seen = set(), []
    for shard in range(num_shards):
        batches = list(
            validation(
                sources,
                num_shards=num_shards,
                shard=shard,
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
def test_validation_splits_evenly_over_sources(sources, asked, split):
    used = torch.cat(
        [batch["sources"] for batch in validation(sources, num_sequences=asked, micro_batch_size=1)]
    )
    assert torch.bincount(used, minlength=2).tolist() == split


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_outside_of_their_number_gets_no_data(sources, shard):
    for make in (stream, validation):
        with pytest.raises(AssertionError):
            make(sources, shard=shard, num_shards=2)


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


@pytest.mark.parametrize(
    ("shard", "worker", "checks"), [(0, None, 1), (0, 0, 1), (0, 1, 0), (1, None, 0), (1, 0, 0)]
)
def test_one_process_of_the_run_checks_the_sizes_of_all_files_of_training_data(
    sources, monkeypatch, shard, worker, checks
):
    info = None if worker is None else SimpleNamespace(id=worker, num_workers=2)
    monkeypatch.setattr(window_stream, "get_worker_info", lambda: info)
    for make, expected in ((stream, checks), (validation, 0)):
        reading, calls = make(sources, shard=shard, num_shards=2, micro_batch_size=1), []
        monkeypatch.setattr(reading.reader, "check_sizes", lambda calls=calls: calls.append(1))
        next(reading.read_groups(2))
        assert len(calls) == expected


@pytest.mark.parametrize(
    ("is_remote", "requests", "ahead"),
    [
        (False, 0, [0, 1, 2, 3, *[4] * 32, 3, 2, 1, 0]),  # the first group waits for no other
        (True, 1, [*[32] * 8, *range(31, -1, -1)]),
        (True, 128, [*[4] * 36, 3, 2, 1, 0]),  # 512 requests
    ],
)
def test_reading_ahead_is_limited_by_groups_and_by_requests(
    sources, monkeypatch, is_remote, requests, ahead
):
    reading, asked = stream(sources, end_position=40 * 4), []
    monkeypatch.setattr(reading.reader, "is_remote", is_remote)
    monkeypatch.setattr(reading.reader, "prefetch", lambda *_: asked.append(1) or [None] * requests)
    seen = [len(asked) - number for number, _ in enumerate(reading.read_groups(1), 1)]
    assert seen == ahead


def test_the_first_micro_batch_is_read_alone_so_that_training_starts_sooner(sources):
    sizes = [len(group.tokens) for group in stream(sources).read_groups(30)]
    assert sizes == [1, 29, 30, 20]


def test_as_many_micro_batches_are_read_at_once_as_fit_and_one_at_least(sources):
    reading = stream(sources)
    micro_batch_bytes = 4 * (SEQ_LEN + 1) * reading.reader.dtype.itemsize
    for size, number in ((0, 1), (micro_batch_bytes, 1), (10 * micro_batch_bytes - 1, 9),
                         (10 * micro_batch_bytes, 10)):  # fmt: skip
        assert reading.num_micro_batches_within(size) == number
