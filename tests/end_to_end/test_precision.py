"""Precision `auto` on ranks of two kinds of CPU, and over a resume from one kind to the other.

A CPU with instructions for bf16 is imitated by its name and the time of its products.
"""

from pathlib import Path

import pytest

from tests.end_to_end.recipe import STEP_TOKENS, recipe
from tests.launching import ROOT, rows, run_workers

WORKER = Path(__file__).with_name("precision_worker.py")
QUIET = ("--wandb", "off")
STEPS = 4


def flags(tmp_path, llama, corpus):
    words = recipe(llama, corpus, tmp_path / "run", ROOT / "ds_configs/zero2.json", STEPS, micro=4)
    return [*words, *QUIET, "--schedule", "constant", "--warmup_tokens", 0]


def test_ranks_on_which_auto_differs_are_refused_and_both_devices_named(
    tmp_path, llama, corpus
) -> None:
    output = run_workers(2, WORKER, 2, "0.5,57", *flags(tmp_path, llama, corpus))
    told = "in fp32 on CPU of ratio 57, but in bf16 on rank 0's CPU of ratio 0.5"
    assert told in output and "--precision bf16" in output
    assert not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.soak  # always: tests/zerolm/preflight/test_existing_run.py
def test_a_run_resumed_on_another_kind_of_cpu_keeps_its_precision(tmp_path, llama, corpus) -> None:
    command = flags(tmp_path, llama, corpus)
    first = run_workers(1, WORKER, 0, "0.5", *command)
    assert "ZeRO-2, bf16" in first and "training in" not in first
    longer = [*command, "--total_tokens", 2 * STEPS * STEP_TOKENS]
    output = run_workers(1, WORKER, 0, "57", *longer)
    assert "ZeRO-2, bf16" in output and "started with it on CPU of ratio 0.5" in output
    assert "bf16 is 57 times slower than float32 on CPU of ratio 57" in output
    assert f"resume: {tmp_path / 'run/checkpoints/step-00000004'}" in output
    assert sorted(rows(tmp_path / "run", "train/loss")) == list(range(1, 2 * STEPS + 1))
