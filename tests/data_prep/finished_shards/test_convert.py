"""`zerolm data convert` against files that the peers' own libraries wrote.

`peer_files.json` has small files of Megatron-LM, mosaicml-streaming and litdata, compressed with
zlib. benchmarks/results/converters.md compares 12,000 documents with the libraries themselves.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.finished_shards import documents as documents_module
from data_prep.finished_shards import items, megatron, nanogpt
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.conversions import (
    DOCUMENTS,
    EOS,
    convert,
    manifest_of,
    write_megatron,
)
from tests.data_prep.finished_shards.corpus import tokenize
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import open_source, verify


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("a", ["megatron"]),  # its first document has two sequences
        ("b.idx", ["megatron"]),
        ("mds1", ["mds"]),
        ("mds2/index.json", ["mds", "--column", "tokens"]),  # of no fixed dtype
        ("mds3", ["mds", "--dtype", "int64"]),  # bytes, compressed
        ("lit1", ["litdata"]),
        ("lit2", ["litdata"]),  # int64
        ("lit3", ["litdata"]),  # of numpy
    ],
)
def test_files_that_the_peers_wrote_give_their_ids(
    peers, tmp_path, tokenizer_directory, name, flags
):
    output = tmp_path / "shards"
    words = ["--from", *flags, "--tokenizer", tokenizer_directory, "--output", output]
    assert convert(peers / name, *words) == 0
    assert documents_of(output) == DOCUMENTS
    verify(output)
    made = manifest_of(output)
    assert made["convert"]["read_ids"] == made["num_tokens"] == sum(map(len, DOCUMENTS))
    assert made["tokenizer"]["name"] == str(tokenizer_directory)
    origin = find_origin(open_source(output), 3)
    assert origin is not None and origin.file.startswith(str(peers))


@pytest.mark.parametrize("form", ["megatron", "nanogpt"])
def test_files_larger_than_a_piece_give_the_shards_that_tokenize_writes(
    corpus, tmp_path, monkeypatch, form
):
    """With every limit of size far below the data."""
    one, two, tokenizer = corpus
    for module in (documents_module, items, nanogpt):
        monkeypatch.setattr(module, "PIECE_TOKENS", 700)
    monkeypatch.setattr(megatron, "BLOCK_DOCUMENTS", 30)
    documents = documents_of(one) + documents_of(two)
    given = write_megatron(tmp_path / "m", documents) if form == "megatron" else tmp_path / "n.bin"
    np.concatenate(documents).astype("<u2").tofile(tmp_path / "n.bin")
    back = tmp_path / "back"
    words = ["--from", form, "--tokenizer", tokenizer, "--output", back]
    assert convert(given, *words, "--shard_tokens", 20_000) == 0
    files = [one.parent / "a.jsonl", one.parent / "b.jsonl"]
    whole = tokenize(files, tokenizer, tmp_path / "whole", "--shard_tokens", 20_000)
    expected, made = manifest_of(whole), manifest_of(back)
    for shard in expected["shards"]:
        for key in ("file", "index", "sums"):
            assert (back / shard[key]).read_bytes() == (whole / shard[key]).read_bytes()
    for key in ("num_tokens", "num_documents", "text_bytes", "unknown_ids", "inner_eos_ids"):
        assert made[key] == expected[key], key


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.uint16()),
        pa.list_(pa.int16(), 4),
    ],
    ids=str,
)
def test_lists_of_every_integer_are_read(tmp_path, tokenizer_directory, kind):
    rows = (
        [[1, 2, 3, EOS], [], [7, EOS]] if not pa.types.is_fixed_size_list(kind) else [[1, 2, 3, 0]]
    )
    table = pa.table({"input_ids": pa.array([*rows, *rows], kind), "n": [1] * 2 * len(rows)})
    pq.write_table(table, tmp_path / "a.parquet")
    words = ["--from", "parquet", "--tokenizer", tokenizer_directory, "--output", tmp_path / "s"]
    assert convert(tmp_path / "a.parquet", *words) == 0
    assert documents_of(tmp_path / "s") == [row for row in [*rows, *rows] if row]
    skipped = {"empty": 2} if [] in rows else {}
    assert manifest_of(tmp_path / "s")["skipped_documents"] == skipped


HEADERS = {
    "llm.c": ("<u2", 20240520, 0),
    "NeMo, 2 bytes": ("<u2", 278895051, 2),
    "NeMo, 4 bytes": ("<u4", 278895051, 4),
}


@pytest.mark.parametrize("writer", [*HEADERS, "numpy.save", "datatrove"])
def test_flat_files_that_state_their_layout_give_their_ids(tmp_path, tokenizer_directory, writer):
    ids = np.concatenate(DOCUMENTS)
    path = tmp_path / "ids.bin"
    if writer in HEADERS:
        dtype, magic, width = HEADERS[writer]
        header = np.zeros(256, "<i4")
        header[:4] = magic, 1, len(ids), width
        path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    elif writer == "numpy.save":
        with open(path, "wb") as file:
            np.save(file, ids)  # int64
    else:  # as datatrove 0.10.1 writes it for a vocabulary above 65,535
        ids.astype("<u4").tofile(path)
        path.with_name("ids.bin.metadata").write_text(f"some|tokenizer|4\n{len(ids)}\n303 T")
    words = ["--from", "nanogpt", "--tokenizer", tokenizer_directory, "--output", tmp_path / "s"]
    assert convert(path, *words) == 0
    assert documents_of(tmp_path / "s") == DOCUMENTS


def test_documents_may_run_over_items_and_lack_their_last_eos(tmp_path, tokenizer_directory, capfd):
    stream = np.array([1, 2, EOS, 3, EOS, 4, 5, 6, EOS, 7], np.int64)
    table = pa.table({"tokens": [stream[:4].tolist(), stream[4:6].tolist(), stream[6:].tolist()]})
    pq.write_table(table, tmp_path / "a.parquet")
    words = ["--tokenizer", tokenizer_directory, "--from"]
    assert convert(tmp_path / "a.parquet", *words, "parquet", "--output", tmp_path / "a") == 2
    assert "row 0 ends with id 3, not with the tokenizer's EOS id 0" in capfd.readouterr().err
    flags = ["--boundaries", "eos", "--append_eos"]
    assert (
        convert(tmp_path / "a.parquet", *words, "parquet", "--output", tmp_path / "b", *flags) == 0
    )
    expected = [[1, 2, 0], [3, 0], [4, 5, 6, 0], [7, 0]]
    assert documents_of(tmp_path / "b") == expected
    assert manifest_of(tmp_path / "b")["convert"]["appended_eos"] == 1
    # llm.c writes several files, whose documents run over their ends
    for place, part in enumerate(np.split(stream.astype("<u2"), [1, 3, 7])):
        part.tofile(tmp_path / f"{place}.bin")
    files = [tmp_path / f"{place}.bin" for place in range(4)]
    assert convert(*files, *words, "nanogpt", "--output", tmp_path / "d", flags[2]) == 0
    assert documents_of(tmp_path / "d") == expected
    origins = [find_origin(open_source(tmp_path / "d"), number)[:2] for number in range(4)]
    begun = [(0, 0), (2, 0), (2, 1), (3, 0)]
    assert origins == [(str(files[file]), place) for file, place in begun]
    # and a header, and the EOS id before each document
    header = np.zeros(256, "<i4")
    ids = np.array([EOS, 1, 2, EOS, 3, EOS, 4, 5, 6, EOS, 7], "<u2")
    header[:3] = 20240520, 1, len(ids)
    (tmp_path / "c.bin").write_bytes(header.tobytes() + ids.tobytes())
    assert convert(tmp_path / "c.bin", *words, "nanogpt", "--output", tmp_path / "c", flags[2]) == 0
    assert documents_of(tmp_path / "c") == expected
    made = manifest_of(tmp_path / "c")["convert"]
    assert (made["read_ids"], made["dropped_eos"], made["appended_eos"]) == (11, 1, 1)
