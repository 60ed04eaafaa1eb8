"""Batches of packed rows equal a plain reading of the index and the shards."""

import json
import pickle
from functools import lru_cache

import numpy as np
import pytest
import torch

from data_prep.encode.pack import pack
from tests.launching import EOS, write_shards
from zerolm.common.errors import ShardError, ShardReadError
from zerolm.data.loader import TokenStream, ValidationStream, make_loader
from zerolm.data.order import Order
from zerolm.data.packing import (
    PIECE,
    ROW_END,
    data_fingerprint,
    num_rows,
    open_packing,
    verify_packings,
)
from zerolm.data.window_text import read_row
from zerolm.optim.schedule import BatchSchedule
from zerolm.shards.reader import open_source

SEQ_LEN = 48


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    opened = [open_source(write_shards(root / str(seed), 300, seed=seed)) for seed in (1, 2)]
    assert all(len(source.manifest["shards"]) > 1 for source in opened)
    for source in opened:
        pack(source, SEQ_LEN)
    return opened


def stream(sources, **changes):
    settings = {
        "weights": [0.6, 0.4],
        "seq_len": SEQ_LEN,
        "seed": 3,
        "batch_schedule": BatchSchedule(8),
        "micro_batch_size": 4,
        "shard": 0,
        "num_shards": 1,
        "position": 0,
        "end_position": 48,
        "packing": "best_fit",
    }
    return TokenStream(sources, **{**settings, **changes})


@lru_cache
def files_of(directory):
    """Return the ids, rows and pieces of a source, read as docs/formats.md says."""
    base = directory / f"packing-{SEQ_LEN}"
    files = sorted(directory.glob("*.bin"))
    tokens = np.concatenate([np.fromfile(file, "<u2") for file in files]).astype(np.int64)
    ends = np.fromfile(f"{base}.rows", ROW_END).astype(int)
    return tokens, ends.tolist(), np.fromfile(f"{base}.pieces", PIECE).tolist()


def plain_row(source, row):
    tokens, ends, pieces = files_of(source.directory)
    some = pieces[ends[row - 1] if row else 0 : ends[row]]
    return [tokens[start : start + length] for start, length in some]


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_holds_its_documents_and_its_padding_has_no_loss(sources, document_mask, num_workers):
    placed = Order([num_rows(source, SEQ_LEN, "best_fit") for source in sources], [0.6, 0.4], 3)
    loader = make_loader(stream(sources, document_mask=document_mask), num_workers, False)
    filled = 0
    for batch in loader:
        where = placed(batch["sequence_ids"].numpy())
        for row, (source, window) in enumerate(zip(where.source, where.window, strict=True)):
            pieces = plain_row(sources[source], int(window))
            held = np.concatenate(pieces)
            ids = np.concatenate([held, np.full(SEQ_LEN + 1 - len(held), EOS)])
            assert batch["input_ids"][row].tolist() == ids[:-1].tolist()
            targets = ids[1:].copy()
            targets[ids[:-1] == EOS] = -100
            assert batch["targets"][row].tolist() == targets.tolist()
            counted = int((batch["targets"][row] != -100).sum())
            assert counted == sum(len(piece) - 1 for piece in pieces), "all but each first id"
            filled += SEQ_LEN + 1 - len(held)
            if document_mask:
                places = np.concatenate([np.arange(len(piece)) for piece in pieces])[:SEQ_LEN]
                assert batch["position_ids"][row][: len(places)].tolist() == places.tolist()
                assert (batch["position_ids"][row][len(held) :] == 0).all()
                numbers = batch["document_ids"][row].tolist()
                changes = np.flatnonzero(np.diff(numbers)) + 1
                begins = np.cumsum([len(piece) for piece in pieces])
                assert changes[: len(pieces) - 1].tolist() == begins[:-1].tolist()
        assert ("document_ids" in batch) == document_mask
    assert filled


def test_an_epoch_contains_every_target_once(sources):
    source = sources[0]
    rows = num_rows(source, SEQ_LEN, "best_fit")
    seen = 0
    for batch in stream([source], weights=[1], end_position=rows // 8 * 8):
        seen += int((batch["targets"] != -100).sum())
    rest = [plain_row(source, int(row)) for row in _last_rows(source, rows)]
    seen += sum(len(piece) - 1 for row in rest for piece in row)
    assert seen == source.num_tokens - source.num_documents


def _last_rows(source, rows):
    left = np.arange(rows // 8 * 8, rows)
    return Order([rows], [1.0], 3)(left).window


def test_ranks_and_positions_do_not_change_the_rows(sources):
    expected = {
        int(number): ids
        for batch in stream(sources)
        for number, ids in zip(batch["sequence_ids"], batch["input_ids"], strict=True)
    }
    for shard in range(2):
        for batch in stream(sources, shard=shard, num_shards=2, position=16):
            for number, ids in zip(batch["sequence_ids"], batch["input_ids"], strict=True):
                assert torch.equal(ids, expected[int(number)])


def test_validation_reads_the_first_rows(sources):
    settings = {"seq_len": SEQ_LEN, "num_sequences": 6, "micro_batch_size": 4, "shard": 0}
    batches = list(ValidationStream(sources, num_shards=1, packing="best_fit", **settings))
    ids = torch.cat([batch["input_ids"] for batch in batches])
    for number in range(6):
        held = np.concatenate(plain_row(sources[number // 3], number % 3))[:SEQ_LEN]
        assert ids[number][: len(held)].tolist() == held.tolist()


def test_a_row_is_read_document_by_document(sources):
    source = sources[0]
    parts = read_row(source, open_packing(source, SEQ_LEN), 5)
    for part, piece in zip(parts, plain_row(source, 5), strict=True):
        assert part.token_ids.tolist() == piece.tolist()
        assert part.stop - part.start == len(piece) <= part.length


def test_a_pickled_stream_carries_no_index(sources):
    used = stream(sources)
    next(iter(used))
    assert len(pickle.dumps(used)) < 20_000


def test_a_source_has_the_rows_of_its_index_or_all_windows(sources):
    source = sources[1]
    tokens, ends, _ = files_of(source.directory)
    windows = len(range(0, len(tokens) - SEQ_LEN, SEQ_LEN))
    assert windows != len(ends)
    for packing, number in (("best_fit", len(ends)), ("concat", windows)):
        parsed = "".join(list(packing))  # another object than the constant, as from a flag
        assert num_rows(source, SEQ_LEN, parsed) == number


def test_one_row_is_enough_for_an_index(tmp_path):
    source = open_source(write_shards(tmp_path, 2))
    pack(source, 1000)
    assert num_rows(source, 1000, "best_fit") == 1


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("format", "other"), ("num_rows", 0)])
def test_an_index_of_another_kind_is_refused(tmp_path, key, value):
    source = open_source(write_shards(tmp_path, 20))
    pack(source, SEQ_LEN)
    file = tmp_path / f"packing-{SEQ_LEN}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ShardError, match=r"is not a .* index of version"):
        open_packing(source, SEQ_LEN)


@pytest.mark.parametrize("other", ["0" * 64, "f" * 64])
def test_an_index_of_other_tokens_is_refused(tmp_path, other):
    source = open_source(write_shards(tmp_path, 20))
    pack(source, SEQ_LEN)
    file = tmp_path / f"packing-{SEQ_LEN}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"source_fingerprint": other}))
    with pytest.raises(ShardError, match="it was built from other tokens"):
        open_packing(source, SEQ_LEN)


@pytest.mark.parametrize("part", ["rows", "pieces"])
def test_a_damaged_row_is_refused_unless_it_could_be_one(tmp_path, part):
    """Each bit of the first two entries flipped: what is returned is always inside the source."""
    source = open_source(write_shards(tmp_path, 20))
    pack(source, SEQ_LEN)
    packing, file = open_packing(source, SEQ_LEN), tmp_path / f"packing-{SEQ_LEN}.{part}"
    intact, refused = file.read_bytes(), 0
    for bit in range(8 * 2 * (ROW_END if part == "rows" else PIECE).itemsize):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        for row in (0, 1):
            try:
                starts, lengths = (each.astype(object) for each in packing.pieces(row))
            except ShardReadError:
                refused += 1
            else:
                assert len(starts) > 0 and sum(lengths) <= SEQ_LEN + 1
                assert max(starts + lengths) <= source.num_tokens
    assert refused > 100
    file.write_bytes(intact)
    if part == "pieces":  # a start so large that its end, in 64 bits, would be in the source
        pieces = np.fromfile(file, PIECE)
        pieces["start"][0] = (1 << 64) - 1
        pieces.tofile(file)
        with pytest.raises(ShardReadError, match="row 0 is outside the source"):
            packing.pieces(0)


def test_all_damaged_indices_of_a_source_are_named(tmp_path):
    source = open_source(write_shards(tmp_path, 20))
    for seq_len in (8, 32, 64):
        pack(source, seq_len)
    (tmp_path / "packing-notes.json").write_text("not an index")
    assert verify_packings(source) == []
    rows = (tmp_path / "packing-32.rows").read_bytes()
    (tmp_path / "packing-32.rows").write_bytes(bytes([rows[0] ^ 1]) + rows[1:])
    (tmp_path / "packing-64.pieces").unlink()
    damaged, missing = verify_packings(source)
    assert "packing-32.rows: is damaged" in damaged and "packing-64.pieces: is missing" in missing


def test_the_fingerprint_of_the_data_includes_the_rows(sources, tmp_path):
    assert data_fingerprint(sources, SEQ_LEN, "concat") == data_fingerprint(sources, 7, "concat")
    assert data_fingerprint(sources, SEQ_LEN, "concat") != data_fingerprint(
        sources, SEQ_LEN, "best_fit"
    )
    with pytest.raises(ShardError, match="no such file"):
        data_fingerprint(sources, SEQ_LEN + 1, "best_fit")
    with pytest.raises(ShardError, match="zerolm data pack"):
        stream(sources, seq_len=SEQ_LEN + 1)
