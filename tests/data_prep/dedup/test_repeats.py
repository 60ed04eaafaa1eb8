"""Repeated lines, paragraphs and substrings, compared with brute force over all of them."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.dedup.find_repeats import anchor_length, choose_anchors, split_pieces
from data_prep.dedup.options import RepeatsOptions
from data_prep.dedup.repeats import covered_spans, run_repeats
from data_prep.read.stage_files import read_records, read_stage
from data_prep.stages.documents import stage_documents
from data_prep.stages.line_ends import LINE_END, PARAGRAPH_END
from data_prep.stages.options import parse_options
from data_prep.tasks.phases import LocalExecutor
from tests.data_prep.dedup.near_copies import words_of
from tests.data_prep.dedup.test_dedup import files_of
from tests.data_prep.dedup.test_signatures import kill_at_phases
from tests.data_prep.stage_cases import documents_of, write_stage
from tests.manual import topics
from zerolm.common.errors import ConfigError

LENGTH = 60  # of substrings


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Pages of real text with common lines and passages, and texts that repeat themselves."""
    generator = random.Random(4)
    manual = "\n".join(topics[name] for name in sorted(topics)[:6]) + "日本語の文章です。" * 40
    lines = [line for line in manual.split("\n") if line.strip()]
    texts = []
    for number in range(70):
        start = generator.randrange(len(manual) - 600)
        middle = manual[start : start + generator.randrange(20, 500)]
        page = generator.choices(lines, k=6) + ["", middle, " \t", generator.choice(lines)]
        page[1] = page[1].upper() if number % 3 else page[1]
        texts.append("\n".join(page))
    alone = ["x" * 500, "na " * 200, "", " \n\n ", "\n", texts[3], "a line\n" * 9, texts[4] + "\n"]
    short = "one two three four five six seven eight nine ten"
    return texts + alone + [f"{short}\n\n{short}.\n\n\n{short}!", short, f"\n{short}\n"]


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory) -> Path:
    return write_stage(tmp_path_factory.mktemp("repeats") / "clean", texts, 45)


def run(source: Path, output: Path, **options) -> tuple[dict, dict[str, str], list[dict]]:
    documents = stage_documents(read_stage(source))
    manifest = run_repeats(RepeatsOptions(**options), documents, output, LocalExecutor(1))
    kept = {record["id"]: record["text"] for record in documents_of(output)}
    return manifest, kept, list(read_records(output / "repeats.jsonl.zst"))


def pieces_kept(texts: list[str], separator: str, min_words: int) -> dict[str, list[str]]:
    """Return the pieces to keep, by a set of the words of all pieces seen."""
    seen: set[tuple[str, ...]] = set()
    kept: dict[str, list[str]] = {}
    for number, text in enumerate(texts):
        own = kept.setdefault(f"d{number}", [])
        for piece in re.split(separator, text):
            words = tuple(words_of(piece))
            if len(words) < min_words or words not in seen:
                own.append(piece)
            if len(words) >= min_words:
                seen.add(words)
    return kept


@pytest.mark.parametrize(
    ("unit", "separator"), [("lines", r"\n"), ("paragraphs", r"\n[^\S\n]*\n\s*")]
)
def test_the_first_of_equal_pieces_is_kept(source, texts, tmp_path, unit, separator):
    manifest, kept, notes = run(source, tmp_path / "out", unit=unit, min_words=5)
    expected = pieces_kept(texts, separator, 5)
    for number, text in enumerate(texts):
        key, pieces = f"d{number}", re.split(separator, text)
        if expected[key] == pieces:
            assert kept[key] == text  # to the byte
        elif any(piece.strip() for piece in expected[key]):
            assert re.split(separator, kept[key]) == expected[key]
        else:
            assert key not in kept
    assert manifest["documents_in"] == len(texts)
    assert manifest["changed"][unit] >= 5
    assert {note["id"] for note in notes} >= {key for key in expected if key not in kept}
    changed = {note["id"]: note["bytes"] for note in notes if note["id"] in kept}
    sizes = {f"d{number}": len(text.encode()) for number, text in enumerate(texts)}
    assert changed == {key: sizes[key] - len(kept[key].encode()) for key in changed}
    assert sum(changed.values()) == manifest["removed_bytes"]


def windows_to_remove(texts: list[str], length: int) -> dict[int, list[int]]:
    """Return the positions of the windows that repeat an earlier one, by a dict of all windows."""
    first: dict[str, tuple[int, int]] = {}
    found: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        for start in range(len(text) - length + 1):
            where = first.setdefault(text[start : start + length], (number, start))
            if where[0] != number or start - where[1] >= length:
                found.setdefault(number, []).append(start)
    return found


def test_every_repeated_substring_is_removed_and_nothing_else(source, texts, tmp_path):
    manifest, kept, notes = run(
        source, tmp_path / "out", unit="substrings", min_characters=LENGTH, memory_bytes=1 << 20
    )
    found = windows_to_remove(texts, LENGTH)
    assert sum(map(len, found.values())) > 2000
    assert manifest["places"] < sum(map(len, texts)) / 2  # windows without an anchor are skipped
    for number, text in enumerate(texts):
        expected = text
        for start, end in reversed(covered_spans(text, found.get(number, []), LENGTH)):
            expected = expected[:start] + expected[end:]
        is_dropped = number in found and not expected.strip()
        assert kept.get(f"d{number}") == (None if is_dropped else expected)
    assert kept["d70"].startswith("x" * LENGTH) and len(kept["d70"]) < 2 * LENGTH
    assert {note["id"] for note in notes if note["repeats"]} >= {"d70", "d71", "d75"}
    again = write_stage(tmp_path / "files", texts, 200)
    assert run(again, tmp_path / "again", unit="substrings", min_characters=LENGTH)[1] == kept


@pytest.mark.parametrize("length", [20, 21, 50, 200])
def test_equal_windows_have_equal_anchors(length):
    import numpy as np

    generator = np.random.default_rng(length)
    count, width = 400, length - anchor_length(length) + 1
    hashes = generator.integers(0, 30, count, np.uint64)  # many ties
    chosen = set(choose_anchors(hashes, width).tolist())
    expected = set()
    for start in range(count - width + 1):
        window = hashes[start : start + width].tolist()
        expected |= {start + place for place in range(width) if window[place] == min(window)}
    assert chosen == expected
    assert len(choose_anchors(hashes[: width - 1], width)) == 0


def test_no_word_is_cut_where_words_are_separated():
    text = "the cars were parked behind the barn until noon"
    assert [text[s:e] for s, e in covered_spans(text, [5], 30)] == [" were parked behind the"]
    assert [text[s:e] for s, e in covered_spans(text, [4, 7], 5)] == ["cars"]
    assert covered_spans("日" * 40, [3], 30) == [(3, 33)]


@pytest.mark.parametrize("unit", ["lines", "substrings"])
@pytest.mark.parametrize("texts", [[], ["alone"], ["short"] * 3])
def test_documents_without_repeats_are_kept_unchanged(tmp_path, unit, texts):
    source = write_stage(tmp_path / "clean", texts, 2)
    manifest, kept, notes = run(source, tmp_path / "out", unit=unit)
    assert list(kept.values()) == texts and not notes and manifest["removed_bytes"] == 0


def test_a_killed_run_resumes_with_the_same_bytes(source, tmp_path):
    options = ["--unit", "substrings", "--min_characters", str(LENGTH), "--workers", "1"]
    command = [sys.executable, "-m", "data_prep", "repeats", "--input", source, *options]
    phases = ("repeats.anchors", "repeats.windows", "repeats.write")
    kill_at_phases([*command, "--output", tmp_path / "cut"], tmp_path / "cut", phases)
    run(source, tmp_path / "whole", unit="substrings", min_characters=LENGTH)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_wrong_options_are_refused_together(source, tmp_path, capsys):
    wrong = {"unit": "sentences", "min_words": 0, "min_characters": 5, "memory_bytes": 9}
    with pytest.raises(ConfigError) as caught:
        parse_options(RepeatsOptions, wrong, "r.json: repeats")
    assert len(caught.value.problems) == 4
    command = ["repeats", "--input", source, "--output", tmp_path / "out", "--min_characters", "90"]
    assert main([str(each) for each in [*command, "--unit", "line"]]) == 2
    shown = capsys.readouterr().err
    assert "--unit line: is not lines, paragraphs or substrings" in shown
    assert "--min_characters: has no effect" in shown
    assert not (tmp_path / "out").exists()


def test_repeats_are_a_stage_of_a_recipe(source, texts, tmp_path):
    sources = {"web": {"input": [str(source)]}}
    repeats = {"unit": "paragraphs", "min_words": 5}
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"output": "out", "sources": sources, "repeats": repeats}))
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    kept = {each["id"]: each["text"] for each in documents_of(tmp_path / "out" / "web" / "repeats")}
    assert "d78" in kept and {"d79", "d80"}.isdisjoint(kept)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [each["stage"] for each in report["sources"]["web"]["stages"]] == ["clean", "repeats"]


ENDS = ("\n", "\r\n", "\r", "\f", "\v", "\x85", "\u2028")


@pytest.mark.parametrize("unit", ["lines", "paragraphs"])
def test_line_ends_make_no_difference_to_the_pieces(texts, unit):
    for text in texts:
        expected = split_pieces(text, unit)
        assert "".join(expected) == text
        for end in ENDS[1:]:
            pieces = split_pieces(text.replace("\n", end), unit)
            assert pieces == [piece.replace("\n", end) for piece in expected]
    two = ["one", "two"]
    assert split_pieces("one\u2029two", unit)[::2] == two
    assert split_pieces("one\r\ntwo", "paragraphs") == ["one\r\ntwo"]
    assert split_pieces("one\r\n \t\r\n\r\ntwo", "paragraphs")[::2] == two


def test_a_repeated_line_is_found_whatever_its_end(tmp_path):
    line = "these are the eight or nine words of a line"
    texts = [f"start {n}{end}{line}{end}the end {n}" for n, end in enumerate(ENDS)]
    source = write_stage(tmp_path / "clean", texts, 7)
    _, kept, _ = run(source, tmp_path / "out", unit="lines", min_words=5)
    assert kept["d0"] == texts[0]
    for number, end in enumerate(ENDS[1:], 1):
        assert kept[f"d{number}"] == f"start {number}{end}the end {number}"


@pytest.mark.parametrize(
    "text", ["one\n\ntwo\nthree \n \t\n\n four", "", "\n\n", " \n\x1c\na\u3000\n\nb"]
)
def test_texts_with_line_feeds_alone_are_split_as_all_others(text):
    assert split_pieces(text, "lines") == LINE_END.split(text)
    assert split_pieces(text, "paragraphs") == PARAGRAPH_END.split(text)
