"""Recipes are valid wherever they lie, or refused with every problem before anything is written."""

import json
import re
import shutil

import pytest

from data_prep.__main__ import main
from tests import ROOT, tracked
from tests.data_prep.pipeline.small_recipe import TEXTS, change, plan_of, run
from tests.documents import text_of


def test_paths_are_not_searched_in_the_working_directory(recipe, monkeypatch, capsys):
    elsewhere = recipe.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("raw", "tokenizer"):
        (recipe.parent / name).rename(elsewhere / name)
    monkeypatch.chdir(elsewhere)
    model = [{"filter": "language", "model": "lid.bin"}]
    (elsewhere / "lid.bin").write_bytes(b"")
    change(recipe, clean={"filters": model})
    assert main(["run", "../recipe.json", "--check"]) == 2
    shown = capsys.readouterr().err
    assert f"{recipe.parent}/raw/*.jsonl: the glob matches nothing" in shown
    assert f"{recipe.parent}/tokenizer: no such directory" in shown
    assert f"{recipe.parent}/lid.bin: no such file" in shown


def test_all_problems_of_a_recipe_are_reported_before_anything_is_written(recipe, capsys):
    change(
        recipe,
        sorces={},
        clean={"filters": [{"filter": "lenght"}], "keep": True},
        dedup={"treshold": 0.5},
        sources={"web": {"input": ["raw/none*.jsonl"], "text_feild": "t"}, "b/d": {}},
        tokenize={"tokenizer": "tokenizer", "val_fraction": 2},
    )
    assert main(["run", str(recipe), "--executor", "sluurm"]) == 2
    shown = capsys.readouterr().err
    for piece in (
        "'sorces' is not a key of a recipe. Did you mean \"sources\"?",
        "clean.keep: is not an option",
        'Did you mean "length"?',
        'dedup.treshold: is not an option. Did you mean "threshold"?',
        "sources.web.text_feild: is not an option",
        "sources.b/d: a name may contain",
        "tokenize.val_fraction: 2 is not a number of at least 0 and below 1",
        "--executor sluurm: is not one of",
    ):
        assert piece in shown
    assert not (recipe.parent / "out").exists()


def test_check_writes_nothing(recipe, capsys):
    before = sorted(recipe.parent.rglob("*"))
    assert "web: 2 inputs" in plan_of(recipe, capsys)
    assert sorted(recipe.parent.rglob("*")) == before


def test_a_recipe_does_not_depend_on_the_working_directory(recipe, monkeypatch, capsys):
    run(recipe)
    monkeypatch.chdir(recipe.parent / "raw")
    assert main(["run", "../recipe.json", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "complete" in shown
    assert "changed" not in shown


@pytest.mark.parametrize("path", tracked("data_prep/recipes/*.json"), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_where_their_inputs_exist(
    path, tmp_path, tokenizer_directory, capsys
):
    """Small inputs are written to the paths in the recipe; the filters are unchanged."""
    if "gopher" in path.read_text():
        pytest.importorskip("datatrove")
    content = json.loads(path.read_text())
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    shutil.copy(path, here)
    shutil.copytree(tokenizer_directory, tmp_path / "tokenizer")
    for source in content["sources"].values():
        for pattern in source["input"]:
            file = here / pattern.replace("*", "part")
            file = file if file.suffix else file / "part.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            texts = [*TEXTS, *(f"Sentence {number}." for number in range(5000))]
            lines = [json.dumps({source.get("text_field", "text"): text}) for text in texts]
            data = ("\n".join(lines) + "\n").encode()
            if file.suffix == ".gz":
                import gzip

                data = gzip.compress(data)
            file.write_bytes(data)
    for evaluation in content.get("decontaminate", {}).get("evaluation", []):
        file = here / evaluation.partition(":")[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        item = {"ctx": "a question of many words that is in no document here", "endings": ["x y z"]}
        file.write_text(json.dumps(item) + "\n")
    assert main(["run", str(here / path.name), "--check"]) == 0
    assert "clean" in capsys.readouterr().out


def test_the_recipe_for_a_folder_of_ones_own_is_valid_and_its_plan_says_what_is_read(
    tmp_path, capsys
):
    (text,) = re.findall(r"```json\n(.*?)```", text_of(ROOT / "docs" / "inputs.md"), re.DOTALL)
    folder = tmp_path / "mytext"
    for name in ("notes", "old", "web", "code"):
        (folder / name).mkdir(parents=True)
    (folder / "notes" / "a.TXT").write_text("note " * 30)
    (folder / "notes" / "scan.pdf").write_bytes(b"%PDF")
    (folder / "old" / "b.txt").write_bytes("Größe über Maß und Übermut ".encode("cp1252") * 9)
    (folder / "data.jsonl").write_text(json.dumps({"text": "line"}))
    (folder / "web" / "c.html").write_text(f"<html><body><p>{'page ' * 50}</p></body></html>")
    (folder / "reviews.csv").write_bytes("id;review\n1;élève\n".encode("cp1252"))
    (folder / "code" / "d.py").write_text("x = 1\n")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(text.replace('"val_fraction": 0.05', '"val_fraction": 0.9999'))
    assert main(["run", str(recipe), "--check"]) == 0
    shown = capsys.readouterr()
    for line in ("2 .txt, 1 .jsonl", "1 .html", "1 .csv", "1 source files", "encoding: auto"):
        assert line in shown.out
    assert "ignored 1 of 2 files (1 .pdf)" in shown.err
