"""Work units cover the inputs exactly once, and can be resumed anywhere."""

import datetime
import decimal
import gzip
import hashlib
import itertools
import json
import os
import pickle
import random
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.files import streams
from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.read.work_units import (
    MIN_UNIT_BYTES,
    Tally,
    default_unit_bytes,
    divide_last_units,
    inputs_fingerprint,
    plan_units,
    read_batches,
)
from tests.data_prep.read.small_inputs import read_resuming
from zerolm.common.errors import ConfigError

SKIP = InputRules(on_bad_input="skip", max_bad_fraction=1, max_document_bytes=5000)
RNG = random.Random(3)
LINES = [json.dumps({"text": f"{n} " + "x" * RNG.randrange(300), "id": n}) for n in range(200)]
LINES[17] = LINES[90] = "broken"
LINES[50] = json.dumps({"text": "y" * 20_000})  # too long
LINES[130] = ""
DATA = ("\n".join(LINES) + "\n").encode()
GOOD = [
    json.loads(line)["text"] for line in LINES if line.startswith('{"text"') and len(line) < 5000
]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A directory of every kind of file, some damaged; small reads, as if the corpus were large."""
    monkeypatch.setattr(streams, "READ_BYTES", 1000)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1500)
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "a.jsonl").write_bytes(DATA)
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(DATA))
    (directory / "c.jsonl.gz").write_bytes(gzip.compress(DATA)[:-500])
    (directory / "d.jsonl.zst").write_bytes(pa.compress(DATA, "zstd", asbytes=True))
    for number in range(20):
        (directory / f"e{number:02}.txt").write_text(f"text file {number}")
    (directory / "f.txt").write_bytes(b"\xff")
    pq.write_table(
        pa.table({"n": list(range(len(GOOD))), "text": GOOD}), directory / "g.parquet",
        row_group_size=30,
    )  # fmt: skip
    return find_inputs([str(directory)], "text")[0]


def read(inputs, units, chunk_bytes=700):
    """Return (documents with their origins, tally as a record)."""
    tally = Tally()
    documents = [
        (document.text, document.input, document.start)
        for unit in units
        for batch in read_batches(inputs, unit, SKIP, tally, chunk_bytes)
        for document in batch.documents
    ]
    return documents, tally.record()


def test_units_of_any_size_give_the_same_documents(corpus):
    """With the same origins and the same counts of bad input."""
    whole, record = read(corpus, plan_units(corpus, 1 << 30))
    cut_file = [text for text, number, _ in whole if number == 2]
    assert 100 < len(cut_file) < len(GOOD) and cut_file == GOOD[: len(cut_file)]
    texts = [text for text, number, _ in whole if number != 2]
    assert texts == [*GOOD * 3, *(f"text file {number}" for number in range(20)), *GOOD]
    assert record["bad"]["cut"] == 1 and record["bad"]["not_utf8"] == 1
    assert record["bad"]["too_long"] == 4 and record["skipped"] == {"blank_lines": 4}
    assert record["documents_in"] == len(whole)
    for unit_bytes, divide in ((101, False), (5000, False), (5000, True), (None, False)):
        units = plan_units(corpus, unit_bytes)
        if divide:
            units = divide_last_units(units, corpus)
        documents, again = read(corpus, units, random.Random(unit_bytes).randrange(1, 3000))
        assert documents == whole and again == record, unit_bytes
    assert len(plan_units(corpus, 5000)) > 5
    assert plan_units(corpus, 5000) == plan_units(corpus, 5000)


def test_reading_resumes_after_any_batch(corpus):
    """Also inside compressed files."""
    read_resuming(corpus, SKIP, 20_000, samples=60)


def test_origins_are_bytes_or_rows(corpus):
    documents, _ = read(corpus, plan_units(corpus))
    rows = pq.read_table(corpus[-1].name)["text"].to_pylist()
    for text, number, start in documents:
        if corpus[number].suffix == ".parquet":
            assert rows[start] == text
        elif corpus[number].suffix != ".txt":
            assert json.loads(DATA[start:].partition(b"\n")[0])["text"] == text


def test_options_that_were_added_later_leave_older_fingerprints_as_they_are(tmp_path):
    """Otherwise an update would throw away unfinished work and stages."""
    (tmp_path / "a.txt").write_text("a")
    inputs, _ = find_inputs([str(tmp_path)], "text")
    rules = InputRules(max_bad_fraction=0)
    first = (
        "InputRules(text_field='text', on_bad_input='fail', max_bad_fraction=0, "
        "max_document_bytes=67108864, max_expansion=200, keep_records=False)"
    )
    listed = [[str(tmp_path / "a.txt"), ".txt", 1, inputs[0].modified_ns]]
    content = json.dumps([listed, first], separators=(",", ":"))
    assert inputs_fingerprint(inputs, rules) == hashlib.sha256(content.encode()).hexdigest()
    assert inputs_fingerprint(inputs, replace(rules, encoding="cp1252")) != inputs_fingerprint(
        inputs, rules
    )


def test_units_depend_on_the_inputs_only(tmp_path):
    """And a small corpus has enough units for many workers."""
    (tmp_path / "a.jsonl").write_bytes(b"x" * (64 << 20))
    (inputs, _) = find_inputs([str(tmp_path)], "text")
    assert default_unit_bytes(inputs) == MIN_UNIT_BYTES
    units = plan_units(inputs)
    assert len(units) == (64 << 20) // MIN_UNIT_BYTES
    assert sum(unit.size_bytes for unit in units) >= 64 << 20
    assert units == plan_units(pickle.loads(pickle.dumps(inputs)))
    limits = [(piece.start, piece.stop) for unit in units for piece in unit.ranges]
    assert limits[0][0] == 0 and limits[-1][1] == 64 << 20
    assert all(one[1] == two[0] for one, two in itertools.pairwise(limits))
    divided = divide_last_units(units, inputs)
    assert divided[:-8] == units[:-2]
    assert [unit.size_bytes for unit in divided[-8:]] == [MIN_UNIT_BYTES // 4] * 8
    assert divided[-8].ranges[0].start == units[-2].ranges[0].start


def test_the_fingerprint_depends_on_files_and_rules(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)

    def now(rules=SKIP):
        return inputs_fingerprint(find_inputs([str(path)], "text")[0], rules)

    first = now()
    assert now() == first != now(InputRules())
    os.utime(path, ns=(1, 1))
    assert now() != first


def test_a_file_that_changes_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(DATA)
    inputs, _ = find_inputs([str(path)], "text")
    path.write_bytes(DATA + DATA)
    with pytest.raises(ConfigError, match=r"a.jsonl: had .* bytes when the command started"):
        read(inputs, plan_units(inputs))


def _same_time(path, content):
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replaced(path, content):
    new = path.with_name("new")
    new.write_bytes(content)
    new.replace(path)


@pytest.mark.parametrize("write", [Path.write_bytes, _same_time, _replaced])
@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_file_that_is_rewritten_with_the_same_size_is_refused(tmp_path, write, when, name):
    path = tmp_path / name
    path.write_bytes(DATA)
    inputs, _ = find_inputs([str(path)], "text")
    time.sleep(0.02)  # file systems count time in steps of up to 10 ms
    if when == "before":
        write(path, DATA.swapcase())
    batches = read_batches(inputs, plan_units(inputs)[0], InputRules(on_bad_input="skip"), Tally())
    with pytest.raises(ConfigError, match=rf"{name}: was written to or replaced since"):
        next(batches)
        write(path, DATA.swapcase())
        list(batches)


def test_a_damaged_row_group_does_not_affect_the_others(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": GOOD}), path, row_group_size=30, write_page_checksum=True)
    column = pq.read_metadata(path).row_group(2).column(0)
    data = bytearray(path.read_bytes())
    data[column.dictionary_page_offset + 200] ^= 1  # after the header of the page
    path.write_bytes(data)
    inputs, _ = find_inputs([str(path)], "text")
    documents, record = read(inputs, plan_units(inputs))
    assert [text for text, _, _ in documents] == GOOD[:60] + GOOD[90:]
    assert record["bad"] == {"damaged": 30}
    with pytest.raises(ConfigError, match=r"a.parquet:61: cannot be read as Parquet"):
        list(read_batches(inputs, plan_units(inputs)[0], InputRules(), Tally()))


def test_damaged_parquet_is_reported(tmp_path):
    """Bytes are changed anywhere in a file with checksums; undamaged row groups are read."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": GOOD}), path, row_group_size=50, write_page_checksum=True)
    whole = path.read_bytes()
    rng = random.Random(5)
    for _ in range(60):
        damaged = bytearray(whole)
        at = rng.randrange(len(whole))
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        inputs, _ = find_inputs([str(path)], "text", skip_bad=True)
        documents, record = read(inputs, plan_units(inputs))
        texts = [text for text, _, _ in documents]
        assert texts == GOOD or record["bad"], at
        if len(texts) + record["bad"].get("damaged", 0) == len(GOOD):
            assert set(texts) <= set(GOOD)


def test_a_parquet_row_that_is_not_utf8_does_not_affect_the_others(tmp_path):
    path = tmp_path / "a.parquet"
    array = pa.array([b"one", b"\xff", None, b"two"]).view(pa.string())
    pq.write_table(pa.table({"text": array}), path)
    inputs, _ = find_inputs([str(path)], "text")
    documents, record = read(inputs, plan_units(inputs))
    assert [text for text, _, _ in documents] == ["one", "two"]
    assert record["bad"] == {"not_utf8": 1} and record["skipped"] == {"null": 1}


def test_a_nested_field_of_parquet_is_read_with_and_without_records(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"a": {"b": "one", "c": 1}, "id": 5}, {"a": {"b": None, "c": 2}, "id": 6}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    rules = InputRules(text_field="a.b", keep_records=True)
    inputs, _ = find_inputs([str(path)], "a.b")
    for keep in (False, True):
        rules = InputRules(text_field="a.b", keep_records=keep)
        (batch,) = read_batches(inputs, plan_units(inputs)[0], rules, Tally())
        (document,) = batch.documents
        assert document.text == "one"
    assert document.record == rows[0]


def test_parquet_columns_become_json_values(tmp_path):
    path = tmp_path / "a.parquet"
    row = {
        "text": "a",
        "day": datetime.date(2026, 11, 21),
        "time": datetime.datetime(2026, 11, 21, 1, 2, 3),
        "raw": b"\xff\0",
        "list": [{"price": decimal.Decimal("1.50"), "n": None}],
        "x": 0.5,
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    inputs, _ = find_inputs([str(path)], "text")
    rules = InputRules(keep_records=True)
    (batch,) = read_batches(inputs, plan_units(inputs)[0], rules, Tally())
    assert json.loads(json.dumps(batch.documents[0].record)) == {
        "text": "a", "day": "2026-11-21", "time": "2026-11-21T01:02:03", "raw": "/wA=",
        "list": [{"price": "1.50", "n": None}], "x": 0.5,
    }  # fmt: skip


def test_the_first_ten_problems_of_a_unit_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\nx\n{"text": 1}\n' * 2)
    (tmp_path / "b.jsonl").write_bytes(b"x\n" * 100)
    inputs, _ = find_inputs([str(tmp_path)], "text")
    (unit,) = plan_units(inputs)
    with pytest.raises(ConfigError) as caught:
        list(read_batches(inputs, unit, InputRules(), Tally()))
    places = [problem.split(": ")[0] for problem in caught.value.problems]
    assert places == [
        *(f"{tmp_path / 'a.jsonl'}:{line}" for line in (2, 3, 5, 6)),
        *(f"{tmp_path / 'b.jsonl'}:{line}" for line in (1, 2, 3, 4, 5, 6)),
    ]


def test_only_the_files_of_a_stage_are_read_from_its_directory(tmp_path):
    from data_prep.read.stage_files import STAGE_MANIFEST, StageWriter

    writer = StageWriter(tmp_path / "00000.jsonl.zst")
    writer.write({"text": "in", "id": "1"}, 2)
    entry = writer.close()
    (tmp_path / "duplicates.jsonl.zst").write_bytes(Path(tmp_path / "00000.jsonl.zst").read_bytes())
    stage = {"stage": "dedup", "inputs": "a" * 64, "text_field": "text", "files": [entry]}
    stage |= {"format": "zerolm-stage", "version": 1}
    (tmp_path / STAGE_MANIFEST).write_text(json.dumps(stage))
    inputs, _ = find_inputs([str(tmp_path)], "text")
    assert [Path(each.name).name for each in inputs] == ["00000.jsonl.zst"]
    assert [text for text, _, _ in read(inputs, plan_units(inputs))[0]] == ["in"]
