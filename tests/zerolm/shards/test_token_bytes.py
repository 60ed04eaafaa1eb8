"""The bytes of tokens add up to the bytes of the text, for every kind of tokenizer."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.tokenizer.encoders import load_encoder
from tests.texts import paragraphs, write_tokenizer
from zerolm.common.errors import ConfigError
from zerolm.shards.token_bytes import PROBES, exact_bytes, read_token_bytes
from zerolm.shards.tokenizer import without_marks

TEXTS = [*paragraphs()[:300], *PROBES, "", "x", "\n", "a\n\n\n   b", "naïve – 雪 🙂"]


def byte_level(**options) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(paragraphs()[:200], trainer)
    if not options["add_prefix_space"]:  # it would add a space after each of them
        tokenizer.add_tokens(["   ", "ïve – "])  # not spelled in the alphabet of bytes
    return tokenizer


def sentencepiece(prepended: bool) -> Tokenizer:
    """Make a tokenizer as transformers converts that of Llama 2: byte fallback, a dummy space."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), "▁"]
    names += [*map(chr, range(33, 127)), "▁t", "▁th", "▁the", "he", "▁▁", "é"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("▁", "▁")]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    replace = normalizers.Replace(" ", "▁")
    prepend = [normalizers.Prepend("▁")] if prepended else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, replace])
    strip = [decoders.Strip(" ", 1, 0)] if prepended else []
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*fallback, *strip])
    tokenizer.add_special_tokens(names[:3])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), None
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(paragraphs()[:200], trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory):
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def encoded(directory, texts):
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.encode_special_tokens = True
    return [np.array(backend.encode(text, add_special_tokens=False).ids, int) for text in texts]


@pytest.mark.parametrize(
    ("make", "adds_space"),
    [
        (lambda: byte_level(add_prefix_space=False), False),
        (lambda: byte_level(add_prefix_space=True), True),
        (lambda: sentencepiece(prepended=True), True),
        (lambda: sentencepiece(prepended=False), False),
    ],
    ids=["byte-level", "byte-level-prefix", "sentencepiece", "sentencepiece-no-prefix"],
)
def test_the_bytes_of_a_document_are_those_of_its_text(tmp_path, make, adds_space) -> None:
    directory = save(make(), tmp_path)
    table = read_token_bytes(directory, 1000)
    assert table.notice == "" and len(table.rows()) == 1 + adds_space
    assert len(table.counts) == 1000 and not table.counts[600:].any()
    for text, ids in zip(TEXTS, encoded(directory, TEXTS), strict=True):
        assert table.of(ids) == len(text.encode()), text
    content = json.loads((directory / "tokenizer.json").read_text())
    special = [token["id"] for token in content["added_tokens"] if token["special"]]
    assert special and not table.counts[special].any()


def test_our_own_tokenizer_counts_what_was_tokenized(tmp_path) -> None:
    directory = write_tokenizer(tmp_path / "own")
    table = read_token_bytes(directory, 512)
    found = [table.of(ids) for ids in load_encoder(directory).encode(TEXTS).ids]
    assert found == [len(text.encode()) for text in TEXTS] and table.notice == ""


def test_the_bytes_of_tiktoken_are_those_of_its_tokens(tmp_path) -> None:
    import base64

    import tiktoken

    ranks = {bytes([number]): number for number in range(256)} | {b"th": 256, b"the": 257}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (tmp_path / "ranks.tiktoken").write_bytes(b"".join(lines))
    names = {"name": "toy", "pat_str": r"\S+|\s+", "special_tokens": {"<|endoftext|>": 258}}
    (tmp_path / "tiktoken.json").write_text(json.dumps(names))
    encoding = tiktoken.Encoding(mergeable_ranks=ranks, **names)
    table = read_token_bytes(tmp_path, 259)
    assert table.counts[258] == 0 and table.notice == ""
    for text in TEXTS:
        ids = np.array(encoding.encode(text, disallowed_special=()), int)
        assert table.of(ids) == len(text.encode())


def test_a_tokenizer_that_changes_text_is_named_with_what_is_counted(tmp_path) -> None:
    normalizing = byte_level(add_prefix_space=False)
    normalizing.normalizer = normalizers.NFC()
    table = read_token_bytes(save(normalizing, tmp_path / "nfc"), 500)
    assert table.notice.startswith("its normalizer changes texts")
    (ids,) = encoded(tmp_path / "nfc", ["e\u0301x"])
    assert table.of(ids) == len("éx".encode())

    table = read_token_bytes(save(word_piece(), tmp_path / "words"), 500)
    assert "does not reproduce the text" in table.notice
    text = "The value of the expression"  # WordPiece decodes it in lower case
    (ids,) = encoded(tmp_path / "words", [text])
    assert table.of(ids) == len(text)


def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json: no such file"):
        read_token_bytes(tmp_path, 10)
    for content, why in (
        ("{", "cannot be read"),
        ("", "cannot be read"),
        ('{"model": {"type": "BPE"}}', "cannot be read"),
        (Tokenizer(models.BPE()).to_str(), "with its decoder, single tokens"),
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=why):
            read_token_bytes(tmp_path, 10)
    empty = Tokenizer(models.BPE())
    empty.pre_tokenizer, empty.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    with pytest.raises(ConfigError, match="the vocabulary is empty"):
        read_token_bytes(save(empty, tmp_path), 10)


def test_bytes_are_exact_without_keys_that_may_be_missing_and_with_a_mark(tmp_path):
    byte_level(add_prefix_space=True).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    few = {key: content[key] for key in ("model", "pre_tokenizer", "decoder")}
    few["pre_tokenizer"]["add_prefix_space"] = False
    (tmp_path / "tokenizer.json").write_text("\ufeff" + json.dumps(few))
    assert exact_bytes(tmp_path, 400) is not None
    del few["decoder"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(few))
    assert exact_bytes(tmp_path, 400) is None


def test_only_files_with_a_mark_are_copied(tmp_path):
    (tmp_path / "tokenizer.json").write_text("\ufeff{}")
    (tmp_path / "model.safetensors").write_bytes(b"large")
    copy = without_marks(tmp_path)
    assert (copy / "tokenizer.json").read_bytes() == b"{}"
    assert (copy / "model.safetensors").is_symlink()
    assert (copy / "model.safetensors").read_bytes() == b"large"
