"""`python -m data_prep run`: recipes, restarts and refusals."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_prep.__main__ import main
from data_prep.dedup.dedup import band_layout
from data_prep.dedup.options import DedupOptions
from data_prep.read.stage_files import read_records, read_stage
from data_prep.stages.options import parse_options
from tests import ROOT, tracked
from tests.documents import text_of
from zerolm.common.errors import ConfigError
from zerolm.data.packing import index_file
from zerolm.shards.manifest import read_manifest

TEXTS = [f"Document {n} says that the number {n} is followed by {n + 1}. " * 3 for n in range(40)]


@pytest.fixture
def recipe(tmp_path, tokenizer_directory) -> Path:
    """Write documents, two of them the same and three too short, and a recipe for them."""
    shutil.copytree(tokenizer_directory, tmp_path / "tokenizer")
    (tmp_path / "raw").mkdir()
    records = [{"text": text, "source": "a", "n": 2**70} for text in [*TEXTS, TEXTS[3]]]
    records += [{"text": word, "id": f"short-{word}"} for word in ("no", "nor", "so")]
    for part in range(2):
        lines = [json.dumps(record) for record in records[part::2]]
        (tmp_path / "raw" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "output": "out",
        "sources": {"web": {"input": ["raw/*.jsonl"]}},
        "clean": {"filters": [{"filter": "length", "min_words": 5}], "unit_bytes": 4000},
        "dedup": {"near": False},
        "tokenize": {"tokenizer": "tokenizer", "val_fraction": 0.2, "encoder": "tokenizers"},
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    return path


def change(path: Path, **keys) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("shard*"))
        if path.is_file()
    }


def test_a_pipeline_makes_shards_and_restarts_at_the_first_changed_stage(recipe, capsys):
    output = recipe.parent / "out" / "web"
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    clean = read_stage(output / "clean")
    assert clean.manifest["dropped"] == {"length.too_few_words": 3}
    examples = clean.manifest["examples"]["length.too_few_words"]
    assert {example["id"] for example in examples} == {"short-no", "short-nor", "short-so"}
    kept = [record for path in clean.paths for record in read_records(path)]
    assert sorted(record["text"] for record in kept) == sorted([*TEXTS, TEXTS[3]])
    assert all(record["source"] == "a" and record["n"] == 2**70 for record in kept)
    assert len({record["id"] for record in kept}) == 41
    assert read_stage(output / "dedup").manifest["documents_out"] == 40
    training, held_out = (read_manifest(output / f"shards{end}") for end in ("", "-validation"))
    assert training["num_documents"] + held_out["num_documents"] == 40
    recipe_named = training["pipeline"]["before"]["before"]["recipe"]
    assert recipe_named["content"] == json.loads(recipe.read_text())

    first = files_below(output)
    capsys.readouterr()
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert [f"web/{stage}: is complete" in shown for stage in ("clean", "dedup", "shards")] == [
        True
    ] * 3

    change(recipe, dedup={"near": False, "exact": "words"})
    assert main(["run", str(recipe), "--check"]) == 0
    plan = capsys.readouterr().out
    assert "clean         complete" in plan
    assert "dedup         changed" in plan
    assert "shards        changed" in plan
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "web/clean: is complete" in shown
    assert "web/dedup: runs again" in shown
    assert files_below(output) == first  # no other document is a copy by its words

    page = (recipe.parent / "out" / "report.html").read_text()
    assert "length.too_few_words" in page
    assert "http://" not in page
    assert "<script" not in page
    report = json.loads((recipe.parent / "out" / "report.json").read_text())
    stages = report["sources"]["web"]["stages"]
    assert [stage["documents_out"] for stage in stages] == [41, 40]
    tokens = training["num_tokens"] + held_out["num_tokens"]  # of what the last stage has kept
    assert stages[-1]["estimated_tokens_out"] == tokens
    for stage in stages:
        for end in ("in", "out"):
            expected = stage[f"text_bytes_{end}"] * tokens / stages[-1]["text_bytes_out"]
            assert abs(stage[f"estimated_tokens_{end}"] - expected) <= 1


def test_a_tokenizer_and_packing_are_stages_of_a_recipe(recipe, capsys):
    """Ids are compared with Transformers and the trained tokenizer, rows with a closed form."""
    (recipe.parent / "notes.jsonl").write_text(json.dumps({"body": "Notes of few words here."}))
    notes = {"input": ["notes.jsonl"], "text_field": "body"}
    sources = {"web": {"input": ["raw/*.jsonl"]}, "notes": notes}
    training = {"vocab_size": 300, "split": "llama3"}
    change(recipe, sources=sources, train_tokenizer=training, tokenize={"encoder": "tokenizers"})
    change(recipe, pack={"seq_len": 99})
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    output = recipe.parent / "out"
    tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
    assert len(tokenizer) == 300
    texts = {}
    for name, field in (("web", "text"), ("notes", "body")):
        paths = read_stage(output / name / "dedup").paths
        texts[name] = [each[field] for path in paths for each in read_records(path)]
        ids = np.fromfile(output / name / "shards" / "shard-00000.bin", "<u2").tolist()
        encoded = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts[name]]
        assert ids == [token for each in encoded for token in each]
        packed = json.loads(index_file(output / name / "shards", 99).read_text())
        rows = {each["packing"]: each["rows"] for each in packed["efficiency"]}
        assert rows == {"concat": max(0, (len(ids) - 1) // 99), "best_fit": packed["num_rows"]}
    report = json.loads((output / "report.json").read_text())
    assert report["tokenizer"]["sources"]["notes"]["bytes"] == len(texts["notes"][0])
    assert "<h2>Tokenizer" in (output / "report.html").read_text()
    assert report["sources"]["web"]["packing"]["shards"]["seq_len"] == 99

    def states() -> list[str]:
        capsys.readouterr()
        assert main(["run", str(recipe), "--check"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        return [line[-1] for line in lines if line[0] in ("tokenizer", "clean", "shards", "pack")]

    assert states() == ["complete"] * 7
    change(recipe, pack={"seq_len": 50})
    assert states() == ["complete"] * 3 + ["changed"] + ["complete"] * 2 + ["changed"]
    change(recipe, train_tokenizer={**training, "vocab_size": 290})
    assert states() == ["changed", "complete", "changed", "changed", "complete", *["changed"] * 2]
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    assert "tokenizer: is trained again" in capsys.readouterr().out
    assert states() == ["complete"] * 7
    for wrong, message in (
        (
            {"train_tokenizer": {"vocab_size": 100}},
            "train_tokenizer.vocab_size: 100 is not a whole number from 257",
        ),
        (
            {"tokenize": {"tokenizer": "tokenizer"}},
            "tokenize.tokenizer: give exactly one of this key",
        ),
        ({"pack": {"seq_len": 0}}, "pack.seq_len: 0 is not a whole number from 1"),
    ):
        whole = recipe.read_text()
        change(recipe, **wrong)
        assert main(["run", str(recipe), "--check"]) == 2
        assert message in capsys.readouterr().err
        recipe.write_text(whole)


def test_a_recipe_does_not_depend_on_the_working_directory(recipe, monkeypatch, capsys):
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    monkeypatch.chdir(recipe.parent / "raw")
    assert main(["run", "../recipe.json", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "complete" in shown
    assert "changed" not in shown


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


def test_a_stage_removed_from_the_recipe_is_kept(recipe, capsys):
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    output = recipe.parent / "out" / "web"
    first, whole = files_below(output), json.loads(recipe.read_text())
    recipe.write_text(json.dumps({key: whole[key] for key in ("output", "sources", "clean")}))
    assert main(["run", str(recipe), "--check"]) == 0
    assert capsys.readouterr().out.count("is no longer in the recipe") == 2
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    assert capsys.readouterr().out.count("is no longer in the recipe; its files are kept") == 2
    assert files_below(output) == first
    report = json.loads((recipe.parent / "out" / "report.json").read_text())["sources"]["web"]
    assert [stage["stage"] for stage in report["stages"]] == ["clean"] and not report["shards"]
    recipe.write_text(json.dumps(whole))
    capsys.readouterr()
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    assert "web/shards: is complete" in capsys.readouterr().out


def test_an_accepted_document_is_not_too_long_for_a_later_stage(recipe):
    for path in (recipe.parent / "raw").iterdir():
        path.unlink()
    texts = ['"quoted" \n' * 17 + str(number) for number in range(9)]
    for number, text in enumerate(texts):
        (recipe.parent / "raw" / f"{number}.txt").write_text(text)
    sources = {"web": {"input": ["raw"], "max_document_bytes": len(texts[0])}}
    change(recipe, sources=sources, tokenize={"tokenizer": "tokenizer", "encoder": "tokenizers"})
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    manifest = read_manifest(recipe.parent / "out" / "web" / "shards")
    assert manifest["num_documents"] == len(texts)


def test_an_edited_filter_function_changes_the_stage(recipe, monkeypatch, capsys):
    module = recipe.parent / "own_filters_of_this_test.py"
    module.write_text("def keep(text, record):\n    return True\n")
    monkeypatch.syspath_prepend(recipe.parent)
    change(recipe, clean={"filters": [{"filter": "python", "function": f"{module.stem}:keep"}]})
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    module.write_text("def keep(text, record):\n    return False\n")
    capsys.readouterr()
    assert main(["run", str(recipe), "--check"]) == 0
    assert "clean         changed" in capsys.readouterr().out


def test_the_memory_of_dedup_does_not_change_the_stage(recipe, capsys):
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    capsys.readouterr()
    change(recipe, dedup={"near": False, "memory_bytes": 2e9})
    assert main(["run", str(recipe), "--check"]) == 0
    assert "dedup         complete" in capsys.readouterr().out


def test_executor_options_are_in_no_published_file(recipe):
    change(recipe, executor={"slurm": {"env_command": "export TOKEN=secret-of-mine"}})
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    for path in (recipe.parent / "out").rglob("*"):
        assert not path.is_file() or b"secret-of-mine" not in path.read_bytes(), path


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
        "sources.b/d: is not a name",
        "tokenize.val_fraction: 2 is not a number of at least 0 and below 1",
        "--executor sluurm: is not one of",
    ):
        assert piece in shown
    assert not (recipe.parent / "out").exists()


def test_check_writes_nothing(recipe, capsys):
    before = sorted(recipe.parent.rglob("*"))
    assert main(["run", str(recipe), "--check"]) == 0
    assert "web: 2 inputs" in capsys.readouterr().out
    assert sorted(recipe.parent.rglob("*")) == before


def test_a_stopped_stage_resumes(recipe, capsys):
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    output = recipe.parent / "out" / "web"
    first = files_below(output)
    for stage, manifest in (("shards", "manifest.json"), ("shards-validation", "manifest.json")):
        shutil.rmtree(output / stage)
        assert not (output / stage / manifest).exists()
    (output / "dedup" / "stage.json").unlink()
    (output / "clean" / "stage.json").unlink()
    lost = output / "clean" / "records" / "clean" / "00001.json"
    lost.unlink()
    kept = (output / "clean" / "records" / "clean" / "00000.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    assert "web/clean: resumes" in capsys.readouterr().out
    assert lost.exists()
    assert (output / "clean" / "records" / "clean" / "00000.json").stat().st_mtime_ns == kept
    assert files_below(output) == first


def test_a_source_may_hold_out_another_share_and_one_that_would_hold_out_none_is_refused(
    recipe, capsys
):
    """Refused before anything is written, not when its shards are published at the end."""
    (recipe.parent / "few.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    sources = json.loads(recipe.read_text())["sources"]
    change(recipe, sources={**sources, "few": {"input": ["few.jsonl"]}})
    assert main(["run", str(recipe), "--check"]) == 2
    assert "sources.few.val_fraction: 0.2 holds out none of 1 documents" in capsys.readouterr().err
    assert not (recipe.parent / "out").exists()
    few = {"input": ["few.jsonl"], "val_fraction": 0}
    change(recipe, sources={**sources, "few": few})
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    output = recipe.parent / "out"
    assert read_manifest(output / "few" / "shards")["num_documents"] == 1
    assert not (output / "few" / "shards-validation").exists()
    assert (output / "web" / "shards-validation" / "manifest.json").is_file()
    change(recipe, sources={**sources, "few": {**few, "val_fraction": 2}})
    assert main(["run", str(recipe), "--check"]) == 2
    assert "sources.few.val_fraction: 2 is not a number of at least 0" in capsys.readouterr().err


def test_progress_shows_every_phase(recipe, capsys):
    assert main(["run", str(recipe), "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["progress", str(recipe.parent / "out")]) == 0
    assert "web/clean/records/clean: " in capsys.readouterr().out
    assert main(["progress", str(recipe.parent / "raw")]) == 2


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


def test_bad_input_is_reported_with_file_and_line(recipe):
    (recipe.parent / "raw" / "2.jsonl").write_text('{"text": 3}\n')
    result = subprocess.run(
        [sys.executable, "-m", "data_prep", "run", str(recipe), "--workers", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "2.jsonl:1" in result.stderr
    assert "Traceback" not in result.stderr


def test_integers_may_be_written_as_1e9():
    options = parse_options(
        DedupOptions, {"memory_bytes": 1e9, "permutations": 64.0, "shingle_words": 5.0}, "r"
    )
    assert [type(value) for value in (options.memory_bytes, options.permutations)] == [int, int]
    assert band_layout(options) is not None


def test_numbers_may_be_written_as_in_flags():
    given = {"memory_bytes": "2GiB", "shingle_words": "1e1", "permutations": "0.5k"}
    options = parse_options(DedupOptions, {**given, "threshold": "0.5"}, "r")
    assert options.memory_bytes == 2 << 30 and options.threshold == 0.5
    assert (options.shingle_words, options.permutations) == (10, 500)
    with pytest.raises(ConfigError, match=r"r\.memory_bytes: '2XB' is not a whole number"):
        parse_options(DedupOptions, {"memory_bytes": "2XB"}, "r")


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", "1e30", "true", "1.5"])
@pytest.mark.parametrize("key", ["memory_bytes", "shingle_words", "permutations"])
def test_invalid_numbers_are_refused(number, key):
    with pytest.raises(ConfigError, match=f"r.{key}: .* is not a whole number"):
        parse_options(DedupOptions, {key: json.loads(number)}, "r")


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
