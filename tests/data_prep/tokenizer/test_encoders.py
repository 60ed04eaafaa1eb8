"""`Encoder` and `choose_backend`: with every backend, the ids are those of the library
`tokenizers`."""

import json
import random
import unicodedata

import pytest
import tokenizers

from data_prep.tokenizer import backends, encoder_choice, encoders, equivalence, fuzz_texts
from data_prep.tokenizer.backends import BackendUnavailable, open_backend
from data_prep.tokenizer.encoder_choice import EncoderChoice, choose_backend
from data_prep.tokenizer.encoders import EncoderError, load_encoder
from data_prep.tokenizer.equivalence import EquivalenceResult, check_equivalence
from tests.data_prep.tokenizer.tokenizer_definitions import DEFINITIONS, texts, write_definition
from zerolm.common.errors import ConfigError

ODD = [
    "It spells <|endoftext|> out, <|pad|> <s> [UNK] <unk> function return  <tool>  x",
    "",
    " ",
    "\x00\x01\x7f\r\n\r\n",
    "don't DON'T we'Ll I'ſ 12345 ½ １２",
    "e\u0301\u0316\u0345 \u1df7\u1dd5 가\u1161 👩‍👩‍👧‍👦",
    "a" * 5000,
    "\u0378\U000e0fff\U0010ffff",  # not assigned
]
ALL_OF_UNICODE = ((0, 0x110000),)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("copies")
    return {name: write_definition(name, directory) for name in DEFINITIONS}


def library_ids(directory, documents) -> list[list[int]]:
    """Return the ids of each document as `tokenizers` gives them."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in documents]


def lists(encoded) -> list[list[int]]:
    return [ids.tolist() for ids in encoded.ids]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_backend_that_supports_a_tokenizer_gives_the_ids_of_the_reference(copies, name):
    documents = [*texts(), *ODD[:5]]
    right = library_ids(copies[name], documents)
    assert lists(load_encoder(copies[name]).encode(documents)) == right
    try:
        encode = open_backend("gigatoken", copies[name])
    except BackendUnavailable:
        assert name not in ("gpt2", "llama3")
        return
    actual = encode([text for text in documents if "ſ" not in text])
    expected = [ids for text, ids in zip(documents, right, strict=True) if "ſ" not in text]
    assert [ids.tolist() for ids in actual] == expected


def test_documents_outside_the_proven_code_points_are_encoded_by_the_reference(copies):
    rng = random.Random(1)
    choice = EncoderChoice("gigatoken", "tokenizers", "x", proven=((0, 128), (0xC0, 0x180)))
    encoder = load_encoder(copies["llama3"], choice)
    documents = [rng.choice(["plain", "žluť", "日本", "mixed ž 日", ""]) for _ in range(200)]
    encoded = encoder.encode(documents)
    assert lists(encoded) == library_ids(copies["llama3"], documents)
    outside = [text for text in documents if "日" in text]
    counts = encoder.counts
    assert counts["tokenizers.documents"] == len(outside)
    assert counts["tokenizers.bytes"] == sum(len(text.encode()) for text in outside)
    assert counts["gigatoken.documents"] == 200 - len(outside)
    assert counts["gigatoken.bytes"] + counts["tokenizers.bytes"] == sum(
        len(text.encode()) for text in documents
    )


def test_a_sample_is_checked_and_a_difference_stops(copies, monkeypatch):
    monkeypatch.setattr(encoders, "CHECK_ONE_IN", 3)
    choice = EncoderChoice("gigatoken", "tokenizers", "0", ALL_OF_UNICODE)
    encoder = load_encoder(copies["gpt2"], choice)
    documents = [f"document {number}: " + "word " * (number % 50) ** 2 * 3 for number in range(60)]
    assert lists(encoder.encode(documents)) == library_ids(copies["gpt2"], documents)
    checked = encoder.counts["checked.documents"]
    assert 8 < checked < 40
    again = load_encoder(copies["gpt2"], choice)
    for document in documents[::-1]:  # one by one: the sample is a function of the document
        again.encode([document])
    assert again.counts == encoder.counts

    fast = encoder._fast
    encoder.__dict__["_fast"] = lambda given: fast([text.replace("17", "18") for text in given])
    monkeypatch.setattr(encoders, "CHECK_ONE_IN", 1)
    with pytest.raises(
        EncoderError, match=r"gigatoken 0.*'document 17: .*--encoder tokenizers"
    ) as e:
        encoder.encode(documents)
    assert e.value.document == 17


def test_equivalence_results_are_cached_and_used_for_small_inputs_too(copies, cache, monkeypatch):
    assert choose_backend(copies["gpt2"], input_bytes=1000).backend == "tokenizers"
    checks = []
    monkeypatch.setattr(
        encoder_choice,
        "check_equivalence",
        lambda *given: checks.append(given) or EquivalenceResult(None, ((0, 200),)),
    )
    choice = choose_backend(copies["gpt2"], input_bytes=1 << 30)
    assert choice.backend == "gigatoken" and choice.proven == ((0, 200),)
    assert choose_backend(copies["gpt2"], input_bytes=1000) == choice and len(checks) == 1
    assert choose_backend(copies["llama3"], input_bytes=1000).backend == "tokenizers"
    (cached,) = cache.rglob("*.json")
    cached.write_text("{")
    assert choose_backend(copies["gpt2"]) == choice and len(checks) == 2
    assert json.loads(cached.read_text())["proven"] == [[0, 200]]


def test_a_backend_that_is_not_equal_is_not_chosen(copies, monkeypatch):
    monkeypatch.setattr(
        encoder_choice,
        "check_equivalence",
        lambda *given: EquivalenceResult("gives [1] for 'a' instead of [2]"),
    )
    choice = choose_backend(copies["gpt2"])
    assert choice.backend == choice.reference == "tokenizers"
    assert choice.note == "gigatoken gives [1] for 'a' instead of [2]"
    with pytest.raises(
        ConfigError, match=r"--encoder gigatoken: cannot be used .*gives .1. for 'a'"
    ):
        choose_backend(copies["gpt2"], "gigatoken")
    with pytest.raises(ConfigError, match=r"gigatok: is not one of auto.*Did you mean"):
        choose_backend(copies["gpt2"], "gigatok")


def test_without_the_optional_packages_the_reference_encodes(copies, monkeypatch):
    monkeypatch.setattr(
        "data_prep.tokenizer.backends.installed_version",
        lambda name: "1" if name == "tokenizers" else None,
    )
    choice = choose_backend(copies["gpt2"])
    assert choice.backend == "tokenizers"
    assert "bash launch/setup.sh fast-tokenizers" in choice.note
    with pytest.raises(ConfigError, match="fast-tokenizers"):
        choose_backend(copies["gpt2"], "gigatoken")


LOADING = "gigatoken does not support this tokenizer (panicked at x)"


class Panic(BaseException):
    """Like a Rust panic, which is not an `Exception`."""


def failing_at(word, encode):
    def encode_or_panic(given):
        texts = [text if isinstance(text, str) else text.decode() for text in given]
        if any(word in text for text in texts):
            raise Panic(f"panicked at {word}")
        return encode(given)

    return encode_or_panic


def test_documents_on_which_a_backend_panics_are_encoded_by_the_reference(copies, monkeypatch):
    choice = EncoderChoice("gigatoken", "tokenizers", "0", ALL_OF_UNICODE)
    encoder = load_encoder(copies["gpt2"], choice)
    encoder.__dict__["_fast"] = backends._raise_backend_failed(failing_at("bad", encoder._fast))
    documents = [f"{'bad' if number % 10 == 3 else 'good'} {number} ž" for number in range(50)]
    right = library_ids(copies["gpt2"], documents)
    assert lists(encoder.encode(documents)) == right
    assert lists(encoder.encode(documents[4:13])) == right[4:13]
    counts = encoder.counts
    assert counts["failed.documents"] == counts["tokenizers.documents"] == 5
    assert counts["gigatoken.documents"] == 45 + 9
    monkeypatch.setattr(encoders, "MAX_FAILED_DOCUMENTS", 5)
    assert lists(encoder.encode(documents)) == right  # now by the library only
    assert encoder.counts["tokenizers.documents"] == 5 + 50
    reference = failing_at("bad 43", encoder._reference)
    encoder.__dict__["_reference"] = backends._raise_backend_failed(reference)
    with pytest.raises(
        EncoderError, match=r"tokenizers: fails on a document .panicked at bad 43"
    ) as e:
        encoder.encode(documents)
    assert e.value.document == 43


def test_a_backend_that_panics_in_the_check_is_not_chosen(copies, monkeypatch):
    right = open_backend("tokenizers", copies["gpt2"])
    for word, note in (("{", "gigatoken gives Panic for '{' instead of ["), (None, LOADING)):
        failing = failing_at(word or "x", right)
        monkeypatch.setattr(
            backends, "_open_gigatoken", lambda _, f=failing, w=word: f if w else f(["x"])
        )
        backends._open.cache_clear()
        choice = choose_backend(copies["gpt2"])
        assert choice.backend == "tokenizers" and note in choice.note
    backends._open.cache_clear()


def test_unigram_and_wordpiece_fall_back(copies):
    for name in ("unigram", "wordpiece"):
        choice = choose_backend(copies[name])
        assert choice.backend == "tokenizers" and "does not support" in choice.note


def random_unicode(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        "".join(
            chr(rng.randrange(*rng.choice(((0, 128), (128, 0xD800), (0x10000, 0x20000)))))
            for _ in range(rng.randint(1, 40))
        )
        for _ in range(3000)
    ]


def test_a_backend_that_passes_the_real_check_encodes(copies, monkeypatch):
    """With a tenth of the code points, to be quick; the soak test tries all of them."""
    few = [
        number for number in fuzz_texts.likely_code_points() if number < 0x250 or number % 10 == 0
    ]
    monkeypatch.setattr(fuzz_texts, "likely_code_points", lambda: few)
    monkeypatch.setattr(equivalence, "RANDOM_TEXTS", 1000)
    choice = choose_backend(copies["llama3"])
    assert choice.backend == "gigatoken"
    proven = {number for start, stop in choice.proven for number in range(start, stop)}
    assert {*range(128), 0xE9, 0x4E2A, 0x1F5FE} <= proven
    assert not {number for number in proven if unicodedata.category(chr(number)) == "Cs"}
    encoder = load_encoder(copies["llama3"], choice)
    documents = [*texts(), *ODD, *random_unicode(3)]
    assert lists(encoder.encode(documents)) == library_ids(copies["llama3"], documents)


@pytest.mark.soak
@pytest.mark.parametrize("name", DEFINITIONS)
def test_proven_code_points_hold_for_random_unicode(copies, name):
    try:
        candidate = open_backend("gigatoken", copies[name])
    except BackendUnavailable:
        pytest.skip("does not support this tokenizer")
    content = json.loads((copies[name] / "tokenizer.json").read_text())
    vocabulary = [each if isinstance(each, str) else each[0] for each in content["model"]["vocab"]]
    result = check_equivalence(open_backend("tokenizers", copies[name]), candidate, vocabulary)
    if result.refused:
        pytest.skip(result.refused)
    choice = EncoderChoice("gigatoken", "tokenizers", "x", result.proven)
    for seed in range(10):
        documents = random_unicode(100 + seed)
        encoded = load_encoder(copies[name], choice).encode(documents)
        assert lists(encoded) == library_ids(copies[name], documents)
