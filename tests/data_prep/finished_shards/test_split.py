"""`zerolm data split`, compared with the documents that it divides."""

import json
import os
import resource
import shutil
import signal

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.finished_shards import documents as documents_module
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.corpus import tokenize, write_corpus
from tests.manifests import write_shard_manifest
from tests.range_server import range_server
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import open_source, verify
from zerolm.shards.writer import ShardWriter

PARTS = ["--parts", "train=0.75,val=0.25"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory, tokenizer_directory):
    """Shards of 200 documents, of which some are copies."""
    return write_corpus(tmp_path_factory.mktemp("finished"), tokenizer_directory)[0]


def split(*words) -> int:
    return main(["split", *map(str, words)])


def manifest_of(directory) -> dict:
    return json.loads((directory / "manifest.json").read_text())


def content_of(directory) -> dict[str, bytes]:
    """Return the files of both parts but their manifests."""
    files = [path for path in directory.glob("*/*") if path.is_file()]
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in files
        if path.name != "manifest.json"
    }


@pytest.mark.parametrize("piece_tokens", [500, 1 << 22])
def test_parts_have_every_document_once_and_all_copies_of_it(
    shards, tmp_path, monkeypatch, piece_tokens
):
    monkeypatch.setattr(documents_module, "PIECE_TOKENS", piece_tokens)
    assert split(shards, "--output", tmp_path, *PARTS, "--shard_tokens", 2000) == 0
    train, val = (documents_of(tmp_path / name) for name in ("train", "val"))
    whole = documents_of(shards)
    assert sorted(train + val) == sorted(whole)
    assert len(set(map(str, whole))) < len(whole), "the corpus has copies"
    assert not set(map(str, train)) & set(map(str, val))
    assert train == [each for each in whole if each in train], "the order is kept"
    assert 0.15 < len(val) / len(whole) < 0.35
    source, found = open_source(shards), open_source(tmp_path / "val")
    for number, ids in enumerate(val):
        assert find_origin(found, number) == find_origin(source, whole.index(ids))
        break  # the first has no copy before it
    made = [manifest_of(tmp_path / name) for name in ("train", "val")]
    assert made[1]["reshard"]["part"] == "val"
    for key in ("text_bytes", "inner_eos_ids", "unknown_ids", "num_tokens"):
        assert sum(each[key] for each in made) == manifest_of(shards)[key], key
    for name in ("train", "val"):
        verify(tmp_path / name)


def test_a_writer_that_is_killed_publishes_nothing_and_can_start_again(shards, tmp_path):
    words = [*PARTS, "--shard_tokens", 4000]
    assert split(shards, "--output", tmp_path / "expected", *words) == 0
    for after in (1, 2):
        child = os.fork()
        if child == 0:
            finish, count = ShardWriter.finish_shard, iter(range(100))

            def killed(writer, finish=finish, count=count, after=after):
                finish(writer)
                if next(count) == after:
                    os.kill(os.getpid(), signal.SIGKILL)

            ShardWriter.finish_shard = killed
            split(shards, "--output", tmp_path / "new", *words)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert not list((tmp_path / "new").glob("*/manifest.json"))
    assert split(shards, "--output", tmp_path / "new", *words) == 0
    assert content_of(tmp_path / "new") == content_of(tmp_path / "expected")


def test_a_full_disk_is_one_message_and_leaves_nothing(shards, tmp_path, capfd):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))
    try:
        assert split(shards, "--output", tmp_path / "new", *PARTS) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capfd.readouterr().err
    assert "cannot be written (File too large). Nothing was published" in error
    assert "Traceback" not in error and not list((tmp_path / "new").rglob("*"))


def test_damaged_ids_and_ends_are_refused_and_leave_nothing(shards, tmp_path, capfd):
    for name, expected in (
        ("shard-00001.bin", "block 0 (bytes from 0, tokens 0 to"),
        ("shard-00000.idx", "SHA-256 differs from the manifest"),
        ("shard-00002.org", "SHA-256 differs from the manifest"),
    ):
        copy = shutil.copytree(shards, tmp_path / name)
        content = bytearray((copy / name).read_bytes())
        content[100] ^= 4
        (copy / name).write_bytes(content)
        assert split(copy, "--output", tmp_path / "new", *PARTS) != 0
        assert expected in (error := capfd.readouterr().err) and name in error
        assert not list((tmp_path / "new").rglob("*"))


def test_every_problem_is_named_before_anything_is_written(shards, tmp_path, capfd):
    flags = ["--parts", "a=0.5,b=0.6", "--shard_tokens", 0]
    assert split(shards, "--output", shards / "inside", *flags) == 2
    error = capfd.readouterr().err
    for expected in ("the fractions do not add up to 1", "--shard_tokens 0", "or inside it"):
        assert expected in error, expected
    assert split(tmp_path / "absent", "--output", tmp_path / "new", "--parts", "a=1,a=0") == 2
    error = capfd.readouterr().err
    assert "absent: no such directory" in error and "'a' is not a new directory name" in error
    assert split(shards, "--output", tmp_path / "new", "--parts", "a=0.999999999,b=1e-9") == 2
    assert "b: would contain no documents" in capfd.readouterr().err
    assert not list((tmp_path / "new").rglob("*")) and not (shards / "inside").exists()


def test_shards_in_a_store_are_read_in_large_requests(tmp_path, tokenizer_directory):
    write_corpus(tmp_path, tokenizer_directory)
    large = tokenize([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tokenizer_directory,
                     tmp_path / "large")  # fmt: skip
    assert (large / "shard-00000.bin").stat().st_size > 1 << 15
    with range_server(tmp_path) as server:
        url = f"{server.url}/large"
        assert split(url, "--output", tmp_path / "new", *PARTS) == 0
        # Two of them check the store when it is opened; one has all blocks.
        assert server.requests["large/shard-00000.bin"] == 3
    assert split(large, "--output", tmp_path / "expected", *PARTS) == 0
    assert content_of(tmp_path / "new") == content_of(tmp_path / "expected")
    assert manifest_of(tmp_path / "new" / "val")["parents"][0]["directory"] == url


def test_many_shards_with_a_table_are_read_like_few(tmp_path, tokenizer_directory, monkeypatch):
    write_corpus(tmp_path, tokenizer_directory)
    monkeypatch.setattr("zerolm.shards.directory.MIN_SHARDS", 10)
    for name, size in (("many", 1000), ("few", 10**6)):
        tokenize([tmp_path / "a.jsonl"], tokenizer_directory, tmp_path / name / "all",
                 "--shard_tokens", size)  # fmt: skip
        assert split(tmp_path / name / "all", "--output", tmp_path / name / "parts", *PARTS) == 0
    assert (tmp_path / "many" / "all" / "shards.table").exists()
    assert content_of(tmp_path / "many" / "parts") == content_of(tmp_path / "few" / "parts")


def test_a_source_without_sums_is_verified_and_one_without_origins_is_named(shards, tmp_path):
    """As shards of older releases are."""
    copy = shutil.copytree(shards, tmp_path / "old")
    manifest = manifest_of(copy)
    for shard in manifest["shards"]:
        for key in ("sums", "origins"):
            (copy / shard[key]).unlink()
            for name in (key, f"{key}_size_bytes", f"{key}_sha256"):
                del shard[name]
    del manifest["input_files"], manifest["unknown_ids"]
    write_shard_manifest(copy, manifest)
    assert split(copy, "--output", tmp_path / "new", *PARTS) == 0
    first = documents_of(tmp_path / "new" / "val")[0]
    found = find_origin(open_source(tmp_path / "new" / "val"), 0)
    assert found == (str(copy), documents_of(shards).index(first), "document")
    with open(copy / "shard-00001.bin", "r+b") as file:
        file.write(b"\1\1")
    assert split(copy, "--output", tmp_path / "damaged", *PARTS) == 2


def test_ids_that_do_not_end_in_eos_are_refused(tmp_path, capfd):
    with ShardWriter(
        tmp_path / "s", vocab_size=9, eos_id=1, tokenizer={"name": "x", "fingerprint": "f"}
    ) as writer:
        writer.add(np.array([5, 1]))
    manifest = manifest_of(tmp_path / "s")
    write_shard_manifest(tmp_path / "s", {**manifest, "eos_id": 2})
    assert split(tmp_path / "s", "--output", tmp_path / "new", *PARTS) == 2
    assert "document 0 does not end with id 2" in capfd.readouterr().err
