"""The origin of each document of a source is its place in the input."""

import gzip
import json

import pytest

pytest.importorskip("tokenizers")

from data_prep.encode.options import TokenizeOptions
from data_prep.encode.run import run_tokenization
from data_prep.read.discovery import find_inputs
from data_prep.tasks.phases import LocalExecutor
from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from data_prep.tokenizer.load import load_tokenizer
from zerolm.common.errors import ShardError
from zerolm.data.window_text import load_decoder
from zerolm.shards.origins import Origin, find_origin
from zerolm.shards.reader import open_source, verify


def test_the_origin_of_every_document_is_its_line(tmp_path):
    """Without the project: the line at that byte of that file has the decoded text."""
    texts = [f"document {number} " * (number % 7) for number in range(60)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:]).encode()))
    train_bpe(texts, BpeOptions(260), tmp_path / "tokenizer", progress=False)
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
            place = find_origin(source, document)
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
        find_origin(source, document)
    assert find_origin(source, 0) == Origin(str(tmp_path / "a.jsonl"), len(lines[0]), "byte")
    verify(tmp_path / "s")
    origins = tmp_path / "s" / "shard-00000.org"
    intact = origins.read_bytes()
    origins.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    with pytest.raises(ShardError, match=r"shard-00000\.org: its SHA-256 differs"):
        find_origin(open_source(tmp_path / "s"), 0)
    origins.write_bytes(intact)
    (tmp_path / "s" / "inputs.json").unlink()
    with pytest.raises(ShardError, match=r"inputs\.json"):
        find_origin(open_source(tmp_path / "s"), 0)
    with pytest.raises(ShardError, match=r"inputs\.json"):
        verify(tmp_path / "s")
