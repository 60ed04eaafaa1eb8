"""Runs that do not complete: refused, diverged, or started in a directory that is in use."""

import json

import pytest

from tests.end_to_end.recipe import profile, recipe
from tests.launching import run_ranks
from zerolm.preflight import check
from zerolm.train import run_directory


def file_names(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_problems_of_three_files_are_reported_at_once_and_nothing_is_written(
    tmp_path, llama, corpus
) -> None:
    typos = json.loads(profile(tmp_path / "ds.json", 2, False).read_text())
    typos["gradient_cliping"] = 1.0
    (tmp_path / "ds.json").write_text(json.dumps(typos))
    model = {**json.loads(llama.read_text()), "num_hiden_layers": 3}
    (tmp_path / "model.json").write_text(json.dumps(model))
    flags = recipe(tmp_path / "model.json", corpus, tmp_path / "run", tmp_path / "ds.json", 2, 2)
    before = file_names(tmp_path)
    refused = run_ranks(2, *flags, "--learning_rat", 1)
    assert refused.returncode == 2
    for expected in ("gradient_cliping", "num_hiden_layers", "learning_rat", "Did you mean"):
        assert refused.stdout.count(expected) >= 1, refused.stdout[-3000:]
    assert "Traceback" not in refused.stdout
    assert refused.stdout.count("refused, nothing was written") == 1
    assert file_names(tmp_path) == before


def test_check_runs_without_ranks_and_writes_nothing(tmp_path, llama, corpus) -> None:
    flags = recipe(llama, corpus, tmp_path / "run", profile(tmp_path / "ds.json", 3, False), 2, 1)
    flags[flags.index("--batch_tokens") + 1] = 512 * 32
    plan = check.check(
        [*map(str, flags), "--check", "--world_size", "512", "--hardware", "H100"], {}
    )
    assert "139,584 parameters" in plan.summary() and "512 rank(s)" in plan.summary()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_a_diverging_run_gives_up_and_saves_no_nan(tmp_path, llama, corpus, stage) -> None:
    json_file = profile(tmp_path / "ds.json", stage, False)
    flags = recipe(llama, corpus, tmp_path / "run", json_file, 50, 2)
    flags[flags.index("--learning_rate") + 1] = 1e30
    flags += ["--warmup_tokens", 0, "--checkpoint_interval", 1, "--wandb", "off"]
    done = run_ranks(2, *flags, "--schedule", "constant")
    assert done.returncode == 76, done.stdout[-3000:]
    assert "Traceback" not in done.stdout
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"gave_up"' in events
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/MANIFEST.json"):
        step = json.loads(manifest.read_text())["progress"]["step"]
        assert f"step-{step:08d}" in done.stdout, "the last good checkpoint is reported"


def test_a_second_run_in_one_directory_is_refused(tmp_path, llama, corpus) -> None:
    run_dir = tmp_path / "run"
    lock = run_directory.claim(run_dir)
    flags = recipe(llama, corpus, run_dir, profile(tmp_path / "ds.json", 2, False), 2, 2)
    refused = run_ranks(1, *flags)
    assert refused.returncode == 2
    assert "another run is writing to it now" in refused.stdout
    lock.release()
