"""`python -m data_prep tokenize`: nothing is lost or reordered, for any number of workers."""

import hashlib
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data_prep.encode import manifests as shard_manifests
from data_prep.encode.encode_documents import DocumentEncoder
from data_prep.encode.encode_units import EncodeUnits
from data_prep.encode.options import TokenizeOptions
from data_prep.encode.run import run_tokenization
from data_prep.files.documents import Document
from data_prep.read.discovery import find_inputs
from data_prep.tasks.phases import LocalExecutor
from data_prep.tokenizer.encoders import load_encoder
from data_prep.tokenizer.load import load_tokenizer
from tests.data_prep.encode.golden_corpus import write_golden_corpus, write_golden_tokenizer
from tests.data_prep.encode.tokenized import documents_of, files_of, run_here
from tests.data_prep.small_corpus import TEXTS, data_prep, write_jsonl
from zerolm.common.errors import ZerolmError
from zerolm.data.window_text import load_decoder
from zerolm.shards.writer import ShardWriter


def reference_documents(tokenizer_directory, texts) -> list[list[int]]:
    """Return the ids that transformers gives for each document, with an EOS id."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    return [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        + [tokenizer.eos_token_id]
        for text in texts
    ]


def held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"zerolm-val").digest()
    return int.from_bytes(digest, "big") / 2**64 < fraction


def test_ids_are_those_of_transformers_and_every_document_ends_once(tmp_path, tokenizer_directory):
    """Several inputs, flags with dashes, small shards; a spelled-out EOS is text."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("one text file\n")
    result = data_prep(
        *("tokenize", "--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.txt"),
        *("--tokenizer", tokenizer_directory, "--output", tmp_path / "s", "--shard-tokens=100"),
    )
    assert result.returncode == 0, result.stderr
    texts = [*TEXTS, "one text file\n"]
    assert documents_of(tmp_path / "s") == reference_documents(tokenizer_directory, texts)
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "s" / "tokenizer")
    assert manifest["vocab_size"] == len(tokenizer) == 300
    assert manifest["eos_id"] == tokenizer.eos_token_id
    assert len(manifest["shards"]) > 1 and manifest["inner_eos_ids"] == 0
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest["inputs"][1] == {
        "input": str(tmp_path / "b.txt"),
        "num_files": 1,
        "size_bytes": 14,
    }
    for words in ("8 documents", "tokens per document", "bytes per token", "seconds", "MB/s"):
        assert words in result.stdout
    assert data_prep("verify", tmp_path / "s").returncode == 0


def test_outputs_are_identical_for_any_number_of_workers(tmp_path, tokenizer_directory):
    """Every byte of every file is compared; there are enough units for all workers."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices(TEXTS, k=rng.randrange(20, 60))) for _ in range(900)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    assert (tmp_path / "a.jsonl").stat().st_size > 1 << 22  # two units
    outputs = []
    for workers in (1, 2, 4):
        train, val = tmp_path / f"train{workers}", tmp_path / f"val{workers}"
        result = data_prep(
            *("tokenize", "--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer_directory),
            *("--output", train, "--val_output", val, "--val_fraction", 0.1),
            *("--workers", workers, "--shard_tokens", "1e5"),
        )
        assert result.returncode == 0, result.stderr
        outputs.append((files_of(train), files_of(val)))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0][0]) > 8
    found = documents_of(tmp_path / "train1"), documents_of(tmp_path / "val1")
    for side, documents in enumerate(found):
        chosen = [text for text in texts if held_out(text, 0.1) == bool(side)]
        assert documents == reference_documents(tokenizer_directory, chosen)
    assert 40 < len(found[1]) < 150


def test_the_held_out_split_depends_on_the_text_only(tmp_path, tokenizer_directory):
    """Not on the order or on other documents; copies stay together; a larger fraction only adds."""
    texts = [f"text {number}" for number in range(300)]
    sides = {}
    for name, some, fraction in (
        ("all", texts, 0.2),
        ("shuffled", random.Random(2).sample(texts, 200) * 2, 0.2),
        ("more", texts, 0.4),
    ):
        _, val = run_here(some, tmp_path / name, tokenizer_directory, fraction)
        decode = load_decoder(tokenizer_directory)
        ids = [document[:-1] for document in documents_of(val.directory)]
        sides[name] = [decode(each) for each in ids]
    assert sides["all"] == [text for text in texts if held_out(text, 0.2)]
    assert set(sides["shuffled"]) <= set(sides["all"]) < set(sides["more"])
    assert all(sides["shuffled"].count(text) == 2 for text in set(sides["shuffled"]))


def test_any_text_survives_the_round_trip_through_shards(tokenizer_directory):
    """Byte-level BPE: decoding a document's ids gives its text, for any Unicode."""
    decode = load_decoder(tokenizer_directory)
    encoder = load_encoder(tokenizer_directory)
    documents_encoder = DocumentEncoder(0, 300, None)

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
    @settings(max_examples=60, deadline=None)
    def check(texts):
        read = [Document(text, 0, number) for number, text in enumerate(texts)]
        (batch,), counts = documents_encoder.encode(encoder, read)
        assert counts == (0, 0) and batch.text_bytes == sum(len(text.encode()) for text in texts)
        with tempfile.TemporaryDirectory() as name:
            with ShardWriter(
                Path(name) / "s",
                vocab_size=300,
                eos_id=0,
                tokenizer={"name": "bpe", "fingerprint": "f"},
                shard_tokens=50,
            ) as writer:
                writer.add(batch.token_ids, np.cumsum(batch.lengths))
            documents = documents_of(Path(name) / "s")
        assert all(document.index(0) == len(document) - 1 for document in documents)
        assert [decode(document[:-1]) for document in documents] == texts

    check()


GOLDEN = {  # SHA-256 of the shards laid end to end, as release 0.1.0 wrote them
    ("train", ".bin", 12): "6e4ec0dd5a361b8bf1b43929b22990bbf9a8882ffde5590f13d43664b3345d2b",
    ("train", ".idx", 12): "313ec9b8585f66447e7fc3e0aadb06de3a9401a87b671b7151ef428eb7d2b5b7",
    ("val", ".bin", 2): "e17cf1c521543bfd2aa86c255c8ed7097a5f92bb8ba1e88e9235fcab44c32ef3",
    ("val", ".idx", 2): "4296cf3f4bc3a4144dcb7d83347d11d0363077d48791f78d514753f1bfc8ca0c",
}


@pytest.mark.parametrize("unit_bytes", [None, 50_000])
def test_the_same_input_gives_the_shards_of_the_first_release(tmp_path, unit_bytes):
    corpus = write_golden_corpus(tmp_path / "corpus")
    tokenizer = load_tokenizer(str(write_golden_tokenizer(tmp_path / "tokenizer")))
    outputs = [tmp_path / "train", tmp_path / "val"]
    options = TokenizeOptions(val_fraction=0.1, shard_tokens=100_000, unit_bytes=unit_bytes)
    inputs, _ = find_inputs([str(corpus)], "text")
    run_tokenization(inputs, tokenizer, outputs, options, LocalExecutor(1), {})
    for (name, suffix, count), sha256 in GOLDEN.items():
        paths = sorted((tmp_path / name).glob(f"*{suffix}"))
        content = b"".join(path.read_bytes() for path in paths)
        assert len(paths) == count and hashlib.sha256(content).hexdigest() == sha256


def test_only_the_units_of_a_changed_input_are_encoded_again(
    tmp_path, tokenizer_directory, monkeypatch
):
    """After a failure at the very end, when every unit has a record."""
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {number}" for number in range(100)])
    files = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    encoded = []
    call = EncodeUnits.__call__
    monkeypatch.setattr(
        EncodeUnits, "__call__", lambda job, task: encoded.append(task) or call(job, task)
    )

    def tokenize(output):
        run_tokenization(
            find_inputs(files, "text")[0],
            load_tokenizer(str(tokenizer_directory)),
            [tmp_path / output],
            TokenizeOptions(encoder="tokenizers", unit_bytes=500),
            LocalExecutor(1),
            {"command": ["python", "-m", "data_prep", "tokenize"]},
        )

    with monkeypatch.context() as patch:
        patch.setattr(shard_manifests, "publish_all", lambda *_: (_ for _ in ()).throw(OSError(28)))
        with pytest.raises(ZerolmError, match="cannot be written"):
            tokenize("s")
    num_units = len(encoded)
    assert num_units > 3 and encoded == list(range(num_units))
    write_jsonl(tmp_path / "b.jsonl", [f"B {number}" for number in range(100)])
    encoded.clear()
    tokenize("s")
    assert encoded and len(encoded) * 3 == num_units
    tokenize("whole")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "whole")
