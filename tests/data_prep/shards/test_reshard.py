"""`zerolm data reshard`, compared with tokenizing the same texts, and with plain Python."""

import json
import os
import resource
import shutil
import signal
from fnmatch import fnmatch

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep.__main__ import main
from data_prep.shards import documents as documents_module
from data_prep.shards import shuffle
from tests.data_prep.shards.corpus import tokenize, write_corpus
from tests.data_prep.tokenize.tokenized import documents_of
from tests.manifests import write_shard_manifest
from tests.range_server import range_server
from zerolm.shards.origins import find_origin
from zerolm.shards.reader import open_source, verify
from zerolm.shards.writer import ShardWriter

MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer_directory):
    directory = tmp_path_factory.mktemp("finished")
    return directory, *write_corpus(directory, tokenizer_directory), tokenizer_directory


def reshard(*words) -> int:
    return main(["reshard", *map(str, words)])


def manifest_of(directory) -> dict:
    return json.loads((directory / "manifest.json").read_text())


def content_of(directory) -> dict[str, bytes]:
    """Return all files but the manifest, and the entries of shards in it."""
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    return {**files, "shards": json.dumps(manifest["shards"], sort_keys=True).encode()}


@pytest.mark.parametrize("shard_tokens", [2000, 10**6])
def test_merged_shards_equal_those_of_one_tokenization(corpus, tmp_path, shard_tokens):
    directory, one, two, tokenizer = corpus
    size = ["--shard_tokens", shard_tokens]
    assert reshard(one, two, "--output", tmp_path / "merged", *size) == 0
    files = [directory / "a.jsonl", directory / "b.jsonl"]
    expected = tokenize(files, tokenizer, tmp_path / "expected", *size)
    assert content_of(tmp_path / "merged") == content_of(expected)
    merged, whole = manifest_of(tmp_path / "merged"), manifest_of(expected)
    for key in ("text_bytes", "inner_eos_ids", "unknown_ids", "num_tokens", "tokenizer", "inputs"):
        assert merged[key] == whole[key], key
    verify(tmp_path / "merged")
    assert [each["directory"] for each in merged["parents"]] == [str(one), str(two)]
    assert merged["parents"][0]["fingerprint"] == open_source(one).fingerprint
    assert merged["parents"][0]["command"] == manifest_of(one)["command"]


def splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def shuffled(documents: list, seed: int) -> list:
    keys = [splitmix(seed & MASK ^ splitmix(number)) for number in range(len(documents))]
    return [documents[number] for number in np.argsort(np.array(keys, np.uint64))]


@pytest.mark.parametrize("bucket_bytes", [500, 1 << 27])
def test_a_shuffle_depends_on_the_seed_alone(corpus, tmp_path, monkeypatch, bucket_bytes):
    """Not on the shards, nor on the memory; and its documents keep their origins."""
    _, one, two, _ = corpus
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(documents_module, "PIECE_TOKENS", 300 if bucket_bytes == 500 else 1 << 22)
    output = tmp_path / "shuffled"
    assert reshard(one, two, "--output", output, "--shuffle", -3, "--shard_tokens", 5000) == 0
    whole = documents_of(one) + documents_of(two)
    assert documents_of(output) == shuffled(whole, -3)
    assert not (output / "parts").exists()
    numbers = shuffled(list(range(len(whole))), -3)
    for place in (0, 17, 399):
        number = numbers[place]
        source, first = (one, 0) if number < 200 else (two, 200)
        expected = find_origin(open_source(source), number - first)
        assert find_origin(open_source(output), place) == expected


def test_a_limit_on_shuffled_documents_takes_the_first_of_the_shuffle(corpus, tmp_path):
    _, one, two, _ = corpus
    whole = shuffled(documents_of(one) + documents_of(two), 5)
    assert reshard(one, two, "--output", tmp_path / "a", "--shuffle", 5, "--max_tokens", "4k") == 0
    sizes = np.cumsum([len(each) for each in whole])
    assert documents_of(tmp_path / "a") == whole[: int((sizes <= 4000).sum())]
    few = ["--shuffle", 5, "--max_documents", 7]
    assert reshard(one, two, "--output", tmp_path / "b", *few) == 0
    assert documents_of(tmp_path / "b") == whole[:7]


def test_parts_have_every_document_once_and_all_copies_of_it(corpus, tmp_path):
    _, one, two, _ = corpus
    split = ["--split", "train=0.75,val=0.25"]
    assert reshard(one, two, "--output", tmp_path, *split) == 0
    train, val = (documents_of(tmp_path / name) for name in ("train", "val"))
    whole = documents_of(one) + documents_of(two)
    assert sorted(train + val) == sorted(whole)
    assert len(set(map(str, whole))) < len(whole), "the corpus has copies"
    assert not set(map(str, train)) & set(map(str, val))
    assert train == [each for each in whole if each in train], "the order is kept"
    assert 0.15 < len(val) / len(whole) < 0.35
    assert manifest_of(tmp_path / "val")["reshard"]["part"] == "val"
    texts = [manifest_of(tmp_path / name)["text_bytes"] for name in ("train", "val")]
    assert sum(texts) == sum(manifest_of(each)["text_bytes"] for each in (one, two))


def test_chosen_documents_equal_a_choice_in_python(corpus, tmp_path):
    directory, one, two, tokenizer = corpus
    (tmp_path / "keep").write_text("".join(f"{number}\n" for number in range(0, 400, 3)))
    (tmp_path / "drop").write_text("3\n201\n\n9")
    flags = ["--keep", tmp_path / "keep", "--drop", tmp_path / "drop", "--min_length", 20]
    flags += ["--max_length", 150, "--files", "*/b.jsonl", "--max_documents", 30]
    assert reshard(one, two, "--output", tmp_path / "chosen", *flags) == 0
    whole = [(number, ids) for number, ids in enumerate(documents_of(one) + documents_of(two))]
    assert fnmatch(str(directory / "b.jsonl"), "*/b.jsonl")
    expected = [
        ids
        for number, ids in whole
        if number % 3 == 0 and number not in (3, 201, 9) and number >= 200 and 20 <= len(ids) <= 150
    ][:30]
    assert documents_of(tmp_path / "chosen") == expected
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    sizes = [len(backend.decode(ids[:-1], skip_special_tokens=False).encode()) for ids in expected]
    assert manifest_of(tmp_path / "chosen")["text_bytes"] == sum(sizes)


def test_a_writer_that_is_killed_publishes_nothing_and_can_start_again(corpus, tmp_path):
    _, one, two, _ = corpus
    words = ["--shuffle", 1, "--split", "a=0.5,b=0.5", "--shard_tokens", 9000]
    assert reshard(one, two, "--output", tmp_path / "expected", *words) == 0
    for after in (1, 2):
        child = os.fork()
        if child == 0:
            finish, count = ShardWriter.finish_shard, iter(range(100))

            def killed(writer, finish=finish, count=count, after=after):
                finish(writer)
                if next(count) == after:
                    os.kill(os.getpid(), signal.SIGKILL)

            ShardWriter.finish_shard = killed
            reshard(one, two, "--output", tmp_path / "new", *words)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        assert not list((tmp_path / "new").glob("*/manifest.json"))
    assert reshard(one, two, "--output", tmp_path / "new", *words) == 0
    for part in "ab":
        assert content_of(tmp_path / "new" / part) == content_of(tmp_path / "expected" / part)


def test_a_full_disk_is_one_message_and_leaves_nothing(corpus, tmp_path, capfd):
    _, one, two, _ = corpus
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        assert reshard(one, two, "--output", tmp_path / "new") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capfd.readouterr().err
    assert "cannot be written (File too large). Nothing was published" in error
    assert "Traceback" not in error and not (tmp_path / "new").exists()


def test_damaged_ids_and_ends_are_refused_and_leave_nothing(corpus, tmp_path, capfd):
    _, one, _, _ = corpus
    for name, expected in (
        ("shard-00001.bin", "block 0 (bytes from 0, tokens 0 to"),
        ("shard-00000.idx", "SHA-256 differs from the manifest"),
        ("shard-00002.org", "SHA-256 differs from the manifest"),
    ):
        copy = shutil.copytree(one, tmp_path / name)
        content = bytearray((copy / name).read_bytes())
        content[100] ^= 4
        (copy / name).write_bytes(content)
        assert reshard(copy, "--output", tmp_path / "new") != 0
        assert expected in (error := capfd.readouterr().err) and name in error
        assert not (tmp_path / "new").exists()


def test_every_problem_is_named_before_anything_is_written(corpus, tmp_path, capfd):
    directory, one, _, tokenizer = corpus
    other = tmp_path / "other"
    with ShardWriter(
        other, vocab_size=70_000, eos_id=1, tokenizer={"name": "x", "fingerprint": "f"}
    ) as writer:
        writer.add(np.array([5, 1]))
    tokenize([directory / "a.jsonl"], tokenizer, tmp_path / "train", "--val_fraction", 0.2,
             "--val_output", tmp_path / "val")  # fmt: skip
    (tmp_path / "list").write_text("1\n-1\n")
    capfd.readouterr()
    flags = ["--split", "a=0.5,b=0.6", "--keep", tmp_path / "list", "--drop", tmp_path / "none"]
    flags += ["--max_tokens", 0, "--shuffle", "x", "--shard_tokens", 0]
    flags += ["--min_length", 9, "--max_length", 5]
    sources = [one, other, tmp_path / "train", tmp_path / "val", tmp_path / "absent", one]
    assert reshard(*sources, "--output", one / "inside", *flags) == 2
    error = capfd.readouterr().err
    for expected in (
        "other: tokenizer.fingerprint is f", "other: vocab_size is 70000", "other: eos_id is 1",
        "other: dtype is uint32", "absent: no such directory",
        "a directory is given twice", "do not add up to 1", "list: line 2: '-1' is not the number",
        "none: cannot be read", "--max_tokens 0", "--shuffle x", "--shard_tokens 0",
        "--min_length 9: above --max_length 5", "is read, or inside of it",
    ):  # fmt: skip
        assert expected in error, expected
    assert reshard(tmp_path / "train", tmp_path / "val", "--output", tmp_path / "new") == 2
    assert "would be mixed" in capfd.readouterr().err
    assert reshard(one, "--output", tmp_path / "new", "--min_length", 10**6) == 2
    assert "no document is chosen of 200" in capfd.readouterr().err
    assert not (tmp_path / "new").exists() and not (one / "inside").exists()


def test_shards_in_a_store_are_read_in_large_requests(corpus, tmp_path):
    _, one, two, _ = corpus
    merged = tmp_path / "merged"
    assert reshard(one, two, "--output", merged) == 0
    assert (merged / "shard-00000.bin").stat().st_size > 1 << 16, "more than one block"
    with range_server(tmp_path) as server:
        url = f"{server.url}/merged"
        assert reshard(url, "--output", tmp_path / "new", "--shuffle", 2) == 0
        # Two of them check the store when it is opened; one has both blocks.
        assert server.requests["merged/shard-00000.bin"] == 3
    assert reshard(merged, "--output", tmp_path / "expected", "--shuffle", 2) == 0
    assert content_of(tmp_path / "new") == content_of(tmp_path / "expected")
    assert manifest_of(tmp_path / "new")["parents"][0]["directory"] == url


def test_many_shards_with_a_table_are_read_like_few(corpus, tmp_path, monkeypatch):
    _, one, two, _ = corpus
    monkeypatch.setattr("zerolm.shards.directory.MIN_SHARDS", 10)
    assert reshard(one, two, "--output", tmp_path / "many", "--shard_tokens", 4000) == 0
    assert (tmp_path / "many" / "shards.table").exists()
    assert reshard(tmp_path / "many", "--output", tmp_path / "few") == 0
    assert reshard(one, two, "--output", tmp_path / "merged") == 0
    assert content_of(tmp_path / "few") == content_of(tmp_path / "merged")


def test_a_source_without_sums_is_verified_and_one_without_origins_is_named(corpus, tmp_path):
    """As shards of older releases are."""
    _, one, _, _ = corpus
    copy = shutil.copytree(one, tmp_path / "old")
    manifest = manifest_of(copy)
    for shard in manifest["shards"]:
        for key in ("sums", "origins"):
            (copy / shard[key]).unlink()
            for name in (key, f"{key}_size_bytes", f"{key}_sha256"):
                del shard[name]
    del manifest["input_files"], manifest["unknown_ids"]
    write_shard_manifest(copy, manifest)
    assert reshard(copy, "--output", tmp_path / "new") == 0
    assert documents_of(tmp_path / "new") == documents_of(one)
    found = find_origin(open_source(tmp_path / "new"), 150)
    assert found == (str(copy), 150, "document")
    with open(copy / "shard-00001.bin", "r+b") as file:
        file.write(b"\1\1")
    assert reshard(copy, "--output", tmp_path / "damaged") == 2
