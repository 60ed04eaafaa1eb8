"""Merged checkpoints and the moving average equal plain numpy on the weights of each step."""

import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.end_to_end import runs_in_one_process, test_optimizers
from tests.end_to_end.killed_runs import stopped_and_resumed
from tests.end_to_end.recipe import SEQ_LEN, STEP_TOKENS, profile, recipe
from tests.launching import ROOT, environment, rows
from zerolm.__main__ import main
from zerolm.checkpoint.directory import read
from zerolm.common.errors import CheckpointError, ConfigError
from zerolm.data import loader as data
from zerolm.ds_files.zero_files import Weights as CheckpointWeights
from zerolm.engine import ema
from zerolm.preflight import check
from zerolm.shards.reader import open_source

pytestmark = pytest.mark.soak  # always: tests/zerolm/export/test_merge.py

STEPS = 6
HALF_LIFE = 2 * STEP_TOKENS
BF16 = {1: False, 2: True, 3: False}
# ranks and stages; the last stage is also trained without an average
LAUNCHES = [(2, (3,)), (2, (1, 2)), (1, (1, 2, 3))]

Weights = dict[str, np.ndarray]


def flags_of(llama, corpus, held_out, run_dir: Path, json_file: Path) -> list[object]:
    flags = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    flags += ["--checkpoint_interval", 1, "--checkpoint_keep", STEPS, "--wandb", "off"]
    return [*flags, "--val_data", held_out, "--eval_interval", 2]


def trained(directory: Path) -> list[Weights]:
    """Return the engine's float32 weights after each step."""
    return [
        {name: each.numpy() for name, each in torch.load(path).items()}
        for path in sorted(directory.glob("*.pt"))
    ]


def read_model(directory: Path) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return {name: each.detach().numpy() for name, each in model.state_dict().items()}


def saved_average(run_dir: Path, step: int) -> tuple[Weights, float]:
    """Return the average in a checkpoint, and what its weights count."""
    checkpoint = read(run_dir / "checkpoints" / f"step-{step:08d}")
    weights = CheckpointWeights(checkpoint.directory, checkpoint.manifest, state=ema.STATE)
    average = {name: weights[name].numpy() for name in weights.shapes}
    return average, checkpoint.progress.features["ema"]["counted"]


def plain_average(steps: list[Weights], half_life: int = HALF_LIFE) -> Weights:
    """Return the mean of the weights of each step, those before a half-life counting half."""
    factors = [0.5 ** (STEP_TOKENS * age / half_life) for age in range(len(steps))][::-1]
    return {
        name: np.average([step[name].astype(np.float64) for step in steps], 0, factors)
        for name in steps[0]
    }


def require_close(found: Weights, expected: Weights, tolerance: float) -> None:
    """Compare with float64 results.

    Args:
        tolerance: relative to the largest value of each tensor.
    """
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        difference = np.abs(found[name] - values).max() / np.abs(values).max()
        assert difference <= tolerance, f"{name}: {difference:.1e}"


ROUNDED_ONCE = 2.0**-24  # from float64 to float32
ROUNDED_EACH_STEP = 2.0**-22


class Runs(NamedTuple):
    """Runs with an average, in `zeroN`, and one without, in `raw`."""

    directory: Path
    stages: tuple[int, ...]

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    @property
    def last(self) -> str:
        return f"zero{self.stages[-1]}"


@pytest.fixture(scope="module", params=LAUNCHES, ids=["2_ranks-3", "2_ranks-1_2", "1_rank"])
def runs(tmp_path_factory, request, llama, corpus, held_out) -> Runs:
    """Train with a checkpoint of every step and the engine's weights beside it."""
    ranks, stages = request.param
    directory, jobs = tmp_path_factory.mktemp("averages"), []
    for name, stage in [*((f"zero{stage}", stage) for stage in stages), ("raw", stages[-1])]:
        json_file = profile(directory / f"{name}.json", stage, BF16[stage])
        flags = flags_of(llama, corpus, held_out, directory / name, json_file)
        if name != "raw":
            flags += ["--ema_tokens", HALF_LIFE]
        weights = directory / f"{name}-weights"
        weights.mkdir()
        jobs.append({"flags": flags, "weights": weights})
    runs_in_one_process.launch(jobs, directory, ranks)
    return Runs(directory, stages)


def test_merges_equal_a_plain_computation(runs, tmp_path) -> None:
    for stage in runs.stages:
        require_merges(runs / f"zero{stage}", tmp_path)


def require_merges(run: Path, tmp_path: Path) -> None:
    steps = trained(run.with_name(f"{run.name}-weights"))
    names = steps[0].keys()

    def merged(what: str, *flags: object) -> Weights:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        argv = ["merge", *what.split(), out, "--precision", "fp32", *flags]
        assert main(list(map(str, argv))) == 0
        return read_model(out)

    mean = {name: np.mean([step[name] for step in steps], 0, dtype=np.float64) for name in names}
    found = merged(f"{run}")
    require_close(found, mean, ROUNDED_ONCE)
    # In any order, and with any names for the same checkpoints: the same bits.
    other = merged(
        f"{run}@4,6 {run}/checkpoints/step-00000005 {run}@:3", "--max_shard_size", "90kB"
    )
    assert all(np.array_equal(found[name], other[name]) for name in names)

    average = {name: steps[1][name].astype(np.float64) for name in names}
    for step in steps[2:]:
        average = {name: 0.75 * average[name] + 0.25 * step[name] for name in names}
    found = merged(f"{run}@2:", "--method", "ema", "--ema_decay", 0.75)
    require_close(found, average, ROUNDED_ONCE)

    # A linear decay over the updates of steps 3 to 6, which is 0 at the end.
    decayed = {name: steps[1][name].astype(np.float64) for name in names}
    factors = [7 / 8, 5 / 8, 3 / 8, 1 / 8]
    for factor, (before, after) in zip(factors, pairwise(steps[1:]), strict=True):
        for name in names:
            decayed[name] += factor * (after[name].astype(np.float64) - before[name])
    require_close(merged(f"{run}@2:6", "--method", "wsm"), decayed, ROUNDED_ONCE)


def test_a_merge_is_a_model_directory_or_nothing(runs, tmp_path) -> None:
    run, out = runs / runs.last, tmp_path / "out"
    argv = [sys.executable, "-m", "zerolm", "merge", str(run), str(out), "--max_shard_size", "90kB"]
    script = f"ulimit -f 60; exec {' '.join(argv)}"
    full = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert f"{out}: nothing was exported: " in full.stderr and "File too large" in full.stderr
    assert not list(tmp_path.iterdir())
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "checkpoints", damaged / "checkpoints")
    [file, *_] = sorted((damaged / "checkpoints" / "step-00000003").glob("*optim_states.pt"))
    with open(file, "r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        stream.write(b"damage")
    assert main(["merge", str(damaged), str(out)]) == 2
    assert not out.exists()
    assert main(argv[3:]) == 0
    card = ModelCard.load(out / "README.md")
    assert "merge of 6 checkpoints (mean)" in card.text and "eval_results" not in card.text
    assert f"| 6 | {6 * STEP_TOKENS:,} | 0.166667 | {runs.last} |" in card.text


def test_the_moving_average_equals_a_plain_computation(runs) -> None:
    for name in (f"zero{stage}" for stage in runs.stages):
        steps = trained(runs / f"{name}-weights")
        for step in range(1, STEPS + 1):
            average, counted = saved_average(runs / name, step)
            require_close(average, plain_average(steps[:step]), ROUNDED_EACH_STEP)
            assert math.isclose(counted, 1.0 - 0.5 ** (step * STEP_TOKENS / HALF_LIFE))


def test_a_run_with_an_average_has_the_bits_of_one_without(runs) -> None:
    """The weights are exchanged for each evaluation, and back: any difference would show."""
    for with_average, without in zip(
        *(sorted((runs / f"{name}-weights").glob("*.pt")) for name in (runs.last, "raw")),
        strict=True,
    ):
        ours, theirs = torch.load(with_average), torch.load(without)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for key in ("train/loss", "train/grad_norm", "train/param_norm", "eval/loss"):
        assert rows(runs / runs.last, key) == rows(runs / "raw", key)
    assert len(rows(runs / runs.last, "eval/ema_loss")) == 3
    assert not rows(runs / "raw", "eval/ema_loss")


def test_an_exported_average_has_the_loss_of_the_evaluation(runs, held_out, tmp_path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(runs / "raw"), str(out), "--ema"]) == 2
    assert main(["export", str(runs / runs.last), str(out), "--ema"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    options = {"seq_len": SEQ_LEN, "micro_batch_size": 2, "rank": 0, "world_size": 1}
    stream = data.ValidationStream([open_source(held_out)], num_sequences=10_000, **options)
    losses: list[float] = []
    for batch in stream:
        with torch.no_grad():
            logits_NV = model(input_ids=batch["input_ids"]).logits.float().flatten(0, 1)
        losses += torch.nn.functional.cross_entropy(
            logits_NV, batch["targets"].flatten(), reduction="none"
        )[batch["targets"].flatten() >= 0].tolist()
    found = rows(runs / runs.last, "eval/ema_loss")[STEPS]
    assert np.mean(losses) == pytest.approx(found, rel=1e-6)
    assert found != pytest.approx(rows(runs / runs.last, "eval/loss")[STEPS], rel=1e-4)
    card = ModelCard.load(out / "README.md")
    assert f"half-life of {HALF_LIFE} tokens" in card.text
    [result] = [each for each in card.data.eval_results if each.metric_type == "ema_loss"]
    assert result.metric_value == found and "| eval/loss |" not in card.text


def test_an_average_is_resharded_and_begins_and_ends_as_the_flags_say(
    tmp_path, llama, corpus, held_out
) -> None:
    """Two ranks with ZeRO-2, then one with ZeRO-3, then others; each half of a run."""
    weights = {name: tmp_path / f"{name}-weights" for name in ("moved", "added", "removed")}
    for directory in weights.values():
        directory.mkdir()
    files = {stage: profile(tmp_path / f"{stage}.json", stage, True) for stage in (2, 3)}

    def job(name: str, stage: int, until: int, *more: object) -> dict:
        flags = flags_of(llama, corpus, held_out, tmp_path / name, files[stage])
        return {"flags": [*flags, *more], "until": until, "weights": weights[name]}

    half_life = ["--ema_tokens", HALF_LIFE]
    first = [job("moved", 2, 3, *half_life), job("added", 2, 3), job("removed", 2, 3, *half_life)]
    runs_in_one_process.launch(first, tmp_path, 2)
    for name, flags in (("added", half_life), ("removed", ["--ema_tokens", 0])):
        with pytest.raises(ConfigError, match=r"settings\.ema_tokens: .*--accept_changes"):
            check.check([str(flag) for flag in job(name, 3, 0, *flags)["flags"]], {})
    accepted = "--accept_changes"
    second = [
        job("moved", 3, 0, *half_life),
        job("added", 3, 0, *half_life, accepted),
        job("removed", 3, 0, "--ema_tokens", 0, accepted),
    ]
    runs_in_one_process.launch(second, tmp_path, 1)
    average, _ = saved_average(tmp_path / "moved", STEPS)
    require_close(average, plain_average(trained(weights["moved"])), ROUNDED_EACH_STEP)
    average, counted = saved_average(tmp_path / "added", STEPS)
    require_close(average, plain_average(trained(weights["added"])[3:]), ROUNDED_EACH_STEP)
    assert math.isclose(counted, 1.0 - 0.5 ** (3 * STEP_TOKENS / HALF_LIFE))
    checkpoint = read(tmp_path / "removed" / "checkpoints" / f"step-{STEPS:08d}")
    assert "ema" not in checkpoint.progress.features
    assert max(rows(tmp_path / "removed", "eval/ema_loss")) == 3
    with pytest.raises(CheckpointError, match="'ema'"):
        saved_average(tmp_path / "removed", STEPS)


@pytest.mark.timeout(1500)
def test_every_optimizer_keeps_the_average(tmp_path, llama, corpus, held_out) -> None:
    cases = [
        test_optimizers.Case(test_optimizers.OWN, 3),
        *(test_optimizers.Case(test_optimizers.ADAMW, stage, offload=True) for stage in (1, 2, 3)),
        *(test_optimizers.Case(test_optimizers.MUON, stage, bf16=True) for stage in (1, 2, 3)),
        *(test_optimizers.Case(test_optimizers.MUON, stage, offload=True) for stage in (2, 3)),
        *(test_optimizers.Case(test_optimizers.LION, stage, offload=True) for stage in (2, 3)),
    ]
    jobs = []
    for case in cases:
        json_file = case.profile(tmp_path / f"{case.name}.json")
        flags = flags_of(llama, corpus, held_out, tmp_path / case.name, json_file)
        weights = tmp_path / f"{case.name}-weights"
        weights.mkdir()
        job = {"flags": [*flags, "--ema_tokens", HALF_LIFE], "weights": weights}
        jobs += stopped_and_resumed(job, 3)
    runs_in_one_process.launch(jobs, tmp_path, 2)
    for case in cases:
        average, _ = saved_average(tmp_path / case.name, STEPS)
        expected = plain_average(trained(tmp_path / f"{case.name}-weights"))
        require_close(average, expected, ROUNDED_EACH_STEP)
        assert set(rows(tmp_path / case.name, "eval/ema_loss")) == {2, 3, 4, 6}  # it stops at 3
