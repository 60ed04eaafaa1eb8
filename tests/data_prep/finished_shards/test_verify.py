"""`zerolm data verify`, and each opening: a manifest that was changed is refused."""

import hashlib
import json
import shutil

import pytest

from data_prep.__main__ import main
from data_prep.read.stage_files import read_stage
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.conversions import write_megatron
from tests.data_prep.finished_shards.corpus import write_corpus
from tests.data_prep.stage_cases import write_stage
from tests.manifests import write_shard_manifest
from zerolm.common.errors import ConfigError, ShardError
from zerolm.shards.reader import open_source, verify

EDITS = {
    "text_bytes": lambda made: made.update(text_bytes=made["text_bytes"] + 100),
    "inner_eos_ids": lambda made: made.update(inner_eos_ids=7),
    "unknown_ids": lambda made: made.update(unknown_ids=7),
    "vocab_size": lambda made: made.update(vocab_size=made["vocab_size"] + 1),
    "fingerprint": lambda made: made["tokenizer"].update(fingerprint="0" * 64),
    "tokenizer name": lambda made: made["tokenizer"].update(name="another"),
    "tokenizer files": lambda made: made["tokenizer"].pop("files"),
    "skipped": lambda made: made["skipped_documents"].update(empty=3),
    "inputs": lambda made: made["inputs"].clear(),
    "text_field": lambda made: made.update(text_field="body"),
    "digest": lambda made: made.update(digest="0" * 64),
    "null digest": lambda made: made.update(digest=None),
    "a further key": lambda made: made.update(note=1),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer_directory):
    return write_corpus(tmp_path_factory.mktemp("verified"), tokenizer_directory)[0]


@pytest.fixture
def shards(corpus, tmp_path):
    return shutil.copytree(corpus, tmp_path / "shards")


def manifest_of(directory) -> dict:
    return json.loads((directory / "manifest.json").read_text())


def write(directory, manifest) -> None:
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_each_edit_of_a_manifest_is_refused_by_verify_and_by_a_run(shards, edit, capsys):
    manifest = manifest_of(shards)
    edit(manifest)
    write(shards, manifest)
    assert main(["verify", str(shards)]) == 2
    assert "manifest.json: digest: " in capsys.readouterr().err
    for where in (shards, f"file://{shards}"):
        with pytest.raises(ShardError, match=r"it was changed\. Restore it from a copy, or remove"):
            open_source(where)


def test_the_digest_is_what_the_format_says_and_does_not_depend_on_the_layout(shards):
    manifest = manifest_of(shards)
    stated = manifest.pop("digest")
    text = json.dumps(manifest, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == stated
    write(shards, dict(reversed({**manifest, "digest": stated}.items())))
    verify(shards)


def test_a_manifest_without_a_digest_is_noted_and_counted_again(shards, capsys):
    manifest = manifest_of(shards)
    del manifest["digest"]
    write(shards, manifest)
    assert main(["verify", str(shards)]) == 0
    shown = capsys.readouterr()
    assert "manifest.json has no digest" in shown.err and ": complete." in shown.out


@pytest.mark.parametrize("key", ["text_bytes", "inner_eos_ids"])
@pytest.mark.parametrize("has_digest", [True, False])
def test_what_a_manifest_says_of_its_tokens_is_counted_again(shards, key, has_digest):
    manifest = manifest_of(shards)
    manifest[key] += 1
    if has_digest:
        write_shard_manifest(shards, manifest)
    else:
        del manifest["digest"]
        write(shards, manifest)
    wrong, right = manifest[key], manifest[key] - 1
    with pytest.raises(ShardError, match=rf"{key}: {wrong}, but the tokens have {right}"):
        verify(shards)


def test_every_command_that_writes_shards_writes_a_digest(corpus, tmp_path, capsys):
    parts, back = str(tmp_path / "parts"), str(tmp_path / "back")
    given = str(write_megatron(tmp_path / "m", documents_of(corpus)))
    commands = [
        ["split", str(corpus), "--parts", "train=0.5,test=0.5", "--output", parts],
        ["convert", "--from", "megatron", given, "--tokenizer", f"{corpus}/tokenizer",
         "--output", back],
        ["pack", back, "--seq_len", "32"],
    ]  # fmt: skip
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err
    written = [path for path in tmp_path.rglob("*.json") if "digest" in path.read_text()]
    names = {path.relative_to(tmp_path).as_posix() for path in written}
    manifests = [f"{each}/manifest.json" for each in ("parts/train", "parts/test", "back")]
    assert names == {*manifests, "back/packing-32.json"}
    for each in manifests:
        verify(tmp_path / each.removesuffix("/manifest.json"))


def test_a_changed_packing_is_refused_with_the_command_that_makes_it_again(shards, capsys):
    assert main(["pack", str(shards), "--seq_len", "32"]) == 0
    path = shards / "packing-32.json"
    path.write_text(path.read_text().replace('"num_padding": ', '"num_padding": 1'))
    assert main(["verify", str(shards)]) == 2
    assert f"Run: zerolm data pack {shards} --seq_len 32" in capsys.readouterr().err
    assert main(["pack", str(shards), "--seq_len", "32"]) == 0
    assert main(["verify", str(shards)]) == 0


def test_a_changed_stage_is_refused(tmp_path):
    stage = write_stage(tmp_path / "clean", ["one text", "another"], 2)
    path = stage / "stage.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "documents_out": 5}))
    with pytest.raises(ConfigError, match=r"stage\.json: digest: .* Run the stage again"):
        read_stage(stage)
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    assert read_stage(stage).paths
