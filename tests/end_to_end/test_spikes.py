"""Injected spikes: every rank responds as configured, and nothing else changes."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.end_to_end.recipe import BATCH, STEP_TOKENS, profile, recipe
from tests.end_to_end.run_digest import differences, digest, losses, newest_checkpoint, tensors
from tests.launching import events, rows, run_ranks, write_json
from tests.ledger import read_sequences

# The steps of three different anomalies, each of which is skipped.
NAN, INF, X10 = 10, 14, 20


def on_both_ranks(step: int, action: str) -> str:
    return f"step.backward:0:{step}:{action},step.backward:1:{step}:{action}"


def learned(run_dir: Path) -> dict[str, str]:
    """Return weights and optimizer states, without DeepSpeed's counters of steps."""
    counters = re.compile(r": (global_steps|global_samples|skipped_steps|micro_steps|overflow)$")
    values = tensors(newest_checkpoint(run_dir))
    return {key: value for key, value in values.items() if not counters.search(key)}


def assert_no_nan(run_dir: Path) -> None:
    for path in run_dir.glob("checkpoints/*step-*/*.pt"):
        stack = [torch.load(path, weights_only=False)]  # our own file
        while stack:
            value = stack.pop()
            if isinstance(value, torch.Tensor):
                assert not value.is_floating_point() or value.isfinite().all(), path
            elif isinstance(value, (dict, list, tuple)):
                stack += value.values() if isinstance(value, dict) else value


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 3])
def test_skipped_steps_equal_a_run_without_their_batches(tmp_path, llama, corpus, stage) -> None:
    json_file = profile(tmp_path / "ds.json", stage, bf16=stage == 3)
    run, reference = tmp_path / "run", tmp_path / "reference"
    ledgers = [tmp_path / "ledger", tmp_path / "reference-ledger"]
    for directory in (*ledgers, reference):
        directory.mkdir()
    policy = ["--spike_window", 16, "--cooldown_after", 0, "--wandb", "off"]
    done = run_ranks(
        2,
        *recipe(llama, corpus, run, json_file, 24, 2),
        *policy,
        FAULT=f"step.backward:1:{NAN}:nan,step.backward:0:{INF}:inf,{on_both_ranks(X10, 'x10')}",
        ZEROLM_LEDGER=str(ledgers[0]),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    skipped = events(run, "step_skipped")
    assert [event["step"] for event in skipped] == [NAN, INF, X10]
    windows = [event["sequences"] for event in skipped]
    assert windows == [[BATCH * (step - 1), BATCH * step] for step in (NAN, INF, X10)]
    assert "nan" in skipped[0]["reason"] and "gradients" in skipped[1]["reason"]
    assert "deviations above" in skipped[2]["reason"]

    # The reference never draws those batches: its order leaves them out from the start.
    entry = {
        "number": 1, "from_step": 0, "to_step": 0, "checkpoint": "", "skipped_steps": 0,
        "spikes": 0, "skipped_windows": windows, "skipped_window": windows[0],
    }  # fmt: skip
    write_json(reference / "rollbacks.json", {"rollbacks": [entry]})
    done = run_ranks(
        2,
        *recipe(llama, corpus, reference, json_file, 24, 2),
        *policy,
        ZEROLM_LEDGER=str(ledgers[1]),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    taken = [loss for step, loss in losses(run).items() if step not in (NAN, INF, X10)]
    assert taken == list(losses(reference).values()) and len(taken) == 24
    rates = [
        rate
        for step, rate in rows(run, "train/learning_rate").items()
        if step not in (NAN, INF, X10)
    ]
    assert rates == list(rows(reference, "train/learning_rate").values())
    assert list(read_sequences(ledgers[0]).values()) == list(read_sequences(ledgers[1]).values())
    steps_of_ranks = [
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for path in ledgers[0].glob("rank-*.jsonl")
    ]
    assert len(steps_of_ranks) == 2 and steps_of_ranks[0] == steps_of_ranks[1], (
        "all ranks must skip the same steps"
    )
    trained = {number for numbers in read_sequences(ledgers[0]).values() for number in numbers}
    left_out = {number for start, end in windows for number in range(start, end)}
    assert trained == set(range(27 * BATCH)) - left_out, (
        "the missing sequences must be those of the events"
    )
    assert differences({"": learned(run)}, {"": learned(reference)}) == []
    assert rows(run, "health/skipped_steps")[27] == rows(run, "health/spikes")[27] == 3
    manifest = json.loads((newest_checkpoint(run) / "MANIFEST.json").read_text())
    assert manifest["progress"]["tokens"] == 24 * STEP_TOKENS
    assert_no_nan(run)


SPIKE = [on_both_ranks(step, "x10") for step in (30, 31, 32)]
ROLLBACK = ["--spike_window", 16, "--rollback_after", 3, "--rollback_margin", 2]
ROLLBACK += ["--cooldown_after", 2, "--checkpoint_interval", 10, "--wandb", "off"]


KILLS = ["rollback.recorded:0:32:kill", "rollback.aside:0:30:kill", "step.end:1:36:kill"]


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_rollback_equals_an_uninterrupted_one(tmp_path, llama, corpus, stage) -> None:
    json_file = profile(tmp_path / "ds.json", stage, bf16=stage == 2)
    digests = {}
    for name, faults, workers in (("reference", [], 2), ("killed", KILLS, 0)):
        run_dir, ledger, once = (tmp_path / f"{name}{part}" for part in ("", "-ledger", "-once"))
        ledger.mkdir()
        once.mkdir()
        flags = [*recipe(llama, corpus, run_dir, json_file, 45, 2), *ROLLBACK]
        for number in range(len(faults) + 1):
            done = run_ranks(
                2,
                *flags,
                "--num_workers",
                workers,
                FAULT=",".join([*SPIKE, *faults]),
                FAULT_ONCE=str(once),
                ZEROLM_LEDGER=str(ledger),
            )
            assert (done.returncode == 0) == (number == len(faults)), done.stdout[-4000:]
        digests[name] = digest(run_dir, ledger)
    assert differences(digests["killed"], digests["reference"]) == []

    progress, ledger = digests["reference"]["progress"], digests["reference"]["ledger"]
    window = [BATCH * 27, BATCH * 32]  # two good steps before step 30, to the end of step 32
    assert progress["skipped_windows"] == [window] and progress["rollbacks"] == 1
    assert (progress["step"], progress["position"], progress["tokens"]) == (45, 360, 45 * 256)
    trained = sorted(number for numbers in ledger.values() for number in numbers)
    assert trained == [*range(window[0]), *range(window[1], 45 * BATCH + window[1] - window[0])]
    for name in digests:
        run_dir = tmp_path / name
        assert json.loads((run_dir / "run.json").read_text())["skipped_windows"] == [window]
        (rolled_back,) = events(run_dir, "rollback")
        assert (rolled_back["to_step"], rolled_back["skipped_window"]) == (20, window)
        archive = (run_dir / "metrics-rolled-back-0001.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in archive if "train/loss" in line]
        assert steps == list(range(21, 33)), "the steps must be archived, not lost"
        assert rows(run_dir, "health/rollbacks")[45] == 1
        kept = {path.name for path in (run_dir / "checkpoints").glob("*step-*")}
        assert {f"step-000000{step}" for step in (30, 40, 45)} <= kept
        assert "rolled-back-0001-step-00000030" in kept
        assert_no_nan(run_dir)


@pytest.mark.soak
def test_a_run_killed_during_a_spike_responds_the_same_after_resuming(
    tmp_path, llama, corpus
) -> None:
    """The checkpoint of step 30 is from within the spike; an anomaly after it lowers the rate."""
    json_file = profile(tmp_path / "ds.json", 2, bf16=False)
    spikes = ",".join([*SPIKE[:2], on_both_ranks(38, "inf")])
    policy = [*ROLLBACK, "--rollback_after", 5, "--cooldown_steps", 4]
    digests = []
    published = [f"step.begin:*:{step}:sleep=1" for step in (31, 32)]  # the checkpoint of step 30
    kill = ",".join(["", *published, "step.backward:0:32:kill"])
    for name, launches in (("reference", [""]), ("killed", [kill, ""])):
        for kill in launches:
            done = run_ranks(
                2,
                *recipe(llama, corpus, tmp_path / name, json_file, 40, 2),
                *policy,
                FAULT=spikes + kill,
            )
            assert (done.returncode == 0) == (not kill), done.stdout[-4000:]
        digests.append(digest(tmp_path / name))
    assert differences(digests[1], digests[0]) == []
    steps = [
        (event["event"], event["step"])
        for event in events(tmp_path / "killed")
        if event["event"] in ("cooldown", "resume")
    ]
    assert steps == [("cooldown", 31), ("resume", 30), ("cooldown", 31), ("cooldown", 38)]
    rates = [rows(tmp_path / name, "train/learning_rate") for name in ("reference", "killed")]
    assert rates[0] == rates[1]
    assert rates[0][35] < 0.6 * rates[0][36], "the rate is restored after four accepted steps"
    assert digests[0]["progress"]["spikes"] == 3


def test_a_repeated_spike_exhausts_the_rollback_budget(tmp_path, llama, corpus) -> None:
    """Without FAULT_ONCE the spike occurs again after each rollback."""
    run = tmp_path / "run"
    flags = recipe(llama, corpus, run, profile(tmp_path / "ds.json", 2, bf16=False), 45, 2)
    done = run_ranks(2, *flags, *ROLLBACK, "--max_rollbacks", 1, FAULT=",".join(SPIKE))
    assert done.returncode == 76, done.stdout[-4000:]
    assert "Traceback" not in done.stdout
    assert "The limit --max_rollbacks 1 is reached" in done.stdout
    (gave_up,) = events(run, "gave_up")
    assert "step-00000020" in gave_up["reason"], "the last good checkpoint is from before the spike"
    (cooldown, _) = events(run, "cooldown")
    assert cooldown["step"] == 31
    archive = (run / "metrics-rolled-back-0001.jsonl").read_text().splitlines()
    rate = {row["step"]: row.get("train/learning_rate") for row in map(json.loads, archive)}
    assert rate[32] == pytest.approx(rate[31] / 2, rel=1e-6), (
        "the tokens are the same, the rate is halved"
    )
    assert_no_nan(run)


@pytest.mark.soak
def test_a_rollback_to_a_checkpoint_of_another_order_skips_the_data_of_the_spike(
    tmp_path, llama, corpus
) -> None:
    """The run has resumed at step 20 with another seed; the spike is after its first steps."""
    run, once = tmp_path / "run", tmp_path / "once"
    once.mkdir()
    json_file = profile(tmp_path / "ds.json", 2, bf16=False)
    policy = [*ROLLBACK, "--rollback_after", 2, "--rollback_margin", 0]
    stopped = run_ranks(
        1, *recipe(llama, corpus, run, json_file, 30, 2), *policy, FAULT="step.begin:0:29:kill"
    )
    assert stopped.returncode != 0
    done = run_ranks(
        1,
        *recipe(llama, corpus, run, json_file, 30, 2),
        *policy,
        "--seed",
        7,
        "--accept_changes",
        FAULT=",".join(f"step.backward:0:{step}:nan" for step in (24, 25)),
        FAULT_ONCE=str(once),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (rolled_back,) = events(run, "rollback")
    window = [BATCH * 23, BATCH * 25]
    assert (rolled_back["to_step"], rolled_back["skipped_window"]) == (20, window)
    manifest = json.loads((newest_checkpoint(run) / "MANIFEST.json").read_text())
    assert manifest["progress"]["skipped_windows"] == [window]
