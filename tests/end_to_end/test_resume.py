"""A killed run equals an uninterrupted one; a stopped run saves."""

import os
import random
import signal
from pathlib import Path

import pytest

from tests.end_to_end.killed_runs import kill_at, resume, wait_for_step
from tests.end_to_end.recipe import STEP_TOKENS, profile, recipe
from tests.launching import events, kill_session, rows, run_ranks, start_ranks
from zerolm.__main__ import main
from zerolm.watchdog.progress import read_heartbeats

STEPS, SAVE, VALIDATE = 40, 5, 20
HEALTH = ("clipped_share", "param_norm/layers.0", "update_ratio", "update_ratio/embed_tokens")
COMPARED = (
    *("train/loss", "train/grad_norm", "train/learning_rate", "train/param_norm"),
    *("eval/loss", "eval/ema_loss"),
    *(f"train/{name}" for name in HEALTH),
)


def run_flags(llama, corpus, held_out, run_dir: Path, json_file: Path) -> list[object]:
    arguments = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    arguments += ["--val_data", held_out, "--eval_tokens", 640, "--eval_interval", VALIDATE]
    arguments += ["--ema_tokens", 10 * STEP_TOKENS]
    return [*arguments, "--checkpoint_interval", SAVE, "--checkpoint_keep", 2]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


@pytest.mark.soak  # always: test_checkpoints.py and test_supervision.py
@pytest.mark.parametrize(
    ("bf16", "stage", "more"),
    [(False, 2, []), (False, 3, []), (True, 2, []), (True, 3, []), (True, 3, ["--fp8"])],
    ids=["fp32-2", "fp32-3", "bf16-2", "bf16-3", "fp8-3"],
)
def test_a_killed_run_equals_an_uninterrupted_one(
    tmp_path, llama, corpus, held_out, stage, bf16, more
) -> None:
    json_file = profile(tmp_path / "ds.json", stage, bf16)
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    done = run_ranks(2, *run_flags(llama, corpus, held_out, uninterrupted, json_file), *more)
    assert done.returncode == 0, done.stdout[-4000:]
    step = random.randint(2 * SAVE, STEPS - 20)  # the second save waits for the first
    before = shared_memory()
    flags = [*run_flags(llama, corpus, held_out, killed, json_file), *more]
    kill_at(step, killed, flags)
    assert shared_memory() <= before, "a killed run must leave nothing in /dev/shm"
    resume(killed, flags)
    for key in COMPARED:
        expected = rows(uninterrupted, key)
        assert len(expected) == (
            STEPS // VALIDATE if key in ("eval/loss", "eval/ema_loss") else STEPS
        )
        assert rows(killed, key) == expected, f"killed at step {step}: {key} differs"
    noise = rows(uninterrupted, "train/noise_scale_tokens")
    assert len(noise) > STEPS / 2 and rows(killed, "train/noise_scale_tokens") == noise


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, llama, corpus, held_out):
    """A run that stopped because of a SIGTERM to one rank: (directory, exit codes, log)."""
    base = tmp_path_factory.mktemp("stopped")
    run_dir = base / "run"
    json_file = profile(base / "ds.json", 2, bf16=False)
    arguments = run_flags(llama, corpus, held_out, run_dir, json_file)
    with open(base / "log", "w") as log:
        ranks = start_ranks(2, log, *arguments)
    try:
        wait_for_step(run_dir, 8, seconds=120)
        os.kill(read_heartbeats(run_dir)[1]["pid"], signal.SIGTERM)
        codes = ranks.codes(timeout=60)
    finally:
        kill_session(ranks.session)
    return run_dir, codes, (base / "log").read_text()


def test_a_stop_on_request_saves_and_exits_75(stopped) -> None:
    run_dir, codes, log = stopped
    assert dict(codes or []) == {0: 75, 1: 75}, log[-4000:]
    last = events(run_dir)[-1]
    assert last["event"] == "stopped" and last["reason"] == "SIGTERM"
    pointer = (run_dir / "checkpoints" / "latest").read_text().strip()
    assert pointer == f"step-{last['step']:08d}"
    assert main(["verify-checkpoint", str(run_dir)]) == 0
