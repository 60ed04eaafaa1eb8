"""Every number of the report and of `zerolm status`, beside one computed from the files.

The reference reads metrics.jsonl, its archives and events.jsonl with `json` alone, and shares no
code with the product. The run has restarts, a rollback, two sources, and evaluations of many kinds.
"""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.zerolm.report.run_directories import write_heartbeats, write_lines
from zerolm.report.report_data import report_data
from zerolm.report.run_history import read_run
from zerolm.report.status import plain_lines, status_of

TOTAL_STEPS, LOG, EVAL, SAVE, BATCH = 400, 2, 20, 40, 512
UNDONE = (120, 150)  # steps of the rollback: to, from
STOPPED = (77, 203)  # the last steps of the starts that a fault ended
Row = dict[str, Any]


def rows_of(first: int, last: int, seed: int) -> list[Row]:
    """Return the lines of some steps, as a run writes them."""
    draw = random.Random(seed)
    rows: list[Row] = []
    for step in range(first, last + 1):
        where = {"step": step, "tokens": step * BATCH}
        if step % LOG == 0:
            seconds = draw.uniform(0.5, 1.5)
            row = where | {"train/loss": 3 + 5 / step + draw.gauss(0, 0.02)}
            row |= {"train/learning_rate": 1e-3, "train/grad_norm": draw.uniform(0.5, 1)}
            row |= {"throughput/step_seconds": seconds, "throughput/data_seconds": seconds / 4}
            row |= {
                "throughput/tokens_per_second": BATCH / seconds,
                "throughput/mfu": 0.3 / seconds,
            }
            for place, source in enumerate(("web", "code")):
                row |= {f"data/{source}/loss": 3 + place, f"data/{source}/epochs": step / 90}
            row |= {"health/skipped_steps": 3, "health/rollbacks": 1}
            row |= {"train/perplexity": None} if step == 302 else {}
            rows.append(row)
        if step % EVAL == 0:
            loss = 3.2 + 4 / step + draw.gauss(0, 0.1)
            row = where | {"eval/loss": loss, "eval/perplexity": math.exp(loss)}
            row |= {"eval/bits_per_byte": loss / 3, "eval/web/loss": loss + 0.1}
            row |= {"eval/code/loss": loss - 0.1, "eval/web/bits_per_byte": loss / 2.9}
            rows.append(row)
            row = where | {"eval/hellaswag/acc": draw.random(), "eval/hellaswag/items": 1000}
            row |= {"eval/hellaswag/acc_norm": draw.random(), "eval/core": draw.random()}
            row |= {"eval/arc/acc_norm": draw.random(), "eval/suite_bpb/bpb": draw.random()}
            row |= {"eval/wiki/word_perplexity": draw.uniform(9, 99), "eval/odd/unknown": step}
            rows.append(row)
        if step % SAVE == 0:
            copy, wait = draw.uniform(0.2, 0.4), draw.uniform(0, 3)
            row = where | {"checkpoint/copy_seconds": copy, "checkpoint/wait_seconds": wait}
            rows.append(row | {"checkpoint/stall_seconds": copy + wait + 0.5})
    return rows


def write(run_dir: Path) -> Path:
    """Write a run that two faults ended, and of which a rollback undid 30 steps."""
    run_dir.mkdir()
    rows = rows_of(1, UNDONE[0], 1) + rows_of(UNDONE[0] + 1, TOTAL_STEPS, 2)
    undone = rows_of(UNDONE[0] + 1, UNDONE[1], 3)
    write_lines(run_dir / "metrics.jsonl", rows)
    write_lines(run_dir / "metrics-rolled-back-0001.jsonl", undone)
    parts = {"noticed": 2.5, "imports": 12.0, "repeated steps": 31.0}
    events: list[Row] = [{"event": "start", "step": 0, "world_size": 2, "zero_stage": 2}]
    for row in [*rows, *undone]:
        if "checkpoint/copy_seconds" in row:
            saved = {"event": "checkpoint", "step": row["step"], "seconds": 9.0}
            saved |= {"checkpoint": f"step-{row['step']:08}"}
            events.append(saved | {"copy_seconds": row["checkpoint/copy_seconds"]})
    for step in STOPPED:
        events += [{"event": "attempt_failed", "step": step, "attempt": 1, "reasons": ["rank 1"]}]
        events += [{"event": "resume", "step": step // SAVE * SAVE, "world_size": 2}]
        events += [{"event": "recovered", "step": step + 1, "seconds": 45.5, "parts": parts,
                    "repeated_steps": step % SAVE}]  # fmt: skip
    events += [{"event": "rollback", "step": UNDONE[1], "from_step": UNDONE[1],
                "to_step": UNDONE[0], "reason": "diverged"}]  # fmt: skip
    events += [{"event": "done", "step": TOTAL_STEPS, "tokens": TOTAL_STEPS * BATCH}]
    # A resume is written after the fault, with the step of its checkpoint.
    after = {id(event): step for step in STOPPED for event in events
             if event["event"] == "resume" and event["step"] == step // SAVE * SAVE}  # fmt: skip
    events.sort(key=lambda event: after.get(id(event), event["step"]))
    for number, event in enumerate(events):
        event["time"] = f"2026-11-20T1{number // 60}:{number % 60:02}:00+0000"
    write_lines(run_dir / "events.jsonl", events)
    record = {"settings": {"total_tokens": 500 * BATCH}, "world_size": 2,
              "derived": {"steps": "500 for 256,000 tokens"}}  # fmt: skip
    (run_dir / "run.json").write_text(json.dumps(record))
    return run_dir


class Reference:
    """The lines of a run, and the numbers that can be computed from them."""

    def __init__(self, run_dir: Path):
        self.rows = self.read(run_dir / "metrics.jsonl")
        self.undone = self.read(run_dir / "metrics-rolled-back-0001.jsonl")
        self.events = self.read(run_dir / "events.jsonl")

    @staticmethod
    def read(path: Path) -> list[Row]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def column(self, key: str) -> list[tuple[int, float]]:
        return [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.column(key)]

    @staticmethod
    def seconds(rows: list[Row]) -> float:
        """Each line has the mean time of the steps since the line before: LOG of them."""
        return sum(row.get("throughput/step_seconds", 0) * LOG for row in rows)

    def recent(self, key: str) -> float:
        last = self.values(key)[-20:]
        return sum(last) / len(last)

    def lost(self) -> dict[str, float]:
        saves = sum(row.get("checkpoint/stall_seconds", 0) for row in [*self.rows, *self.undone])
        again = self.seconds(self.undone)
        restarts = 0.0
        for event in self.events:
            if event["event"] == "recovered":
                again += event["parts"]["repeated steps"]
                restarts += event["parts"]["noticed"] + event["parts"]["imports"]
        total = self.seconds(self.rows) + saves + again + restarts
        return {"saves": saves / total, "repeated": again / total, "restarts": restarts / total}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def expected(run_dir) -> Reference:
    return Reference(run_dir)


def test_the_numbers_of_status(run_dir, expected) -> None:
    found = status_of(read_run(run_dir))
    assert (found["step"], found["tokens"]) == (TOTAL_STEPS, TOTAL_STEPS * BATCH)
    assert (found["total_steps"], found["total_tokens"]) == (500, 500 * BATCH)
    losses = expected.values("train/loss")
    assert found["loss"] == losses[-1]
    means = [losses[len(losses) * place // 32 : len(losses) * (place + 1) // 32]
             for place in range(32)]  # fmt: skip
    assert found["losses"] == pytest.approx([sum(each) / len(each) for each in means])
    assert found["tokens_per_second"] == pytest.approx(
        expected.recent("throughput/tokens_per_second")
    )
    assert found["mfu"] == expected.values("throughput/mfu")[-1]
    last = [row for row in expected.rows if row["step"] == TOTAL_STEPS]
    results = {key: row[key] for row in last for key in row if key.startswith("eval/")}
    assert found["evaluation"] == {"step": TOTAL_STEPS, **results}
    lost = found["lost_time"]
    for key, share in expected.lost().items():
        assert lost[key] == pytest.approx(share, rel=1e-9), key
    assert lost["faults"] == 2
    text = " ".join(plain_lines(found))
    share = re.search(r"lost to saves ([\d.]+)%", text)
    assert share is not None
    assert float(share[1]) / 100 == pytest.approx(expected.lost()["saves"], abs=5e-5)
    assert "400 of 500, 205k of 256k tokens, 80.0%" in text


def test_a_running_run_is_done_when_the_rest_is_trained_at_the_last_speed(tmp_path) -> None:
    run_dir = write(tmp_path / "run")
    events = Reference.read(run_dir / "events.jsonl")[:-1]
    write_lines(run_dir / "events.jsonl", events)
    write_heartbeats(run_dir)
    expected = Reference(run_dir).recent("throughput/tokens_per_second")
    left = 100 * BATCH / expected
    assert status_of(read_run(run_dir))["seconds_left"] == pytest.approx(left)
    (shown,) = report_data([read_run(run_dir)])["runs"]
    assert shown["seconds_left"] == pytest.approx(left)


def test_the_figures_at_the_head_of_the_report(run_dir, expected) -> None:
    (run,) = report_data([read_run(run_dir)])["runs"]
    figures = {name: (value, note) for name, value, note in run["figures"]}
    losses = expected.values("train/loss")
    mean = sum(losses[-10:]) / 10
    evals = expected.values("eval/loss")
    perplexity = expected.values("eval/perplexity")[-1]
    trained, lost = expected.seconds(expected.rows), expected.lost()
    minutes, seconds = divmod(round(trained), 60)
    assert figures["Training loss"] == (f"{mean:.4f}", "mean of the last 10 lines")
    assert figures["Validation loss"] == (
        f"{evals[-1]:.4f}", f"perplexity {perplexity:.4g}, best {min(evals):.4f}",
    )  # fmt: skip
    assert figures["Bits per byte"][0] == f"{expected.values('eval/bits_per_byte')[-1]:.4f}"
    assert figures["CORE"][0] == f"{expected.values('eval/core')[-1]:.4f}"
    assert figures["HellaSwag"][0] == f"{expected.values('eval/hellaswag/acc_norm')[-1]:.1%}"
    assert figures["Speed"] == (
        f"{expected.recent('throughput/tokens_per_second'):.3g} tok/s", "2 devices",
    )  # fmt: skip
    assert figures["MFU"][0] == f"{expected.recent('throughput/mfu'):.1%}"
    wall = f"{len(expected.events) - 1}m00s since it began, 3 starts"
    assert figures["Trained"] == (f"{minutes}m{seconds:02}s", wall)
    assert figures["Effective time"][0] == f"{1 - sum(lost.values()):.1%}"
    assert figures["Effective time"][1].startswith(
        f"lost to saves {lost['saves']:.2%}, repeated steps {lost['repeated']:.2%}, restarts "
        f"{lost['restarts']:.2%}; 2 faults; with one per hour "
    )
    assert figures["Refused steps"] == ("3", "1 rollback(s)")
    # One event a minute; between the last one of a start and the next start devices are free.
    minutes = sum(event["event"] != "resume" for event in expected.events[1:])
    assert figures["Device-hours"][0] == f"{2 * minutes / 60:.3g}", "of two devices"
    (run,) = report_data([read_run(run_dir)], price_per_hour=3.0)["runs"]
    (shown,) = [note for name, _, note in run["figures"] if name == "Device-hours"]
    assert shown == f"${2 * minutes / 60 * 3:,.2f} at $3 an hour"


def test_the_curves_have_the_values_and_the_times_of_the_lines(run_dir, expected) -> None:
    (run,) = report_data([read_run(run_dir)])["runs"]
    until = {row["step"]: expected.seconds(expected.rows[: place + 1])
             for place, row in enumerate(expected.rows)}  # fmt: skip
    curves = run["curves"]
    for key, curve in curves["curves"].items():
        places = curves["places"][curve["lines"]]
        pairs = [(row["step"], row[key]) for row in expected.rows if key in row]
        assert [curves["steps"][place] for place in places] == [step for step, _ in pairs]
        for shown, (step, value) in zip(curve["values"], pairs, strict=True):
            same = shown is None if value is None else shown == pytest.approx(value, rel=1e-6)
            assert same, (key, step)
        seconds = [curves["seconds"][place] for place in places]
        assert seconds == pytest.approx([until[step] for step, _ in pairs], rel=1e-6), key
    (undone,) = run["rolled_back"]
    assert undone["steps"] == [row["step"] for row in expected.undone if "train/loss" in row]
    losses = [row["train/loss"] for row in expected.undone if "train/loss" in row]
    assert undone["curves"]["train/loss"]["values"] == pytest.approx(losses, rel=1e-6)
    at = until[UNDONE[0]]
    times = [at + expected.seconds(expected.undone[: place + 1])
             for place, row in enumerate(expected.undone) if "train/loss" in row]  # fmt: skip
    assert undone["seconds"] == pytest.approx(times, rel=1e-6)


def test_the_table_of_evaluations_knows_which_value_is_the_best(run_dir, expected) -> None:
    (run,) = report_data([read_run(run_dir)])["runs"]
    table = run["evaluations"]
    better = dict(zip(table["keys"], table["better"], strict=True))
    assert better == {
        "eval/loss": "lower", "eval/perplexity": "lower", "eval/bits_per_byte": "lower",
        "eval/web/loss": "lower", "eval/code/loss": "lower", "eval/web/bits_per_byte": "lower",
        "eval/hellaswag/acc": "higher", "eval/hellaswag/acc_norm": "higher", "eval/core": "higher",
        "eval/arc/acc_norm": "higher", "eval/suite_bpb/bpb": "lower", "eval/hellaswag/items": "",
        "eval/wiki/word_perplexity": "lower", "eval/odd/unknown": "",
    }  # fmt: skip
    units = dict(zip(table["keys"], table["units"], strict=True))
    assert (units["eval/core"], units["eval/loss"]) == ("share", "nats per token")
    for place, key in enumerate(table["keys"]):
        pairs = [(row[0], row[place + 2]) for row in table["rows"]]
        assert pairs == [(step, pytest.approx(value)) for step, value in expected.column(key)]


def test_the_shares_in_the_findings(run_dir, expected) -> None:
    (run,) = report_data([read_run(run_dir)])["runs"]
    texts = {finding["kind"]: finding["text"] for finding in run["findings"]}
    stalls = sum(expected.values("checkpoint/stall_seconds"))
    share = stalls / (stalls + expected.seconds(expected.rows))
    assert f"paused for checkpoints {share:.0%} of the time" in texts["checkpoint_stalls"]
    assert "25% of the step time is spent waiting for data" in texts["slow_data"]
    repeated = [one["text"] for one in run["findings"] if one["kind"] == "repeated_data"]
    assert len(repeated) == 2 and all(f"read {400 / 90:.1f} times" in text for text in repeated)


def test_the_agreement_of_two_runs_is_the_largest_difference(run_dir, tmp_path) -> None:
    other = tmp_path / "other"
    write(other)
    rows = Reference.read(other / "metrics.jsonl")
    draw = random.Random(7)
    moved = {row["step"]: draw.uniform(-1e-3, 1e-3) for row in rows if "train/loss" in row}
    for row in rows:
        if "train/loss" in row:
            row["train/loss"] += moved[row["step"]]
    write_lines(other / "metrics.jsonl", rows)
    (found,) = report_data([read_run(run_dir), read_run(other)])["agreement"]
    step = max(moved, key=lambda step: abs(moved[step]))
    assert (found["steps"], found["at"]) == (len(moved), step)
    assert found["largest"] == pytest.approx(abs(moved[step]), rel=1e-5)
