"""Invalid manifests of token shards are refused, and every contradiction in one is named."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.manifests import write_shard_manifest
from tests.zerolm.shards.small_shards import many_shards, write
from zerolm.common.errors import ShardError
from zerolm.shards import manifest
from zerolm.shards.reader import open_source


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "format is not"),
        ({"version": 2}, "version 2, but this release reads version 1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"vocab_size": "1000"}, 'vocab_size: "1000" must be a whole number'),
        ({"vocab_size": 70_000}, "uint16 cannot hold vocab_size 70000"),
        ({"eos_id": 1000}, "eos_id 1000 is not below vocab_size 1000"),
        ({"num_tokens": 8}, "num_tokens is 8, but the shards add up to 9"),
        ({"num_documents": -1}, "num_documents: -1 must be a whole number, not negative"),
        ({"tokenizer": {}}, "tokenizer.fingerprint: missing"),
        ({"shards": []}, "shards is empty"),
        ({"shards": [{}]}, r"shards\[0\].file: missing"),
    ],
    ids=str,
)
def test_an_invalid_manifest_is_refused(tmp_path, change, named):
    directory = write(tmp_path / "s")
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(ShardError, match=named):
        open_source(directory)


@pytest.mark.parametrize("number", [1 << 70, -(1 << 64), 7])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_digest_holds_for_integers_of_any_size_and_after_a_mark(tmp_path, number, mark):
    path = write(tmp_path / "s") / "manifest.json"
    write_shard_manifest(path.parent, {**json.loads(path.read_text()), "notes": {"seed": number}})
    path.write_text(mark + path.read_text())
    open_source(path.parent)
    path.write_text(path.read_text().replace(f'"seed": {number}', '"seed": 5'))
    with pytest.raises(ShardError, match="digest: "):
        open_source(path.parent)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    directory = write(tmp_path / "s")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["shards"][0]["file"] = "../other/shard-00000.bin"
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"shards\[0\]\.file: .* must be a plain name"):
        open_source(directory)


@pytest.mark.parametrize(
    "name", ["../up.json", "/etc/up.json", "a/../../up.json", "", "a//b", "..\\up.json", None, 7]
)
def test_a_tokenizer_cannot_write_elsewhere(tmp_path, name):
    """Anybody may have written a store's manifest, and its tokenizer is copied to this machine."""
    directory = write(tmp_path / "store" / "s")
    (directory / "up.json").write_text("{}")
    entry = {"file": name, "size_bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["tokenizer"]["files"] = [entry]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    for where in (directory, f"file://{directory}"):
        with pytest.raises(ShardError, match=r"tokenizer\.files\[0\]\.file: "):
            open_source(where)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"input_files": "x"}, "input_files: .* must be an object"),
        ({"input_files": {"file": "../x", "size_bytes": 1, "sha256": "0"}}, "must be a plain name"),
        ({"tokenizer": {"fingerprint": "f", "files": "abc"}}, 'tokenizer.files: "abc"'),
        ({"tokenizer": {"fingerprint": "f", "files": ["a"]}}, r"files\[0\]: .* must be an object"),
        (
            {"tokenizer": {"fingerprint": "f", "files": [{"file": "sub dir/a.json"}]}},
            r"files\[0\].sha256: missing",
        ),
    ],
)
def test_entries_of_other_files_are_checked(tmp_path, keys, named):
    directory = write(tmp_path / "s")
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, **keys}))
    with pytest.raises(ShardError, match=named):
        open_source(directory)


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("size_bytes", "size_bytes .* is not 9 tokens of uint16"),
        ("index_size_bytes", "index_size_bytes .* is not . documents of 8 bytes"),
        ("sums_size_bytes", "sums_size_bytes .* is not "),
        ("num_tokens", "num_tokens is .*, but the shards add up to"),
        ("num_documents", "num_documents is .*, but the shards add up to"),
    ],
)
def test_a_number_of_a_manifest_that_contradicts_another_is_named(tmp_path, key, named, by):
    directory = write(tmp_path / "s")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["shards"][0][key] += by
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=named):
        open_source(directory)


@pytest.mark.parametrize("empty", ["num_tokens", "num_documents"])
def test_a_shard_without_documents_or_without_tokens_is_refused(tmp_path, empty):
    """Although its other numbers agree with that."""
    directory = write(tmp_path / "s")
    manifest = json.loads((directory / "manifest.json").read_text())
    keys = {
        "num_tokens": ("size_bytes", "sums_size_bytes", "fine_size_bytes"),
        "num_documents": ("index_size_bytes",),
    }
    manifest[empty] = 0
    manifest["shards"][0] |= dict.fromkeys((empty, *keys[empty]), 0)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match="has no documents or no tokens") as refusal:
        open_source(directory)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_sidecar_of_one_shard_alone_is_checked_like_those_of_all(tmp_path, monkeypatch, number):
    directory = many_shards(tmp_path / "s", 2, monkeypatch)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["shards"][number] |= {
        "origins": "../up", "origins_size_bytes": 8, "origins_sha256": "0",
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"origins: .*\.\./up.* must be a plain name"):
        open_source(directory)


def test_a_text_file_is_refused_with_the_command_that_tokenizes_it(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(ShardError, match=rf"--output {tmp_path}/corpus-shards$"):
        open_source(tmp_path / "corpus.jsonl")


def test_a_manifest_that_cannot_be_read_is_refused_with_the_reason(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    directory = write(tmp_path / "s")
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ShardError, match=r"manifest\.json: cannot be read .*Input/output error"):
        manifest.read_manifest(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_manifest_that_is_not_json_is_refused(tmp_path, content):
    directory = write(tmp_path / "s")
    (directory / "manifest.json").write_text(content)
    with pytest.raises(ShardError, match=r"manifest\.json"):
        open_source(directory)


@pytest.mark.parametrize("key", ["sums_size_bytes", "fine_sha256"])
def test_a_file_without_its_size_or_digest_is_refused(tmp_path, key):
    directory = write(tmp_path / "s")
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["shards"][0][key]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=rf"shards\[0\]\.{key}: missing"):
        open_source(directory)
