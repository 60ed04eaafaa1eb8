"""Every format gives the same documents, in order; damage is refused with its place."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.read.readers import HubDataset, Input, require_unchanged
from data_prep.read.work_units import Tally, plan_units, read_batches
from tests.data_prep.read.small_inputs import (
    TEXTS,
    WRITERS,
    find,
    jsonl,
    read,
    read_all,
    read_resuming,
    write_gz,
    write_parquet,
    write_zst,
)
from tests.data_prep.stage_cases import write_stage
from tests.input_edges import arrow_of
from zerolm.common.errors import ConfigError


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 18])
@pytest.mark.parametrize("unit_bytes", [1, 77, None])
def test_every_format_gives_all_documents_in_order(tmp_path, write, chunk_bytes, unit_bytes):
    path = write(tmp_path / "corpus")
    assert read([path], chunk_bytes=chunk_bytes, unit_bytes=unit_bytes) == TEXTS


def test_a_hub_dataset_is_streamed_and_resumed(tmp_path):
    """`datasets` opens a local folder of data files in the same way as a hub repository."""
    write_parquet(tmp_path / "train")
    hub = HubDataset(str(tmp_path), None, "train")
    inputs = [Input("namespace/name", "namespace/name", "hub", None, hub=hub)]
    (unit,) = plan_units(inputs)
    assert [document.text for document in read_all(inputs, InputRules())[0]] == TEXTS
    (late,) = read_batches(inputs, unit, InputRules(keep_records=True), Tally(), start=(0, 57))
    assert [document.record for document in late.documents] == [
        {"n": n, "text": TEXTS[n]} for n in (57, 58, 59)
    ]
    with pytest.raises(ConfigError, match="no column 'body'; it has"):
        read_all(inputs, InputRules("body"))


@pytest.mark.parametrize("keep", [False, True])
def test_text_of_a_hub_dataset_may_be_bytes(tmp_path, keep):
    column = pa.array([*(text.encode() for text in TEXTS), b"\xff", None])
    pq.write_table(pa.table({"text": column}), tmp_path / "train.parquet")
    hub = HubDataset(str(tmp_path), None, "train")
    inputs = [Input("namespace/name", "namespace/name", "hub", None, hub=hub)]
    documents, tally = read_all(inputs, InputRules(on_bad_input="skip", keep_records=keep))
    assert [document.text for document in documents] == TEXTS
    assert not keep or [document.record for document in documents] == [{"text": t} for t in TEXTS]
    assert tally.bad == {"not_utf8": 1} and tally.skipped == {"null": 1}


def test_line_numbers_count_from_the_start_of_the_file(tmp_path):
    """Also in a unit that starts in the middle, and in compressed files."""
    (tmp_path / "a.jsonl").write_bytes(jsonl() + b"broken\n" + jsonl())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in ("a.jsonl", "a.jsonl.gz"):
        for chunk_bytes in (1, 333, 1 << 18):
            with pytest.raises(ConfigError) as caught:
                read([str(tmp_path / name)], chunk_bytes=chunk_bytes, unit_bytes=999)
            assert str(caught.value).startswith(
                f"{tmp_path / name}:{len(TEXTS) + 1}: not valid JSON"
            )
            assert len(caught.value.problems) == 1


@pytest.mark.parametrize("write", [write_gz, write_zst])
def test_a_truncated_compressed_file_is_refused_with_its_line(tmp_path, write):
    path = Path(write(tmp_path / "corpus"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError) as caught:
        read([str(path)], chunk_bytes=200)
    name, line, _ = str(caught.value).split(":", 2)
    assert name == str(path) and 1 < int(line) <= len(TEXTS) + 1
    assert "the compressed data ends too early. The file is truncated" in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_file_whose_content_contradicts_its_suffix_is_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"This is text, not anything compressed." * 9)
    with pytest.raises(ConfigError, match=f"a{suffix}"):
        read([str(path)])


@pytest.mark.parametrize("compression", [None, "gzip", "zstd"])
@pytest.mark.parametrize("kind", ["txt", "md", "jsonl", "ndjson"])
def test_text_and_json_lines_are_read_under_all_of_their_names(tmp_path, kind, compression):
    texts = TEXTS[:1] if kind in ("txt", "md") else TEXTS
    path = tmp_path / f"a.{kind}{'.gz' if compression == 'gzip' else '.zst' if compression else ''}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    with pa.output_stream(str(path), compression=compression) as stream:
        stream.write((texts[0] if len(texts) == 1 else lines).encode())
    assert read([str(tmp_path)]) == texts
    assert read([str(path)], unit_bytes=60) == texts


def test_text_that_expands_beyond_the_limit_of_a_document_is_too_long(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 1000))
    with pytest.raises(ConfigError, match="1,000 bytes are more than --max_document_bytes 999"):
        rules = InputRules(max_document_bytes=999)
        read_all(find([tmp_path], rules), rules, chunk_bytes=100)


KINDS = [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
    pa.binary_view(), pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.binary()),
    pa.json_(),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("field", ["text", "a.b", "a.text"])
def test_every_type_that_holds_text_is_read(tmp_path, kind, field):
    """A column, one with a dot in its name, or a field of an object; with the records too."""
    values = [*TEXTS, None]
    is_bytes = "binary" in str(kind)
    column = pa.array([v.encode() if v and is_bytes else v for v in values])
    if isinstance(kind, pa.DictionaryType):
        column = column.dictionary_encode()
    if kind == pa.json_():
        literals = pa.array([value and json.dumps(value) for value in values])
        column = pa.ExtensionArray.from_storage(kind, literals)
    column = column.cast(kind)
    if field == "a.text":
        column = pa.StructArray.from_arrays([column], ["text"])
    pq.write_table(pa.table({"id": range(len(values)), field.removesuffix(".text"): column}),
                   tmp_path / "a.parquet")  # fmt: skip
    for keep in (False, True):
        rules = InputRules(text_field=field, keep_records=keep)
        documents, _ = read_all(find([tmp_path], rules), rules)
        assert [each.text for each in documents] == TEXTS
    for each in documents:
        record = each.record["a"]["text"] if field == "a.text" else each.record[field]
        assert record == each.text


CONTENTS = {
    "utf-16": ("{line}".encode("utf-16"), "UTF-16. Read it with --encoding utf-16"),
    "big endian": (b"\xfe\xff" + "{line}".encode("utf-16-be"), "UTF-16"),
    "gzip": (gzip.compress(b"{line}"), "compressed with gzip. Rename the file to end in .gz"),
    "zstd": (pa.compress(b"{line}", "zstd", asbytes=True), "to end in .zst"),
    "latin1": ("{é}".encode("latin1"), "Name its encoding with --encoding"),
}


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_is_not_utf8_is_named_for_what_it_is(tmp_path, name, suffix):
    content, advice = CONTENTS[name]
    (tmp_path / f"a{suffix}").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read([str(tmp_path)])
    assert advice in str(caught.value) and f"a{suffix}" in str(caught.value)


def test_a_file_that_is_named_gz_and_is_not_is_not_called_damaged(tmp_path):
    (tmp_path / "a.jsonl.gz").write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match="not a gzip file: rename it"):
        read([str(tmp_path)])


def test_documents_of_a_stage_have_no_size_limit(tmp_path):
    texts = ["long " * 99, "x"]
    inputs, _ = find_inputs([str(write_stage(tmp_path / "s", texts, 1))], "text")
    raw = [replace(each, of_stage=False) for each in inputs]
    rules = InputRules(max_document_bytes=100)
    assert [each.text for each in read_all(inputs, rules)[0]] == texts
    with pytest.raises(ConfigError, match="max_document_bytes"):
        read_all(raw, rules)


def test_a_saved_dataset_is_read_as_datasets_reads_it(tmp_path):
    """Also with caches beside its files; of a DatasetDict one split has to be named."""
    rows = [{"text": f"{n} words", "n": n, "meta": {"url": str(n)}} for n in range(5000)]
    dataset = datasets.Dataset.from_list(rows)
    saved = tmp_path / "saved"
    dataset.save_to_disk(saved, num_shards=2)
    loaded = datasets.load_from_disk(saved)
    loaded.map(lambda row: {"text": "other"})  # leaves a cache
    assert len(list(saved.glob("cache-*.arrow"))) == 1
    assert read([str(saved)]) == list(loaded["text"])
    pq_file, feather = tmp_path / "a.parquet", tmp_path / "b.arrow"
    loaded.to_parquet(pq_file)
    pa.feather.write_feather(pq.read_table(pq_file), feather)
    rules = InputRules(keep_records=True)
    for path in (saved, feather):
        inputs = find([path], rules)
        documents, tally = read_resuming(inputs, rules, chunk_bytes=9999, samples=9)
        assert [each.record for each in documents] == rows
        assert tally.input_bytes == sum(each.size_bytes for each in inputs)
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"is a DatasetDict with 2 splits.*both/test"):
        find_inputs([str(tmp_path / "both")], "text")
    cut = tmp_path / "cut.arrow"
    cut.write_bytes(next(saved.glob("data-*.arrow")).read_bytes()[:-9999])
    rules = InputRules(on_bad_input="skip")
    _, tally = read_all(find([cut], rules), rules)
    assert tally.bad == {"damaged": 1} and tally.lost_bytes == cut.stat().st_size


def test_a_damaged_offset_of_an_arrow_file_is_found(tmp_path):
    """pyarrow would read outside of the file."""
    content = bytearray(arrow_of(pa.table({"text": ["one", "two", "three"]})))
    place = content.index(b"\0\0\0\0\3\0\0\0\6\0\0\0\x0b\0\0\0")
    content[place + 4 : place + 8] = b"\xff\xff\xff\x7f"
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.arrow:1: cannot be read as Arrow"):
        read([str(tmp_path)])


def test_a_file_that_is_written_to_after_it_was_read_is_noticed(tmp_path):
    """With the same size, or removed: its documents are no longer those that were read."""
    path = tmp_path / "a.txt"
    path.write_text("one two")
    inputs, _ = find_inputs([str(path)], "text")
    require_unchanged(inputs)
    path.write_text("two one")
    with pytest.raises(ConfigError, match="since the command started, with the same size"):
        require_unchanged(inputs)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be opened"):
        require_unchanged(inputs)
