"""zerolm/origins.py: each document of a source leads back to its place in the input."""

import gzip
import json

import pytest

pytest.importorskip("tokenizers")

from data_prep.phases import LocalExecutor
from data_prep.sources import find_inputs
from data_prep.tokenization import TokenizeOptions, run_tokenization
from data_prep.tokenizer_training import Recipe, train_tokenizer
from data_prep.tokenizers import load_tokenizer
from zerolm.errors import ShardError
from zerolm.excerpts import load_decoder
from zerolm.origins import Origin, origin
from zerolm.shards import open_source, verify


def test_every_document_leads_back_to_its_line(tmp_path):
    """Read by hand: the line at that byte of that file has the text that the ids decode to."""
    texts = [f"document {number} " * (number % 7) for number in range(60)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:]).encode()))
    train_tokenizer(texts, Recipe(260), tmp_path / "tokenizer", progress=False)
    inputs, _ = find_inputs([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")], "text")
    run_tokenization(
        inputs,
        load_tokenizer(str(tmp_path / "tokenizer")),
        [tmp_path / "s"],
        TokenizeOptions(shard_tokens=500, unit_bytes=700),
        LocalExecutor(1),
        {},
    )
    source = open_source(tmp_path / "s")
    decode = load_decoder(tmp_path / "s" / "tokenizer")
    assert len(source.manifest["shards"]) > 3
    document, seen = 0, []
    for number in range(len(source.manifest["shards"])):
        start = 0
        for end in source.document_ends(number).tolist():
            place = origin(source, document)
            opened = gzip.open if place.file.endswith(".gz") else open
            with opened(place.file, "rb") as file:
                file.seek(place.position)
                text = json.loads(file.readline())["text"]
            assert place.unit == "byte"
            assert decode(source.shard(number)[start : end - 1].tolist()) == text
            seen.append(text)
            start, document = end, document + 1
    assert seen == [text for text in texts if text]
    with pytest.raises(IndexError):
        origin(source, document)
    assert origin(source, 0) == Origin(str(tmp_path / "a.jsonl"), len(lines[0]), "byte")
    verify(tmp_path / "s")
    (tmp_path / "s" / "inputs.json").unlink()
    with pytest.raises(ShardError, match=r"inputs\.json"):
        origin(source, 0)
    with pytest.raises(ShardError, match=r"inputs\.json"):
        verify(tmp_path / "s")
