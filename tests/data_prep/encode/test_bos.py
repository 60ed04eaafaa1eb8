"""`tokenize --bos`, and the notes about tokenizers whose template adds BOS or EOS."""

import json

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.finished_shards import nanogpt
from data_prep.tokenizer.load import load_tokenizer
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.conversions import convert, manifest_of
from tests.data_prep.finished_shards.corpus import texts, tokenize
from tests.data_prep.small_corpus import write_jsonl
from tests.data_prep.templates import BOS, with_template
from zerolm.common.errors import ShardError
from zerolm.config.settings import Settings
from zerolm.data.sources import open_sources, source_problems
from zerolm.shards.reader import open_source, verify


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer_directory):
    """Shards with and without BOS, of a tokenizer that adds it."""
    base = tmp_path_factory.mktemp("bos")
    tokenizer = with_template(tokenizer_directory, base / "tokenizer", True, False)
    file = write_jsonl(base / "a.jsonl", texts(60))
    tokenize([file], tokenizer, base / "plain")
    tokenize([file], tokenizer, base / "bos", "--bos", "--shard_tokens", 300)
    return base


def test_bos_begins_every_document_and_is_recorded(made) -> None:
    bos_id = load_tokenizer(str(made / "tokenizer")).bos_id
    assert documents_of(made / "bos") == [[bos_id, *ids] for ids in documents_of(made / "plain")]
    old, new = manifest_of(made / "plain"), manifest_of(made / "bos")
    assert "bos_id" not in old and new["bos_id"] == bos_id
    for key in ("text_bytes", "unknown_ids", "inner_eos_ids", "num_documents"):
        assert new[key] == old[key], key
    verify(made / "bos")


def test_a_document_without_bos_is_found_by_verify(made, tmp_path) -> None:
    path = made / "plain" / "manifest.json"
    before = path.read_text()
    manifest = {**json.loads(before), "bos_id": manifest_of(made / "bos")["bos_id"]}
    del manifest["digest"]
    path.write_text(json.dumps(manifest))
    try:
        with pytest.raises(ShardError, match="a document does not begin with id"):
            verify(made / "plain")
    finally:
        path.write_text(before)


def test_parts_and_converted_files_keep_their_bos(made, tmp_path) -> None:
    parts = ["--output", tmp_path / "parts", "--parts", "a=0.5,b=0.5"]
    assert main(list(map(str, ["split", made / "bos", *parts]))) == 0
    words = ["--from", "nanogpt", "--tokenizer", made / "tokenizer", "--output"]
    for name in ("bos", "plain"):
        flat = np.concatenate(documents_of(made / name)).astype("<u2")
        flat.tofile(tmp_path / f"{name}.bin")
        assert convert(tmp_path / f"{name}.bin", *words, tmp_path / name) == 0
    expected = manifest_of(made / "bos")
    for name in ("parts/a", "parts/b", "bos"):
        verify(tmp_path / name)
        assert manifest_of(tmp_path / name)["bos_id"] == expected["bos_id"]
    assert manifest_of(tmp_path / "bos")["text_bytes"] == expected["text_bytes"]
    assert "bos_id" not in manifest_of(tmp_path / "plain")


def test_flat_ids_are_split_where_bos_begins_them(made, tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(nanogpt, "PIECE_TOKENS", 37)
    documents = documents_of(made / "bos")
    flat = np.concatenate([ids[:-1] for ids in documents]).astype("<u2")
    for number, part in enumerate(np.split(flat, [1, 500])):
        part.tofile(tmp_path / f"{number}.bin")
    words = [*(tmp_path / f"{number}.bin" for number in range(3)), "--from", "nanogpt"]
    words += ["--tokenizer", made / "tokenizer", "--append_eos", "--output", tmp_path / "s"]
    assert convert(*words) == 2
    assert "Use --boundaries bos" in capfd.readouterr().err
    assert convert(*words, "--boundaries", "bos") == 0
    assert documents_of(tmp_path / "s") == documents
    verify(tmp_path / "s")


def test_sources_that_begin_differently_are_refused(made) -> None:
    settings = Settings(data=(str(made / "bos"),), val_data=(str(made / "plain"),))
    problems: list[str] = []
    sources = open_sources(settings, problems)
    problems += source_problems(sources, settings, None, None)
    assert any("plain/manifest.json: bos_id: None must equal" in line for line in problems)


@pytest.mark.parametrize(
    ("before", "after", "flags", "expected"),
    [
        (True, False, [], [f"would add {BOS} (id ", "documents do not begin with a BOS"]),
        (True, False, ["--bos"], [f"between documents: {BOS} (id "]),
        (False, False, ["--bos"], ["the tokenizer puts nothing before a text"]),
        (False, True, [], ["would add <|endoftext|> (id 0) after", "after a prompt for readers"]),
    ],
)
def test_what_is_between_documents_is_printed(
    tokenizer_directory, tmp_path, capfd, before, after, flags, expected
) -> None:
    tokenizer = with_template(tokenizer_directory, tmp_path / "tokenizer", before, after)
    tokenize([write_jsonl(tmp_path / "a.jsonl", texts(9))], tokenizer, tmp_path / "s", *flags)
    printed = capfd.readouterr().out
    assert all(line in printed for line in expected), printed
    assert ("note: " in printed) == (len(flags) == 0 or not before)


def test_bos_needs_a_token_that_is_not_eos(tokenizer_directory, tmp_path, capfd) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", texts(9))
    words = ["--input", file, "--tokenizer", tokenizer_directory, "--output", tmp_path / "s"]
    assert main(list(map(str, ["tokenize", *words, "--bos"]))) == 2
    assert "has no BOS token" in capfd.readouterr().err
    recipe = {
        "output": "out",
        "sources": {"a": {"input": ["a.jsonl"]}},
        "tokenize": {"tokenizer": str(tokenizer_directory), "bos": True},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert main(["run", str(tmp_path / "recipe.json")]) == 2
    assert "has no BOS token" in capfd.readouterr().err


def test_a_recipe_writes_bos(made, tmp_path) -> None:
    recipe = {
        "output": str(tmp_path / "out"),
        "sources": {"a": {"input": [str(made / "a.jsonl")]}},
        "tokenize": {"tokenizer": str(made / "tokenizer"), "bos": True},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert main(["run", str(tmp_path / "recipe.json"), "--workers", "1"]) == 0
    assert documents_of(tmp_path / "out/a/shards") == documents_of(made / "bos")
    assert open_source(tmp_path / "out/a/shards").bos_id == open_source(made / "bos").bos_id
