"""The names in a run directory: how they are parsed, and that one module alone spells them."""

import ast

import pytest

from tests import ROOT, tracked
from zerolm.run_dir.files import (
    RunFiles,
    checkpoint_directories,
    checkpoint_name,
    checkpoint_step,
)
from zerolm.upload.run_store import record_files

PATHS = [value for value in vars(RunFiles("run")).values() if value.suffix]
FILES = {"MANIFEST.json", "mirror.log"} | {path.name for path in PATHS}
WORDS = {  # that mean other things too, so only as a part of a path
    "lock", "supervisor", "checkpoints", "latest", "ranks", "uploads", "tensorboard", "wandb",
}  # fmt: skip


@pytest.mark.parametrize("step", [0, 1, 1000, 99_999_999, 100_000_000, 12_345_678_901])
def test_the_step_of_a_checkpoint_is_read_back_from_its_name(step):
    assert checkpoint_step(checkpoint_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["", "step-", "step-1", "step-0000001", "step-000000001", "step-00001000.sent", "latest",
     "step-00001000-2", ".tmp-step-00001000", "damaged-step-00001000", "step--0000100",
     "step-0000100a", "step-00001000\n", "step-٠٠٠٠١٠٠٠"],
)  # fmt: skip
def test_other_names_are_no_checkpoints(tmp_path, name):
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        checkpoint_step(name)
    if name:
        (tmp_path / name).mkdir()
    assert checkpoint_directories(tmp_path) == []


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    steps = [0, 9, 10, 99_999_999, 100_000_000]
    for step in reversed(steps):
        (tmp_path / checkpoint_name(step)).mkdir()
    assert [checkpoint_step(path.name) for path in checkpoint_directories(tmp_path)] == steps
    assert checkpoint_directories(tmp_path / "absent") == []


def test_files_of_ranks_that_a_start_does_not_have_are_stale(tmp_path):
    files = RunFiles(tmp_path)
    files.ranks.mkdir()
    kept = [files.heartbeat(1), files.stacks(1)]
    stale = [
        files.heartbeat(2),
        files.stacks(100_000),
        files.verdict("ab"),
        files.stop_request("ab"),
    ]
    for path in (*kept, *stale):
        path.touch()
    assert sorted(files.stale_rank_files(world_size=2)) == sorted(stale)
    assert files.heartbeats() == [files.heartbeat(1), files.heartbeat(2)]


def test_what_is_sent_with_a_checkpoint_is_named_relative_to_the_run(tmp_path):
    files = RunFiles(tmp_path)
    for rollback in (2, 1):
        files.archived_metrics(rollback).touch()
    assert record_files(tmp_path) == [
        "run.json", "rollbacks.json", "metrics.jsonl", "events.jsonl", "samples.jsonl",
        "hellaswag.json", "core.json", "metrics-rolled-back-0001.jsonl",
        "metrics-rolled-back-0002.jsonl", "rank0-earlier.log", "rank0.log", "wandb/run.json",
    ]  # fmt: skip


def test_the_names_are_spelt_in_one_module_only():
    found = []
    for path in tracked("zerolm/**/*.py", "launch/**/*.py"):
        if path.parts[-2:] == ("run_dir", "files.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = FILES
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                node, names = node.right, FILES | WORDS
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert not found
