"""Shards are read exactly as they were written, and a writer leaves nothing half done."""

import hashlib
import json
import pickle
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zerolm.shards.small_shards import EOS, TOKENIZER, many_shards, write, writer
from zerolm.common.errors import ShardError
from zerolm.shards import disk, local
from zerolm.shards.checksums import block_checksum
from zerolm.shards.directory import output_problems
from zerolm.shards.manifest import token_dtype
from zerolm.shards.reader import open_source, verify
from zerolm.shards.writer import ShardWriter

ENDINGS = ("bin", "idx", "sums", "fine")


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    batch=st.integers(1, 7),
    shard_tokens=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_documents_are_read_in_order_and_never_split(lengths, batch, shard_tokens):
    """For any grouping of the documents, and any size of shards."""
    documents = [[1 + n % 900] * (length - 1) + [EOS] for n, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as name:
        with writer(Path(name) / "s", shard_tokens=shard_tokens) as open_writer:
            for start in range(0, len(documents), batch):
                group = documents[start : start + batch]
                ends = np.cumsum([len(document) for document in group])
                open_writer.add(np.concatenate(group), ends)
        source = open_source(Path(name) / "s")
        everything = np.empty(source.num_tokens, np.int64)
        source.read(0, everything)
        assert everything.tolist() == [token for document in documents for token in document]
        found = []
        for number, shard in enumerate(source.manifest["shards"]):
            ends = source.document_ends(number).astype(int)
            found += [part.tolist() for part in np.split(source.shard(number), ends[:-1])]
            assert shard["num_tokens"] <= shard_tokens or shard["num_documents"] == 1
        assert found == documents
        assert verify(Path(name) / "s")["num_documents"] == len(documents)


def test_batches_do_not_change_the_bytes(tmp_path):
    """Documents added one by one or all at once give the same files."""
    documents = [[7] * length + [EOS] for length in (3, 0, 5, 2, 9, 1)]
    write(tmp_path / "one", documents, shard_tokens=8)
    with writer(tmp_path / "two", shard_tokens=8) as open_writer:
        ends = np.cumsum([len(document) for document in documents])
        open_writer.add(np.concatenate(documents), ends)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_files_are_what_the_format_says(tmp_path):
    """Read without this project: plain little-endian integers, and SHA-256 of the files."""
    directory = write(tmp_path / "s", shard_tokens=5)
    manifest = json.loads((directory / "manifest.json").read_text())
    tokens = b"".join((directory / shard["file"]).read_bytes() for shard in manifest["shards"])
    assert np.frombuffer(tokens, "<u2").tolist() == [1, 2, 0, 3, 0, 4, 5, 6, 0]
    assert [shard["num_documents"] for shard in manifest["shards"]] == [2, 1]
    assert np.fromfile(directory / "shard-00000.idx", "<u8").tolist() == [3, 5]
    for shard in manifest["shards"]:
        for key, prefix in (
            ("file", ""),
            ("index", "index_"),
            ("sums", "sums_"),
            ("fine", "fine_"),
        ):
            content = (directory / shard[key]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard[f"{prefix}sha256"]
            assert len(content) == shard[f"{prefix}size_bytes"]
    names = {"manifest.json", *(f"shard-0000{n}.{end}" for n in (0, 1) for end in ENDINGS)}
    assert {path.name for path in directory.iterdir()} == names


def test_ids_have_the_smallest_type_that_holds_the_vocabulary(tmp_path):
    assert token_dtype(65_536) == "<u2" and token_dtype(65_537) == "<u4"
    for vocab_size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        directory = write(tmp_path / dtype, [[vocab_size - 1, EOS]], vocab_size=vocab_size)
        source = open_source(directory)
        assert source.manifest["dtype"] == dtype
        assert source.shard(0).tolist() == [vocab_size - 1, EOS]


@pytest.mark.parametrize("token", [1000, -1])
def test_an_id_outside_of_the_vocabulary_is_refused(tmp_path, token):
    with (
        pytest.raises(ShardError, match=f"token id {token} is outside"),
        writer(tmp_path / "s") as w,
    ):
        w.add(np.array([token, EOS]))
    assert not (tmp_path / "s").exists()


def test_a_writer_says_when_its_manifest_is_there(tmp_path):
    with writer(tmp_path / "s") as w:
        w.add(np.array([1, EOS]))
        assert not w.published and not (tmp_path / "s" / "manifest.json").exists()
    assert w.published and (tmp_path / "s" / "manifest.json").exists()


@pytest.mark.parametrize("eos_id", [-1, 1000])
def test_documents_cannot_end_in_an_id_outside_of_the_vocabulary(tmp_path, eos_id):
    with pytest.raises(AssertionError):
        ShardWriter(tmp_path / "s", vocab_size=1000, eos_id=eos_id, tokenizer=TOKENIZER)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("ends", [[], [1]])
def test_tokens_after_the_last_document_are_refused(tmp_path, ends):
    with (
        pytest.raises(AssertionError, match="document_ends must cover the token ids"),
        writer(tmp_path / "s") as open_writer,
    ):
        open_writer.add(np.array([EOS, EOS]), np.array(ends))


@pytest.mark.parametrize("ends", [[0, 2], [2, 2], [1, 1, 2], [3, 2]])
def test_a_document_without_ids_is_refused(tmp_path, ends):
    with (
        pytest.raises(AssertionError, match="every document needs its EOS id"),
        writer(tmp_path / "s") as open_writer,
    ):
        open_writer.add(np.array([EOS, EOS]), np.array(ends))
    assert not (tmp_path / "s").exists()


def test_nothing_is_left_of_a_writer_that_failed(tmp_path):
    with pytest.raises(KeyError), writer(tmp_path / "new" / "s", shard_tokens=2) as open_writer:
        open_writer.add(np.array([1, EOS, 2, EOS, 3, EOS]), np.array([2, 4, 6]))
        raise KeyError
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ShardError, match="no documents"), writer(tmp_path / "mine"):
        pass
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_killed_writer_leaves_no_data_and_does_not_block_the_next(tmp_path):
    """Its files are there, without a manifest; the next writer removes them, and only them."""
    killed = writer(tmp_path / "s", shard_tokens=2)
    killed.add(np.array([1, EOS, 2, EOS, 3, EOS]), np.array([2, 4, 6]))
    (tmp_path / "s" / "tokenizer").mkdir()
    assert (tmp_path / "s" / "shard-00001.bin").exists()
    with pytest.raises(ShardError, match="did not finish"):
        open_source(tmp_path / "s")
    with pytest.raises(ShardError, match="another process"):
        writer(tmp_path / "s")
    killed._locked.release()  # as the kernel does for a killed process
    write(tmp_path / "s", [[9, EOS]])
    assert open_source(tmp_path / "s").num_tokens == 2
    names = {"manifest.json", *(f"shard-00000.{end}" for end in ENDINGS)}
    assert {path.name for path in (tmp_path / "s").iterdir()} == names


def test_other_peoples_files_are_never_touched(tmp_path):
    """Not even when they are named like shards."""
    for name in ("shard-00000.bin", "notes.txt"):
        directory = tmp_path / name.partition(".")[0]
        (directory / "tokenizer").mkdir(parents=True)
        (directory / name).write_text("mine")
        with pytest.raises(ShardError, match="is not empty"):
            writer(directory)
        assert (directory / name).read_text() == "mine" and (directory / "tokenizer").is_dir()


def test_output_directories_are_checked_in_advance(tmp_path):
    (tmp_path / "file").write_text("")
    assert output_problems(tmp_path / "new" / "deep") == []
    assert "not a directory" in output_problems(tmp_path / "file" / "s")[0]
    assert "already holds" in output_problems(write(tmp_path / "s"))[0]
    assert "not writable" in output_problems("/proc/shards")[0]


def test_reading_outside_of_a_source_is_an_error(tmp_path):
    source = open_source(write(tmp_path / "s"))
    for start in (-1, 8):
        with pytest.raises(IndexError):
            source.read(start, np.empty(2, np.int64))


def test_a_source_sent_to_another_process_opens_its_own_maps(tmp_path):
    source = open_source(write(tmp_path / "s"))
    source.shard(0)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.files._open == {} and copy.shard(0).tolist() == source.shard(0).tolist()
    assert copy.fingerprint == source.fingerprint


def test_the_fingerprint_changes_with_the_ids_and_with_the_tokenizer(tmp_path):
    prints = {open_source(write(tmp_path / "a", [[1, EOS]])).fingerprint}
    prints.add(open_source(write(tmp_path / "b", [[2, EOS]])).fingerprint)
    with writer(tmp_path / "c") as open_writer:
        open_writer.tokenizer = {**TOKENIZER, "fingerprint": "g"}
        open_writer.add(np.array([1, EOS]))
    prints.add(open_source(tmp_path / "c").fingerprint)
    assert len(prints) == 3


def test_few_shards_are_open_at_a_time_and_each_block_is_verified_once(tmp_path, monkeypatch):
    """Over all sources; a shard that was closed meanwhile keeps which blocks are verified."""
    verified = []
    monkeypatch.setattr(local, "MAX_OPEN", 3)
    monkeypatch.setattr(local, "MIN_OPEN", 3)
    monkeypatch.setattr(disk, "block_checksum", lambda b: verified.append(b) or block_checksum(b))
    names = ("a", "b")
    sources = [open_source(many_shards(tmp_path / name, 4, monkeypatch)) for name in names]
    for _ in range(3):
        for number in range(4):
            for source in sources:
                assert source.files.ids(number, 0, 2).tolist() == [number + 1, EOS]
                assert sum(len(each.files._open) for each in sources) <= 3
    assert len(verified) == 8
    assert not any(source.files.wants_prefetch for source in sources)
    copy = pickle.loads(pickle.dumps(sources[0]))  # another process has verified nothing
    assert copy.files.wants_prefetch and copy.ids(0, 0, 2).tolist() == [1, EOS]
    assert len(verified) == 9


def test_more_shards_can_be_read_than_files_may_be_open(tmp_path, monkeypatch):
    """At most 16 shards are open, with two files each, or an eighth of the limit on files."""
    source = open_source(many_shards(tmp_path / "s", 90, monkeypatch))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for limit in (used + 60, 400):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            for number in [*range(90), *range(90)]:
                source.files.prefetch([(number, 0, 2)])
                assert source.ids(number, 0, 2).tolist() == [number + 1, EOS]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert len(source.files._open) == max(16, limit // 8)
