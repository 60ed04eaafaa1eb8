"""`python -m data_prep run`: stages, restarts, and what makes a stage run again."""

import json
import shutil
import subprocess
import sys

import numpy as np
from transformers import AutoTokenizer

from data_prep.__main__ import main
from data_prep.read.stage_files import read_records, read_stage
from tests import ROOT
from tests.data_prep.pipeline.small_recipe import TEXTS, change, files_below, plan_of, run
from zerolm.data.packing import index_file
from zerolm.shards.manifest import read_manifest


def test_a_pipeline_makes_shards_and_restarts_at_the_first_changed_stage(recipe, capsys):
    output = recipe.parent / "out" / "web"
    run(recipe)
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
    run(recipe)
    shown = capsys.readouterr().out
    assert [f"web/{stage}: is complete" in shown for stage in ("clean", "dedup", "shards")] == [
        True
    ] * 3

    change(recipe, dedup={"near": False, "exact": "words"})
    plan = plan_of(recipe, capsys)
    assert "clean         complete" in plan
    assert "dedup         changed" in plan
    assert "shards        changed" in plan
    run(recipe)
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
    run(recipe)
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
        lines = [line.split() for line in plan_of(recipe, capsys).splitlines()]
        return [line[-1] for line in lines if line[0] in ("tokenizer", "clean", "shards", "pack")]

    assert states() == ["complete"] * 7
    change(recipe, pack={"seq_len": 50})
    assert states() == ["complete"] * 3 + ["changed"] + ["complete"] * 2 + ["changed"]
    change(recipe, train_tokenizer={**training, "vocab_size": 290})
    assert states() == ["changed", "complete", "changed", "changed", "complete", *["changed"] * 2]
    run(recipe)
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


def test_a_stage_removed_from_the_recipe_is_kept(recipe, capsys):
    run(recipe)
    output = recipe.parent / "out" / "web"
    first, whole = files_below(output), json.loads(recipe.read_text())
    recipe.write_text(json.dumps({key: whole[key] for key in ("output", "sources", "clean")}))
    assert plan_of(recipe, capsys).count("is no longer in the recipe") == 2
    run(recipe)
    assert capsys.readouterr().out.count("is no longer in the recipe; its files are kept") == 2
    assert files_below(output) == first
    report = json.loads((recipe.parent / "out" / "report.json").read_text())["sources"]["web"]
    assert [stage["stage"] for stage in report["stages"]] == ["clean"] and not report["shards"]
    recipe.write_text(json.dumps(whole))
    capsys.readouterr()
    run(recipe)
    assert "web/shards: is complete" in capsys.readouterr().out


def test_an_accepted_document_is_not_too_long_for_a_later_stage(recipe):
    for path in (recipe.parent / "raw").iterdir():
        path.unlink()
    texts = ['"quoted" \n' * 17 + str(number) for number in range(9)]
    for number, text in enumerate(texts):
        (recipe.parent / "raw" / f"{number}.txt").write_text(text)
    sources = {"web": {"input": ["raw"], "max_document_bytes": len(texts[0])}}
    change(recipe, sources=sources, tokenize={"tokenizer": "tokenizer", "encoder": "tokenizers"})
    run(recipe)
    manifest = read_manifest(recipe.parent / "out" / "web" / "shards")
    assert manifest["num_documents"] == len(texts)


def test_an_edited_filter_function_changes_the_stage(recipe, monkeypatch, capsys):
    module = recipe.parent / "own_filters_of_this_test.py"
    module.write_text("def keep(text, record):\n    return True\n")
    monkeypatch.syspath_prepend(recipe.parent)
    change(recipe, clean={"filters": [{"filter": "python", "function": f"{module.stem}:keep"}]})
    run(recipe)
    module.write_text("def keep(text, record):\n    return False\n")
    assert "clean         changed" in plan_of(recipe, capsys)


def test_the_memory_of_dedup_does_not_change_the_stage(recipe, capsys):
    run(recipe)
    change(recipe, dedup={"near": False, "memory_bytes": 2e9})
    assert "dedup         complete" in plan_of(recipe, capsys)


def test_executor_options_are_in_no_published_file(recipe):
    change(recipe, executor={"slurm": {"env_command": "export TOKEN=secret-of-mine"}})
    run(recipe)
    for path in (recipe.parent / "out").rglob("*"):
        assert not path.is_file() or b"secret-of-mine" not in path.read_bytes(), path


def test_a_stopped_stage_resumes(recipe, capsys):
    run(recipe)
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
    run(recipe)
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
    run(recipe)
    output = recipe.parent / "out"
    assert read_manifest(output / "few" / "shards")["num_documents"] == 1
    assert not (output / "few" / "shards-validation").exists()
    assert (output / "web" / "shards-validation" / "manifest.json").is_file()
    change(recipe, sources={**sources, "few": {**few, "val_fraction": 2}})
    assert main(["run", str(recipe), "--check"]) == 2
    assert "sources.few.val_fraction: 2 is not a number of at least 0" in capsys.readouterr().err


def test_progress_shows_every_phase(recipe, capsys):
    run(recipe)
    capsys.readouterr()
    assert main(["progress", str(recipe.parent / "out")]) == 0
    assert "web/clean/records/clean: " in capsys.readouterr().out
    assert main(["progress", str(recipe.parent / "raw")]) == 2


def test_bad_input_is_reported_with_file_and_line(recipe):
    (recipe.parent / "raw" / "2.jsonl").write_text('{"text": 3}\n')
    result = subprocess.run(
        [sys.executable, "-m", "data_prep", "run", str(recipe), "--workers", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "2.jsonl:1" in result.stderr
    assert "Traceback" not in result.stderr
