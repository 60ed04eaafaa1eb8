"""The tokenizer of a run is found from any directory, or a line names where it was looked for."""

import json
from pathlib import Path

import pytest

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from zerolm.export.tokenizer import missing_tokenizer, tokenizer_of
from zerolm.shards.writer import ShardWriter


def write_run(home: Path, **record) -> Path:
    """Write shards and run.json of a run that was started in `home`; return its directory."""
    shards = home / "shards" / "web"
    entry = {"name": "tokenizer", "fingerprint": "0" * 64, "files": []}
    with ShardWriter(shards, vocab_size=260, eos_id=0, tokenizer=entry) as writer:
        writer.add([5, 6, 7, 0])
    train_bpe(["some words"] * 9, BpeOptions(260), shards / "tokenizer", progress=False)
    run_dir = home / "runs" / "first"
    run_dir.mkdir(parents=True)
    settings = {"data": ["shards/web=0.7", "shards/gone=0.3"], "run_dir": "runs/first"}
    settings |= record.pop("settings", {})
    (run_dir / "run.json").write_text(json.dumps({"settings": settings, **record}))
    return run_dir


@pytest.mark.parametrize("known", ["working directory", "run directory"])
def test_relative_shards_are_found_from_another_directory(known, tmp_path, monkeypatch):
    home = tmp_path / "home"
    record = {"working_directory": str(home), "settings": {"run_dir": "/elsewhere"}}
    run_dir = write_run(home, **(record if known == "working directory" else {}))
    other = tmp_path / "other"
    write_run(other)  # has shards of the same name, which are not the run's
    monkeypatch.chdir(other)
    assert tokenizer_of(run_dir) == (home / "shards" / "web" / "tokenizer", 0)
    moved = home.rename(tmp_path / "moved") / "runs" / "first"
    if known == "run directory":
        assert tokenizer_of(moved)[0] == tmp_path / "moved" / "shards" / "web" / "tokenizer"
    else:
        assert tokenizer_of(moved) == (None, None)
        assert missing_tokenizer(moved) == (
            f"{moved}/run.json: settings.data: no manifest.json in {home}/shards/web"
        )


def test_an_old_record_without_directories_belongs_to_the_current_one(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "home", settings={"run_dir": str(tmp_path)})
    monkeypatch.chdir(tmp_path / "home")
    assert tokenizer_of(run_dir)[0] == tmp_path / "home" / "shards" / "web" / "tokenizer"
    monkeypatch.chdir(tmp_path)
    assert tokenizer_of(run_dir) == (None, None)
    assert missing_tokenizer(run_dir).endswith(f"no manifest.json in {tmp_path}/shards/web")
