"""Branches of one WSD trunk equal runs that had the branch's settings from their first step."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end import run_digest
from tests.end_to_end.recipe import BATCH, SEQ_LEN, STEP_TOKENS, profile, recipe
from tests.launching import rows, run_ranks, write_shards

pytestmark = pytest.mark.soak
STEPS, DECAY, WARMUP = 60, 10, 5
# What depends on the machine, and the number of a stage, which a trunk of one stage does not log.
UNLIKE = ("throughput/", "memory/", "checkpoint/", "store/", "loader/", "data/stage")


class Family:
    """The inputs of the runs, which all have the same sources, model and profile."""

    def __init__(self, base: Path, llama: Path, corpus: Path, held_out: Path):
        self.base, self.llama, self.held_out = base, llama, held_out
        self.code = write_shards(base / "code", 200, seed=5)
        self.data = [f"{corpus}=3", f"{self.code}=1"]
        self.profile = profile(base / "zero2.json", 2, bf16=False)

    def scratch(self, name: str, steps: int, decay: int, *more: object, **environment: str) -> Path:
        """Train from step 0, unless an earlier test has; return the run directory."""
        run_dir = self.base / name
        if run_dir.exists():
            return run_dir
        flags = recipe(self.llama, self.data[0], run_dir, self.profile, steps, micro=2)
        flags += ["--data", self.data[1], "--schedule", "wsd", "--warmup_tokens"]
        flags += [WARMUP * STEP_TOKENS, "--decay_tokens", decay * STEP_TOKENS]
        flags += ["--val_data", self.held_out, "--eval_tokens", 640, "--eval_interval", 10]
        flags += ["--checkpoint_interval", 10, "--checkpoint_keep", 20, *more]
        done = run_ranks(2, *flags, **environment)
        assert done.returncode == 0, done.stdout[-4000:]
        return run_dir

    def branch(
        self, name: str, *flags: object, ranks: int = 2, code: int | None = 0, **more: str
    ) -> Path:
        """Start a branch; return its directory. A `code` of None is any failure."""
        run_dir = self.base / name
        done = run_ranks(ranks, *flags, "--run_dir", run_dir, **more)
        expected = done.returncode == code if code is not None else done.returncode not in (0, 75)
        assert expected, done.stdout[-4000:]
        self.output = done.stdout
        return run_dir


@pytest.fixture(scope="module")
def family(tmp_path_factory, llama, corpus, held_out) -> Family:
    found = Family(tmp_path_factory.mktemp("family"), llama, corpus, held_out)
    found.scratch("trunk", STEPS, 20)
    return found


def decay(step: int) -> tuple[object, ...]:
    return ("--total_tokens", (step + DECAY) * STEP_TOKENS)


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return every metric of every step that is a function of the run alone."""
    found: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept = {key: value for key, value in row.items() if not key.startswith(UNLIKE)}
        found.setdefault(row["step"], {}).update(kept)
    return found


def require_equal(run_dir: Path, reference: Path, steps: int) -> None:
    assert run_digest.differences(*map(run_digest.digest, (run_dir, reference))) == []
    ours, theirs = metrics(run_dir), metrics(reference)
    assert ours == theirs
    assert sorted(ours) == list(range(1, steps + 1))
    assert all("train/grad_norm" in row for row in ours.values())
    assert {step for step in ours if "eval/loss" in ours[step]} == set(range(10, steps + 1, 10))


@pytest.mark.parametrize("step", [10, 20, 40])
def test_a_decay_equals_a_run_that_decayed_there_from_the_start(family, step) -> None:
    trunk = family.base / "trunk"
    reference = family.scratch(f"scratch-{step}", step + DECAY, DECAY)
    flags = ("--branch", f"{trunk}@{step}", *decay(step))
    run_dir = family.branch(f"decay-{step}", *flags)
    require_equal(run_dir, reference, step + DECAY)
    assert metrics(trunk)[step + DECAY] != metrics(run_dir)[step + DECAY]


def test_a_branch_killed_in_its_first_step_resumes_without_its_trunk(family) -> None:
    trunk, reference = family.base / "trunk", family.scratch("scratch-20", 30, DECAY)
    flags = ("--branch", f"{trunk}@20", *decay(20))
    fault = {"FAULT": "step.backward:*:21:kill"}
    run_dir = family.branch("killed", *flags, code=None, **fault)
    steps = [path.name for path in (run_dir / "checkpoints").glob("step-*")]
    assert steps == ["step-00000020"] and max(rows(run_dir, "train/loss")) == 20
    moved = trunk.rename(trunk.with_name("moved"))
    try:
        family.branch("killed", *flags)
    finally:
        moved.rename(trunk)
    require_equal(run_dir, reference, 30)
    names = [json.loads(line)["event"] for line in open(run_dir / "events.jsonl")]
    assert names.count("branched") == 1 and names.count("resume") == 2


def test_another_stage_and_world_size_agree_to_rounding(family, tmp_path) -> None:
    reference = family.scratch("scratch-40", 50, DECAY)
    flags = ("--branch", f"{family.base / 'trunk'}@40", *decay(40))
    stage = profile(tmp_path / "zero3.json", 3, bf16=False)
    run_dir = family.branch("resharded", *flags, "--deepspeed_config", stage, ranks=1)
    assert "ZeRO-2 -> ZeRO-3" in family.output or "resharded" in family.output
    ours, theirs = rows(run_dir, "train/loss"), rows(reference, "train/loss")
    assert len(ours) == 50 and ours.keys() == theirs.keys()
    largest = max(abs(ours[step] - theirs[step]) for step in ours)
    print(f"largest difference of a loss: {largest:.2e}")
    assert largest < 1e-5


def test_other_weights_and_a_branch_of_that_branch_equal_runs_from_the_start(family) -> None:
    data = [family.data[0].rpartition("=")[0] + "=1", family.data[1]]
    flags = ("--branch", f"{family.base / 'trunk'}@20", "--data", data[0], "--data", data[1])
    run_dir = family.branch("mixed", *flags)
    start = math.ceil(20 * BATCH / 64) * 64 * SEQ_LEN  # the next mixing block
    stage = ("--data_stage", f"{start}:counting=1,code=1")
    require_equal(run_dir, family.scratch("scratch-mixed", STEPS, 20, *stage), STEPS)
    second = family.branch("second", "--branch", f"{run_dir}@30", *decay(30))
    require_equal(second, family.scratch("scratch-second", 40, DECAY, *stage), 40)
    record = json.loads((second / "run.json").read_text())["branch"]
    assert [record["step"], record["branch"]["step"]] == [30, 20]
    family.branch("mixed", *flags)  # done: the same command has nothing left to do


SPIKES = ",".join(f"step.backward:{rank}:{step}:x10" for step in (30, 31, 32) for rank in (0, 1))
ROLLBACK = ("--spike_window", 16, "--rollback_after", 3, "--rollback_margin", 2)


def test_a_branch_after_a_rollback_leaves_out_what_the_trunk_skipped(family, tmp_path) -> None:
    found = {}
    for name, steps, length in (("rolled-back", STEPS, 20), ("scratch-rolled-back", 50, DECAY)):
        (once := tmp_path / name).mkdir()
        faults = {"FAULT": SPIKES, "FAULT_ONCE": str(once)}
        found[name] = family.scratch(name, steps, length, *ROLLBACK, **faults)
    trunk, reference = found.values()
    run_dir = family.branch("after-rollback", "--branch", f"{trunk}@40", *decay(40))
    require_equal(run_dir, reference, 50)
    progress = run_digest.digest(run_dir)["progress"]
    assert progress["rollbacks"] == 1 and len(progress["skipped_windows"]) == 1
