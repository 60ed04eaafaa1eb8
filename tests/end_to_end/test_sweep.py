"""A sweep of real runs that is killed in the middle ends like one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.launching import LLAMA, environment, write_json, write_shards


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_killed_sweep_has_the_results_of_one_that_was_not(tmp_path):
    data, held_out = write_shards(tmp_path / "data"), write_shards(tmp_path / "val", 40, seed=1)
    model = write_json(tmp_path / "model.json", LLAMA)
    profile = write_json(tmp_path / "zero1.json", {"zero_optimization": {"stage": 1}})

    def command(run_dir: Path) -> list[str]:
        words = ["sweep", "--set", "learning_rate=1e-3,4e-3,16e-3", "--set", "seed=0,1"]
        words += ["--model_config", model, "--deepspeed_config", profile, "--data", data]
        words += ["--val_data", held_out, "--seq_len", 32, "--batch_tokens", 256]
        words += ["--total_tokens", 8192, "--precision", "fp32", "--num_gpus", 1]
        words += ["--jobs", 2, "--run_dir", run_dir]
        return [sys.executable, "-m", "zerolm", *map(str, words)]

    def losses(run_dir: Path) -> dict[str, float]:
        record = json.loads((run_dir / "sweep.json").read_text())
        return {point["name"]: point["loss"] for point in record["points"]}

    options = {"cwd": ROOT, "env": environment()}
    subprocess.run(command(tmp_path / "whole"), check=True, timeout=900, **options)
    with subprocess.Popen(command(tmp_path / "killed"), **options) as process:
        metrics = tmp_path / "killed" / "learning_rate=0.004,seed=0" / "metrics.jsonl"
        deadline = time.monotonic() + 600
        while not (metrics.is_file() and metrics.read_text().count("\n") > 5):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(20)  # its runs save and stop
    subprocess.run(command(tmp_path / "killed"), check=True, timeout=900, **options)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
