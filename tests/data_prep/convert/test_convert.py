"""`zerolm data convert` against files that the peers' own libraries wrote, and damaged ones.

`peer_files.json` has small files of Megatron-LM, mosaicml-streaming and litdata, compressed with
zlib. benchmarks/results/converters.md compares 12,000 documents with the libraries themselves.
"""

import base64
import json
import os
import resource
import shutil
import signal
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data_prep.__main__ import main
from data_prep.convert import formats, from_shards, items, litdata, mds, megatron, parquet
from data_prep.shard_commands.convert import NAMES
from data_prep.shards import documents as documents_module
from tests.data_prep.shards.corpus import write_corpus
from tests.data_prep.tokenize.tokenized import documents_of
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import open_source, verify
from zerolm.shards.writer import ShardWriter

EOS = 0
DOCUMENTS = [[1, 2, 3, EOS], [4, EOS], [EOS], [*range(5, 300), EOS]]


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Path:
    """The files that the peers wrote."""
    directory = tmp_path_factory.mktemp("peers")
    content = json.loads((Path(__file__).parent / "peer_files.json").read_text())
    for name, data in content["files"].items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(zlib.decompress(base64.b64decode(data)))
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer_directory):
    one, two = write_corpus(tmp_path_factory.mktemp("corpus"), tokenizer_directory)
    return one, two, tokenizer_directory


@pytest.fixture
def shards(tmp_path, tokenizer_directory) -> Path:
    """The documents that the peers' files have, as shards."""
    assert open_eos(tokenizer_directory) == EOS
    with ShardWriter(
        tmp_path / "shards", vocab_size=300, eos_id=EOS, tokenizer={"fingerprint": "f"}
    ) as writer:
        for ids in DOCUMENTS:
            writer.add(np.array(ids))
    return tmp_path / "shards"


def open_eos(tokenizer_directory) -> int | None:
    backend = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    return backend.token_to_id("<|endoftext|>")


def convert(*words) -> int:
    return main(["convert", *map(str, words)])


def manifest_of(directory) -> dict:
    return json.loads((Path(directory) / "manifest.json").read_text())


def test_the_command_offers_every_format():
    """It lists them itself, because `--help` imports no reader."""
    assert set(NAMES) == set(formats.FORMATS)


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


def test_our_files_equal_those_that_the_peers_wrote(peers, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(litdata, "CHUNK_BYTES", 600)
    monkeypatch.setattr(documents_module, "PIECE_TOKENS", 4)  # litdata's chunks end at documents
    for form in ("megatron", "mds", "litdata"):
        assert convert(shards, "--to", form, "--output", tmp_path / form) == 0
    for ours, theirs in (
        ("megatron/tokens.bin", "c.bin"),
        ("megatron/tokens.idx", "c.idx"),
        ("mds/shard.00000.mds", "mds0/shard.00000.mds"),
        ("litdata/chunk-0-0.bin", "lit1/chunk-0-0.bin"),
        ("litdata/chunk-0-1.bin", "lit1/chunk-0-1.bin"),
    ):
        assert (tmp_path / ours).read_bytes() == (peers / theirs).read_bytes(), ours
    read = [
        json.loads((root / "index.json").read_text()) for root in (tmp_path / "mds", peers / "mds0")
    ]
    assert read[0] == read[1]
    ours, theirs = (
        json.loads((root / "index.json").read_text())
        for root in (tmp_path / "litdata", peers / "lit1")
    )
    assert ours["chunks"] == theirs["chunks"]
    assert ours["config"].items() <= theirs["config"].items()


@pytest.mark.parametrize("form", NAMES)
def test_there_and_back_gives_the_same_shards(corpus, tmp_path, monkeypatch, form):
    """With every limit of size far below the data."""
    one, two, _ = corpus
    for module in (documents_module, items):
        monkeypatch.setattr(module, "PIECE_TOKENS", 700)
    monkeypatch.setattr(mds, "SIZE_LIMIT", 3000)
    monkeypatch.setattr(litdata, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(parquet, "FILE_TOKENS", 5000)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 16)
    monkeypatch.setattr(megatron, "BLOCK_DOCUMENTS", 30)
    assert convert(one, two, "--to", form, "--output", tmp_path / form) == 0
    back = tmp_path / "back"
    words = ["--from", form, "--tokenizer", tmp_path / form / "_tokenizer", "--output", back]
    assert convert(tmp_path / form, *words, "--shard_tokens", 20_000) == 0
    assert main(["reshard", str(one), str(two), "--output", str(tmp_path / "merged"),
                 "--shard_tokens", "20000"]) == 0  # fmt: skip
    merged = manifest_of(tmp_path / "merged")
    for shard in merged["shards"]:
        for key in ("file", "index", "sums"):
            assert (back / shard[key]).read_bytes() == (
                tmp_path / "merged" / shard[key]
            ).read_bytes()
    made = manifest_of(back)
    for key in ("num_tokens", "num_documents", "text_bytes", "unknown_ids", "inner_eos_ids"):
        assert made[key] == merged[key], key
    record = json.loads((tmp_path / form / "_provenance.json").read_text())
    assert [each["directory"] for each in record["parents"]] == [str(one), str(two)]
    assert record["num_tokens"] == merged["num_tokens"]
    assert not list(tmp_path.glob(".*"))


def test_parquet_can_have_the_text_too(corpus, tmp_path):
    one, _, _ = corpus
    assert convert(one, "--to", "parquet", "--with_text", "--output", tmp_path / "p") == 0
    rows = pq.read_table(tmp_path / "p" / "shard_00000.parquet").to_pylist()
    lines = (one.parent / "a.jsonl").read_text().splitlines()
    assert [row["text"] for row in rows] == [json.loads(line)["text"] for line in lines]
    assert [row["ids"] for row in rows] == documents_of(one)


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


def test_documents_may_run_over_items_and_lack_their_last_eos(tmp_path, tokenizer_directory, capfd):
    stream = np.array([1, 2, EOS, 3, EOS, 4, 5, 6, EOS, 7], np.int64)
    table = pa.table({"tokens": [stream[:4].tolist(), stream[4:6].tolist(), stream[6:].tolist()]})
    pq.write_table(table, tmp_path / "a.parquet")
    words = ["--tokenizer", tokenizer_directory, "--from"]
    assert convert(tmp_path / "a.parquet", *words, "parquet", "--output", tmp_path / "a") == 2
    assert "row 0 ends in id 3, not in the tokenizer's EOS id 0" in capfd.readouterr().err
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


def cut(name, count):
    return lambda root: os.truncate(root / name, (root / name).stat().st_size - count)


def patch(name, place, data):
    def change(root):
        content = bytearray((root / name).read_bytes())
        content[place : place + len(data)] = data
        (root / name).write_bytes(content)

    return change


def null_dim(root):
    """Change an index to what litdata writes without `TokensLoader`."""
    index = json.loads((root / "lit1/index.json").read_text())
    for chunk in index["chunks"]:
        chunk["dim"] = None
    index["config"]["item_loader"] = "PyTreeLoader"
    (root / "lit1/index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("given", "form", "damage", "expected"),
    [
        ("a", "megatron", cut("a.bin", 2), "a.bin: has 604 bytes, its index says 606"),
        ("a", "megatron", cut("a.idx", 8), "a.idx: has 126 bytes, 134 for its 5 sequences"),
        ("a", "megatron", cut("a.idx", 110), "a.idx: ends after 24 bytes"),
        ("a", "megatron", patch("a.idx", 0, b"X"), "a.idx: does not begin with b'MMIDIDX"),
        ("a", "megatron", patch("a.idx", 17, b"\7"), "a.idx: version 1 and dtype code 7"),
        ("a", "megatron", patch("a.idx", 34 + 4, b"\2"), "a.idx: sequences from 0 on do not"),
        ("a", "megatron", patch("a.bin", 4, b"\xff\1"), "a.bin: id 511 at place 2 is outside"),
        ("a", "megatron", lambda root: (root / "a.bin").unlink(), "a.bin: no such file"),
        ("mds1", "mds", cut("mds1/shard.00000.mds", 1), "bytes, index.json says"),
        ("mds1", "mds", patch("mds1/shard.00000.mds", 0, b"\3"), "holds 3 items, but its index"),
        ("mds1", "mds", patch("mds1/shard.00000.mds", 8, b"\xff"), "to which its offsets do not"),
        ("mds3", "mds", lambda root: None, "Say what integers its bytes are: --dtype int64"),
        ("mds0", "mds", patch("mds0/index.json", 0, b"x"), "mds0/index.json"),
        ("lit1", "litdata", cut("lit1/chunk-0-1.bin", 2), "chunk-0-1.bin: has 602 bytes"),
        ("lit1", "litdata", patch("lit1/chunk-0-0.bin", 8, b"\x19"), "does not hold 7 ids of 2"),
        (
            "lit1", "litdata", null_dim,
            "index.json: chunks[].dim is null and item_loader is PyTreeLoader",
        ),
        ("absent", "litdata", lambda root: None, "absent/index.json: no such file"),
        ("mds0", "litdata", lambda root: None, "chunks: missing."),
        ("lit1", "mds", lambda root: None, "shards: missing."),
        ("absent", "nanogpt", lambda root: None, "absent: no such file"),
        ("a.bin", "nanogpt", cut("a.bin", 1), "has 605 bytes, which are not ids of 2 bytes"),
        ("a.bin", "parquet", lambda root: None, "a.bin: is not Parquet, or damaged"),
    ],
)  # fmt: skip
def test_damaged_files_are_named_and_leave_nothing(
    peers, tmp_path, tokenizer_directory, capfd, given, form, damage, expected
):
    root = shutil.copytree(peers, tmp_path / "in")
    damage(root)
    words = ["--from", form, "--tokenizer", tokenizer_directory, "--output", tmp_path / "out"]
    assert convert(root / given, *words) == 2
    error = capfd.readouterr().err
    assert expected in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_the_wrong_tokenizer_is_noticed(corpus, shards, tmp_path, capfd):
    one, _, tokenizer = corpus
    assert convert(one, "--to", "nanogpt", "--output", tmp_path / "n") == 0
    backend = json.loads((tokenizer / "tokenizer.json").read_text())
    backend["added_tokens"] = []
    other = shutil.copytree(tokenizer, tmp_path / "other")
    changed = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    changed.add_tokens(["more"])
    changed.save(str(other / "tokenizer.json"))
    words = ["--from", "nanogpt", "--output", tmp_path / "s", "--tokenizer"]
    assert convert(tmp_path / "n", *words, other) == 2
    assert "_tokenizer" in capfd.readouterr().err  # the one that made the ids
    (tmp_path / "n" / "_provenance.json").unlink()
    np.full(100, 5, "<u2").tofile(tmp_path / "n" / "train.bin")
    assert convert(tmp_path / "n", *words, tokenizer) == 2
    assert "document 0 ends in id 5, not in the tokenizer's EOS id" in capfd.readouterr().err
    assert not (tmp_path / "s").exists()


def test_every_problem_is_named_before_anything_is_written(corpus, tmp_path, capfd):
    one, _, tokenizer = corpus
    assert convert(one, "--to", "mds", "--from", "mds", "--output", tmp_path / "o") == 2
    assert "needs either --from FORMAT or --to FORMAT" in capfd.readouterr().err
    flags = ["--column", "x", "--dtype", "int8", "--boundaries", "items", "--with_text"]
    words = ["--from", "nanogpt", "--output", one, "--shard_tokens", 0, *flags]
    (tmp_path / "some.bin").write_bytes(b"12")
    assert convert(tmp_path / "some.bin", tmp_path / "absent", *words) == 2
    error = capfd.readouterr().err
    for expected in ("already holds token shards", "--tokenizer: is missing", "--column: does not",
                     "nanogpt files have none", "--shard_tokens 0", "--dtype int8: is not one of",
                     "--with_text: applies to --to only", "absent: no such file"):  # fmt: skip
        assert expected in error, expected
    words = ["--from", "megatron", "--output", tmp_path / "o", "--tokenizer", tokenizer]
    assert convert(one, *words) == 2
    assert "holds token shards already. Convert them with --to" in capfd.readouterr().err
    words = ["--to", "mds", "--output", one, "--tokenizer", "x", "--with_text", "--append_eos"]
    assert convert(one, tmp_path / "absent", *words) == 2
    error = capfd.readouterr().err
    for expected in ("--tokenizer: applies to --from", "--append_eos: applies",
                     "needs --to parquet", "absent: no such directory",
                     "exists already"):  # fmt: skip
        assert expected in error, expected


@pytest.mark.parametrize("direction", ["from", "to"])
def test_a_full_disk_and_a_kill_leave_nothing_to_be_mistaken(corpus, tmp_path, capfd, direction):
    one, two, tokenizer = corpus
    flags = [one, two, "--to", "megatron"]
    if direction == "from":
        assert convert(*flags, "--output", tmp_path / "m") == 0
        flags = [tmp_path / "m", "--from", "megatron", "--tokenizer", tokenizer]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        assert convert(*flags, "--output", tmp_path / "new") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capfd.readouterr().err
    assert "cannot be written (File too large)" in error and "Traceback" not in error
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))
    child = os.fork()
    if child == 0:
        for module, name in ((ShardWriter, "finish_shard"), (from_shards, "sync_file")):
            setattr(module, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        convert(*flags, "--output", tmp_path / "new")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "new" / "manifest.json").exists()
    assert direction == "from" or not (tmp_path / "new").exists()
    assert convert(*flags, "--output", tmp_path / "new") == 0
    assert convert(*flags, "--output", tmp_path / "expected") == 0
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert files == {path.name for path in (tmp_path / "expected").iterdir()}
    for name in files - {"manifest.json", "_provenance.json", "tokenizer", "_tokenizer"}:
        expected = (tmp_path / "expected" / name).read_bytes()
        assert (tmp_path / "new" / name).read_bytes() == expected, name
    assert not list(tmp_path.glob(".new*"))
