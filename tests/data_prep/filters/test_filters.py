"""Verdicts against datatrove's own classes, which split words by spaCy as they come."""

import random
import sysconfig
from pathlib import Path

import pytest

from data_prep.fast_words import FIRST_WORD, FastWords, import_spacy
from data_prep.filters import DATATROVE, build, filter_problems
from zerolm.errors import ConfigError, ZerolmError

pytest.importorskip("datatrove")
try:
    import_spacy()
except ImportError:
    pytest.skip("no spaCy here", allow_module_level=True)

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import get_filter_result
from datatrove.utils.text import split_into_parts
from datatrove.utils.typeshelper import Languages
from datatrove.utils.word_tokenizers import load_word_tokenizer

COMPARED = ("gopher_quality", "gopher_repetition", "c4_quality", "c4_paragraphs", "fineweb_quality")
ADVERSARIAL = [
    "", " ", "\n\n", "\u00a0\u2028\u3000", "\x1c\x1d\x1e\x1f", "...", "# # # #", "• \n- \n• x",
    "IS_ALPHA", "a IS_ALPHA b " * 30, "x" * 5000, "word " * 400, "the be to of and that " * 20,
    "e\u0301 \u200b\u200d zero\u200bwidth " * 20, "日本語のテキスト。" * 40,
    "don't can't won't " * 30,
    "https://example.com/a?b=c " * 30, "{ javascript lorem ipsum }", "one. two! three? four.\n" * 8,
    "line\n" * 100, "\r\n".join(["A sentence with an end."] * 12),
    "🙂 :-) :( ( : ) a.m. p.m. U.S. " * 9,
]  # fmt: skip


def real_documents(number: int, characters: int) -> list[str]:
    """Cut the standard library into documents."""
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        documents += [text[at : at + characters] for at in range(0, len(text), 9 * characters)]
        if len(documents) >= number:
            break
    assert len(documents) >= number
    return documents[:number]


def odd_documents(number: int) -> list[str]:
    """Special cases of spaCy and what they are made of, between every kind of space or none."""
    pieces = list(load_word_tokenizer("en").tokenizer.tokenizer.rules)
    pieces += [*"():;-'.*^_<>=\"8oOpPdD3", "word", "don", "$5.00", "e.g.", "C++", "(word)", "…"]
    spaces = ["", "", " ", " ", " ", "  ", "\n", "\t", "\u00a0", "\u2028"]
    chance = random.Random(5)
    return [
        "".join(chance.choice(pieces) + chance.choice(spaces) for _ in range(chance.randint(1, 60)))
        for _ in range(number)
    ]


@pytest.fixture
def slow_words():
    """Give datatrove its own words back."""
    tokenizer = load_word_tokenizer(Languages.english)  # the name decides which: "en" is another
    tokenizer.tokenizer.vocab[FIRST_WORD]  # datatrove's words of it are undefined otherwise
    vars(tokenizer).pop("word_tokenize", None)
    split_into_parts.cache_clear()
    yield tokenizer
    vars(tokenizer).pop("word_tokenize", None)
    split_into_parts.cache_clear()


def verdict_of_datatrove(name: str, text: str) -> tuple[bool, str | None, str]:
    """Return (kept, reason, text); the reason is ours where datatrove divides by zero."""
    import importlib

    module, attribute = DATATROVE[name].split(":")
    step = getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), attribute)()
    document = Document(text=text, id="0")
    try:
        kept, reason = get_filter_result(step.filter(document))
    except ZeroDivisionError:
        kept, reason = False, "nothing_to_count"
    return bool(kept), reason, document.text if kept else text


@pytest.mark.parametrize(
    ("num_odd", "num_real"), [(60, 150), pytest.param(1000, 2500, marks=pytest.mark.soak)]
)
def test_verdicts_and_reasons_are_those_of_datatrove(slow_words, num_odd, num_real):
    documents = ADVERSARIAL + odd_documents(num_odd) + real_documents(num_real, 500)
    expected = {name: [verdict_of_datatrove(name, text) for text in documents] for name in COMPARED}
    seen = set()
    for name in COMPARED:
        filters = build([{"filter": name}])
        for text, (kept, reason, changed) in zip(documents, expected[name], strict=True):
            verdict = filters.judge(text, "0", {})
            wanted = "" if kept else f"{name}.{reason}"
            assert (verdict.kept, verdict.reason, verdict.text) == (kept, wanted, changed), text
            seen.add(wanted)
    assert isinstance(slow_words.word_tokenize, FastWords)
    assert len(seen) > 15  # of the verdicts that there are


def test_words_are_those_of_datatrove(slow_words):
    fast = FastWords(slow_words.tokenizer, slow_words.word_tokenize)
    for text in odd_documents(400) + ADVERSARIAL:
        assert fast(text) == slow_words.word_tokenize(text), text


def test_the_word_that_spacy_frees_and_keeps_is_a_word_like_others():
    import spacy

    fast = FastWords(spacy.blank("en"), list)
    for number in range(300):
        other = f"other{number}"
        assert fast(f"an IS_ALPHA and{number} {other}") == ["an", "IS_ALPHA", f"and{number}", other]
        fast.runs.clear()


def test_nothing_remembered_changes_the_words(slow_words, monkeypatch):
    monkeypatch.setattr("data_prep.fast_words.MAX_RUNS", 20)
    fast = FastWords(slow_words.tokenizer, slow_words.word_tokenize)
    for text in odd_documents(100):
        assert fast(text) == slow_words.word_tokenize(text)
        assert len(fast.runs) <= max(20, len(set(text.split())))


def test_limits_of_length_hold_at_their_borders():
    filters = build([{"filter": "length", "min_characters": 3, "max_words": 2}])
    reasons = [filters.judge(text, "0", {}).reason for text in ("ab", "abc", "a b", "a b c")]
    assert reasons == ["length.too_few_characters", "", "", "length.too_many_words"]


def test_pii_is_replaced_the_same_whatever_came_before():
    filters = build([{"filter": "pii"}])
    text = "mail a.b@c.org or x@y.net, host 8.8.8.8, local 127.0.0.1"
    first = filters.judge(text, "0", {})
    assert first.text == (
        "mail email@example.com or firstname.lastname@example.org, host 22.214.171.124, "
        "local 127.0.0.1"
    )
    assert first.changed == ("pii",)
    assert filters.judge(text, "1", {}).text == first.text


def keep_short(text: str, record: dict, limit: int = 3) -> object:
    if record.get("odd"):
        return "maybe"
    if record.get("crash"):
        raise KeyError("lost")
    return len(text) <= limit or (False, "long")


def test_urls_are_judged_by_datatrove_without_a_network_and_odd_ones_named(capfd, monkeypatch):
    monkeypatch.setenv("TLDEXTRACT_CACHE", "/dev/null/none")  # what another run has downloaded
    words = {"extra_domains": ["bad.co.uk"], "banned_words": ["casino"]}
    filters = build([{"filter": "url", "use_integrated_lists": False, **words}])
    cases = {
        "http://good.co.uk/a": "", "http://x.bad.co.uk/": "url.domain", "": "url.no_url",
        "http://a.com/the-casino": "url.hard_blacklisted", "http://[::1": "", 5: "url.not_a_url",
        "http://\ud800.com": "", "::::": "",
    }  # fmt: skip
    for url, reason in cases.items():
        assert filters.judge("text", "0", {"url": url}).reason == reason, url
    assert filters.judge("text", "0", {}).reason == "url.no_url"
    assert capfd.readouterr().err == ""


def test_a_function_of_the_user_decides_and_its_mistakes_are_named():
    path = f"{__name__}:keep_short"
    filters = build([{"filter": "python", "function": path, "options": {"limit": 4}}])
    assert filters.judge("four", "0", {}).kept
    assert filters.judge("fiver", "0", {}).reason == "python.long"
    with pytest.raises(ZerolmError, match=r"raised KeyError: 'lost', at document 7"):
        filters.judge("x", "7", {"crash": True})
    with pytest.raises(ZerolmError, match="returned 'maybe' at document 8"):
        filters.judge("x", "8", {"odd": True})


def test_language_comes_from_a_model_file(tmp_path):
    fasttext = pytest.importorskip("fasttext")
    lines = ["the house and the dog are here", "la maison et le chien sont ici"] * 50
    labels = ["__label__en", "__label__fr"] * 50
    data = tmp_path / "train.txt"
    data.write_text("\n".join(f"{label} {line}" for label, line in zip(labels, lines, strict=True)))
    # Each thread fills a tenth of the weights: fewer than 11 leave some of them as the memory was,
    # which may be NaN (facebookresearch/fastText, densematrix.cc, uniform).
    model = fasttext.train_supervised(str(data), epoch=50, lr=0.5, dim=8, thread=11, verbose=0)
    model.save_model(str(tmp_path / "lid.bin"))
    given = {"filter": "language", "model": str(tmp_path / "lid.bin"), "languages": ["en"]}
    assert filter_problems([given], "r") == []
    filters = build([given])
    english = filters.judge("the dog and the house", "0", {"url": "u"})
    assert english.kept
    assert english.added["language"] == "en"
    assert filters.judge("le chien et la maison", "1", {}).reason == "language"
    (tmp_path / "bad.bin").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"bad\.bin"):
        build([{**given, "model": str(tmp_path / "bad.bin")}])


def test_every_mistake_in_filters_is_named_at_once():
    wrong = [
        {"filter": "gopher_qualty"},
        {"filter": "gopher_quality", "min_doc_word": 3},
        {"filter": "fineweb_quality", "line_punct_thr": "high"},
        {"filter": "fineweb_quality", "language": "xx"},
        {"filter": "length", "min_words": -1},
        {"filter": "python", "function": "nowhere:f"},
        {"filter": "language"},
        "pii",
    ]
    problems = filter_problems(wrong, "r.json: clean.filters")
    assert len(problems) == len(wrong)
    text = "\n".join(problems)
    assert 'Did you mean "gopher_quality"?' in text
    assert 'Did you mean "min_doc_words"?' in text
    assert "r.json: clean.filters[6] (language): needs model" in text
