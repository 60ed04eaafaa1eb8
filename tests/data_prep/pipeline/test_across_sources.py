"""Recipes that drop duplicates across sources, and against the signatures of another recipe."""

import json
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.read.stage_files import read_records, read_stage
from tests.data_prep.dedup.near_copies import planted_texts, similar_pairs, write_documents
from tests.data_prep.dedup.test_dedup import expected_kept
from tests.data_prep.stage_cases import documents_of

PARTS = {"web": (0, 40), "books": (40, 70), "news": (70, 100)}  # numbers of the documents


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return planted_texts(20, 4, seed=9)


def write_recipe(directory: Path, texts: list[str], names: list[str], **dedup) -> Path:
    for name in names:
        start, end = PARTS[name]
        if not (directory / f"{name}.jsonl").exists():
            write_documents(directory / f"{name}.jsonl", texts[start:end], start)
    sources = {name: {"input": [f"{name}.jsonl"]} for name in names}
    path = directory / "recipe.json"
    path.write_text(json.dumps({"output": "out", "sources": sources, "dedup": dedup}))
    return path


def kept_ids(output: Path, names) -> dict[str, list[str]]:
    return {name: [each["id"] for each in documents_of(output / name / "dedup")] for name in names}


def expected_ids(texts: list[str], order) -> dict[str, list[str]]:
    """Return the documents of each source that one pass in this order keeps, by brute force."""
    numbers = [number for name in order for number in range(*PARTS[name])]
    ordered = [texts[number] for number in numbers]
    kept = expected_kept(ordered, similar_pairs(ordered, 0.8), 0.8)
    return {
        name: [f"d{n}" for place, n in enumerate(numbers) if place in kept and n in part]
        for name in order
        for part in [range(*PARTS[name])]
    }


def test_the_first_source_in_the_order_of_preference_keeps_a_document(texts, tmp_path, capsys):
    names = list(PARTS)
    recipe = write_recipe(tmp_path, texts, names, across_sources=True)
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    assert kept_ids(tmp_path / "out", names) == expected_ids(texts, names)
    manifest = read_stage(tmp_path / "out" / "news" / "dedup").manifest
    assert [each["name"] for each in manifest["against"]] == ["web/dedup", "books/dedup"]
    assert any(reason.endswith(".web/dedup") for reason in manifest["dropped"])
    notes = read_records(tmp_path / "out" / "news" / "dedup" / "duplicates.jsonl.zst")
    assert {note.get("kept_in") for note in notes} >= {"web/dedup", "books/dedup"}

    order = ["news", "web", "books"]
    recipe = write_recipe(tmp_path, texts, names, across_sources=True, source_order=order)
    capsys.readouterr()
    assert main(["run", str(recipe), "--check"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("changed") == 3 and "source_order: ('news', 'web', 'books')" in shown
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    assert kept_ids(tmp_path / "out", names) == expected_ids(texts, order)


def test_a_source_added_last_leaves_the_others_as_they_are(texts, tmp_path, capsys):
    names = ["web", "books"]
    recipe = write_recipe(tmp_path, texts, names, across_sources=True)
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    capsys.readouterr()
    write_recipe(tmp_path, texts, ["news"])
    sources = {name: {"input": [f"{name}.jsonl"]} for name in PARTS}
    content = {"output": "out", "sources": sources, "dedup": {"across_sources": True}}
    recipe.write_text(json.dumps(content))
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "web/dedup: is complete" in shown and "books/dedup: is complete" in shown
    assert kept_ids(tmp_path / "out", PARTS) == expected_ids(texts, PARTS)


def test_a_new_snapshot_is_compared_with_the_signatures_of_an_old_one(texts, tmp_path, capsys):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old = write_recipe(tmp_path / "old", texts, ["web"], keep_signatures=True)
    assert main(["run", str(old), "--workers", "1"]) == 0
    for path in (tmp_path / "old").rglob("*.jsonl*"):
        path.unlink()
    new = write_recipe(
        tmp_path / "new", texts, ["books"], keep_signatures=True, against=["../old/out/web/dedup"]
    )
    assert main(["run", str(new), "--workers", "1"]) == 0
    expected = expected_ids(texts, ["web", "books"])
    assert kept_ids(tmp_path / "new" / "out", ["books"]) == {"books": expected["books"]}
    capsys.readouterr()
    wrong = {"source_order": ["book"], "against": ["../old/out", "out/books/dedup"]}
    write_recipe(tmp_path / "new", texts, ["books"], threshold=0.8, across_sources=True, **wrong)
    assert main(["run", str(new), "--check"]) == 2
    shown = capsys.readouterr().err
    assert "dedup.source_order: ['book'] must name each of books exactly once" in shown
    assert "old/out: has no signatures" in shown
    assert "dedup.against:" in shown and "is in the output of this stage" in shown


def test_the_work_of_a_plan_is_linear_in_the_number_of_sources(tmp_path, monkeypatch, capsys):
    """By the number of function calls, which no load of the machine changes."""
    monkeypatch.chdir(tmp_path)
    calls, characters = {}, {}
    for count in (20, 80):
        names = [f"s{number}" for number in range(count)]
        for name in names:
            (tmp_path / f"{name}.jsonl").write_text('{"text": "one document"}\n')
        content = {
            "output": "out",
            "sources": {name: {"input": [f"{name}.jsonl"]} for name in names},
            "clean": {"filters": [{"filter": "length", "min_words": 1}]},
            "dedup": {"across_sources": True, "source_order": names[::-1]},
        }
        recipe = tmp_path / "recipe.json"
        recipe.write_text(json.dumps(content))
        calls[count] = 0

        def count_call(frame, event, _, count=count):
            calls[count] += event == "call"

        before = sys.getprofile()
        sys.setprofile(count_call)
        try:
            assert main(["run", str(recipe), "--check"]) == 0
        finally:
            sys.setprofile(before)
        characters[count] = len(capsys.readouterr().out)
    assert calls[80] < 5 * calls[20], calls
    assert characters[80] < 5 * characters[20], characters
