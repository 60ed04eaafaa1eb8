"""Results of filters, compared with datatrove's own classes and spaCy's own words."""

import random
import re
from importlib.metadata import requires

import pytest

from data_prep.filters import build
from data_prep.filters.build import build_filters
from data_prep.filters.fast_words import FIRST_WORD, FastWords, import_spacy
from data_prep.filters.parameters import DATATROVE, filter_problems
from tests.manual import topics
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.common.provenance import installed_version

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
    """Return excerpts of the manual: as they are, and as pages that the filters drop."""
    text = "".join(topics.values())
    changes = [
        str,
        lambda part: part.replace("\n", " "),
        lambda part: part.replace(" ", "\n"),
        lambda part: "- " + part.replace("\n", "\n- "),
        lambda part: part.replace(".", "..."),
        lambda part: part[:80] * 9,
        lambda part: re.sub("[aeo]", "_", part),
        lambda part: part.replace(" ", ""),
    ]
    return [
        changes[place % len(changes)](text[at : at + characters])
        for place, at in enumerate(range(0, len(text), len(text) // number))
    ][:number]


def odd_documents(number: int) -> list[str]:
    """Return spaCy's special cases and parts of them, with every kind of space between them."""
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
    """Restore datatrove's own word splitting."""
    tokenizer = load_word_tokenizer(Languages.english)  # cached by name: "en" is another one
    tokenizer.tokenizer.vocab[FIRST_WORD]  # otherwise datatrove's words of it are undefined
    vars(tokenizer).pop("word_tokenize", None)
    split_into_parts.cache_clear()
    yield tokenizer
    vars(tokenizer).pop("word_tokenize", None)
    split_into_parts.cache_clear()


def datatrove_result(name: str, text: str) -> tuple[bool, str | None, str]:
    """Return (kept, reason, text); the reason is ours where datatrove divides by zero."""
    import importlib

    module, attribute = DATATROVE[name].split(":")
    step = getattr(importlib.import_module(f"datatrove.pipeline.{module}"), attribute)()
    given = lf_of(text)
    document = Document(text=given, id="0")
    try:
        kept, reason = get_filter_result(step.filter(document))
    except ZeroDivisionError:
        kept, reason = False, "nothing_to_count"
    return bool(kept), reason, document.text if kept and document.text != given else text


def lf_of(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\u2029", "\n\n")
    for end in "\r\v\f\x85\u2028":
        text = text.replace(end, "\n")
    return text


PAGES = [
    "\n\n".join(["one two three four five six seven eight nine ten, and the end of it."] * 3),
    "\n\n".join(
        f"Of paragraph {n} the words are {'some ' * n}words, and have an end." for n in range(9)
    ),
    "\n".join(
        f"Line {n} has the words of a line, and of that to be with an end." for n in range(30)
    ),
    "- a bullet\n- another\n" * 20 + "the end...",
    "a line without a full stop\n" * 4 + "The last one of the lines has a full stop.\n",
    "mail a@b.org\n\nand 8.8.8.8\n",
]
JUDGES = [
    *({"filter": name} for name in (*COMPARED, "pii")),
    {"filter": "length", "max_words": 90},
    {"filter": "python", "function": "tests.data_prep.filters.test_filters:has_few_lines"},
]


def has_few_lines(text, record):
    return text.count("\n") < 20, f"{len(text.split(chr(10)))} lines"


@pytest.mark.parametrize("end", ["\r\n", "\r", "\v", "\f", "\x85", "\u2028"])
@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge["filter"])
def test_line_ends_make_no_difference_to_a_filter(judge, end):
    filters = build_filters([judge])
    for page in PAGES:
        other = page.replace("\n", end)
        expected, result = filters.apply(page, "0", {}), filters.apply(other, "0", {})
        assert (result.kept, result.reason) == (expected.kept, expected.reason), page
        assert result.changed == expected.changed and result.added == expected.added
        assert result.text == (expected.text if expected.text != page else other)


def test_a_paragraph_separator_is_an_empty_line():
    filters = build_filters([{"filter": "gopher_repetition"}])
    for page in PAGES:
        expected = filters.apply(page, "0", {})
        result = filters.apply(page.replace("\n\n", "\u2029"), "0", {})
        assert (result.kept, result.reason, result.added) == expected[:2] + expected[4:]


@pytest.mark.parametrize(
    ("num_odd", "num_real"), [(60, 150), pytest.param(1000, 2500, marks=pytest.mark.soak)]
)
def test_results_and_reasons_equal_those_of_datatrove(slow_words, num_odd, num_real):
    documents = ADVERSARIAL + odd_documents(num_odd) + real_documents(num_real, 500)
    expected = {name: [datatrove_result(name, text) for text in documents] for name in COMPARED}
    seen = set()
    for name in COMPARED:
        filters = build_filters([{"filter": name}])
        for text, (kept, reason, changed) in zip(documents, expected[name], strict=True):
            result = filters.apply(text, "0", {})
            expected_reason = "" if kept else f"{name}.{reason}"
            assert (result.kept, result.reason, result.text) == (kept, expected_reason, changed), (
                text
            )
            seen.add(expected_reason)
    assert isinstance(slow_words.word_tokenize, FastWords)
    assert len(seen) > 15  # different reasons


def test_words_equal_those_of_datatrove(slow_words):
    fast = FastWords(slow_words.tokenizer, slow_words.word_tokenize)
    for text in odd_documents(400) + ADVERSARIAL:
        assert fast(text) == slow_words.word_tokenize(text), text


def test_the_first_string_of_spacy_is_split_like_others():
    import spacy

    fast = FastWords(spacy.blank("en"), list)
    for number in range(300):
        other = f"other{number}"
        assert fast(f"an IS_ALPHA and{number} {other}") == ["an", "IS_ALPHA", f"and{number}", other]
        fast.segments.clear()


def test_the_cache_does_not_change_the_words(slow_words, monkeypatch):
    monkeypatch.setattr("data_prep.filters.fast_words.MAX_SEGMENTS", 20)
    fast = FastWords(slow_words.tokenizer, slow_words.word_tokenize)
    for text in odd_documents(100):
        assert fast(text) == slow_words.word_tokenize(text)
        assert len(fast.segments) <= max(20, len(set(text.split())))


def test_limits_of_length_are_inclusive():
    filters = build_filters([{"filter": "length", "min_characters": 3, "max_words": 2}])
    reasons = [filters.apply(text, "0", {}).reason for text in ("ab", "abc", "a b", "a b c")]
    assert reasons == ["length.too_few_characters", "", "", "length.too_many_words"]


def test_pii_replacements_do_not_depend_on_other_documents():
    filters = build_filters([{"filter": "pii"}])
    text = "mail a.b@c.org or x@y.net, host 8.8.8.8, local 127.0.0.1"
    first = filters.apply(text, "0", {})
    assert first.text == (
        "mail email@example.com or firstname.lastname@example.org, host 22.214.171.124, "
        "local 127.0.0.1"
    )
    assert first.changed == ("pii",)
    assert filters.apply(text, "1", {}).text == first.text


def keep_short(text: str, record: dict, limit: int = 3) -> object:
    if record.get("odd"):
        return "maybe"
    if record.get("crash"):
        raise KeyError("lost")
    return len(text) <= limit or (False, "long")


def test_urls_are_filtered_without_a_network_and_invalid_ones_named(capfd, monkeypatch):
    monkeypatch.setenv("TLDEXTRACT_CACHE", "/dev/null/none")  # a cache that an earlier run filled
    words = {"extra_domains": ["bad.co.uk"], "banned_words": ["casino"]}
    filters = build_filters([{"filter": "url", "use_integrated_lists": False, **words}])
    cases = {
        "http://good.co.uk/a": "", "http://x.bad.co.uk/": "url.domain", "": "url.no_url",
        "http://a.com/the-casino": "url.hard_blacklisted", "http://[::1": "", 5: "url.not_a_url",
        "http://\ud800.com": "", "::::": "",
    }  # fmt: skip
    for url, reason in cases.items():
        assert filters.apply("text", "0", {"url": url}).reason == reason, url
    assert filters.apply("text", "0", {}).reason == "url.no_url"
    assert capfd.readouterr().err == ""


def test_a_user_function_decides_and_its_errors_are_named():
    path = f"{__name__}:keep_short"
    filters = build_filters([{"filter": "python", "function": path, "options": {"limit": 4}}])
    assert filters.apply("four", "0", {}).kept
    assert filters.apply("fiver", "0", {}).reason == "python.long"
    with pytest.raises(ZerolmError, match=r"raised KeyError: 'lost', at document 7"):
        filters.apply("x", "7", {"crash": True})
    with pytest.raises(ZerolmError, match="returned 'maybe' at document 8"):
        filters.apply("x", "8", {"odd": True})


def test_the_language_filter_uses_a_model_file(tmp_path):
    fasttext = pytest.importorskip("fasttext")
    lines = ["the house and the dog are here", "la maison et le chien sont ici"] * 50
    labels = ["__label__en", "__label__fr"] * 50
    data = tmp_path / "train.txt"
    data.write_text("\n".join(f"{label} {line}" for label, line in zip(labels, lines, strict=True)))
    # Each thread fills a tenth of the weights: with fewer than 11 some stay uninitialised, and may
    # be NaN (facebookresearch/fastText, densematrix.cc, uniform).
    model = fasttext.train_supervised(str(data), epoch=50, lr=0.5, dim=8, thread=11, verbose=0)
    model.save_model(str(tmp_path / "lid.bin"))
    given = {"filter": "language", "model": str(tmp_path / "lid.bin"), "languages": ["en"]}
    assert filter_problems([given], "r") == []
    filters = build_filters([given])
    english = filters.apply("the dog and the house", "0", {"url": "u"})
    assert english.kept
    assert english.added["language"] == "en"
    assert filters.apply("le chien et la maison", "1", {}).reason == "language"
    (tmp_path / "bad.bin").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"bad\.bin"):
        build_filters([{**given, "model": str(tmp_path / "bad.bin")}])


def test_the_fingerprint_names_all_packages_of_datatrove_that_a_filter_may_use():
    """Its extras list them; those of its other steps change nothing here."""
    listed = [re.match(r"([\w-]+).*extra == .(\w+)", each) for each in requires("datatrove") or ()]
    names = {each[1] for each in listed if each and each[2] in ("processing", "multilingual")}
    other_steps = {"trafilatura", "inscriptis", "tokenizers", "ftfy", "fasteners", "xxhash"}
    known = {*build.WORDS, *(name for names in build.PACKAGES.values() for name in names)}
    assert names - other_steps - known == {"tensorflow"}  # which urduhack imports


@pytest.mark.parametrize("name", ["gopher_quality", "url", "pii"])
def test_a_new_version_of_any_package_changes_the_fingerprint(monkeypatch, name):
    filters = [{"filter": name}]
    before = build.filters_identity(filters)
    packages = {"datatrove", "spacy", "regex", "numpy"} | {"url": {"tldextract"}}.get(name, set())
    assert packages | {"unicode"} <= set(before) and ("python" in before) == (name == "pii")
    for package in packages:
        installed = lambda each, new=package: "new" if each == new else installed_version(each)  # noqa: E731
        monkeypatch.setattr(build, "installed_version", installed)
        after = build.filters_identity(filters)
        assert {key for key in after if after[key] != before[key]} == {package}
