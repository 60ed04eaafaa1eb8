"""Stages and epoch limits of a mixture in a real run, compared with arithmetic.

Web, code and math have weights 7 : 3 : 0; from sequence 44 on 1 : 1 : 2; from 108 on, math only.
Code may be read twice, and reaches that limit before sequence 108. Batches have 8 sequences, so
blends start in the middle of a batch.
"""

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from tests.end_to_end.recipe import BATCH, SEQ_LEN, profile, recipe
from tests.launching import environment, rows, run_ranks, write_shards
from tests.ledger import read_sources
from zerolm.common.errors import ConfigError
from zerolm.preflight import check

pytestmark = pytest.mark.soak  # three launches; the arithmetic has unit tests

STEPS, SAVE = 16, 4
NAMES = ("web", "code", "math")
STAGES = ["--data_stage", "1408:web=1,code=1,math=2", "--data_stage", f"{108 * SEQ_LEN}:math=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("mixture")
    sizes = zip(NAMES, (60, 4, 20), strict=True)
    return {name: write_shards(base / name, size, seed) for seed, (name, size) in enumerate(sizes)}


def run_flags(llama, data, run_dir: Path, json_file: Path, *blends: object) -> list[object]:
    arguments = recipe(llama, f"{data['web']}=7", run_dir, json_file, STEPS, micro=2)
    arguments += ["--data", f"{data['code']}=3", "--data", f"{data['math']}=0", *blends]
    arguments += ["--max_epochs", "code=2", "--over_max_epochs", "redistribute"]
    saving = ["--checkpoint_interval", SAVE, "--checkpoint_keep", 9, "--no-async_checkpoint"]
    return [*map(str, [*arguments, *saving, "--wandb", "off"])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama, data):
    """A run on two ranks, and one that is killed in its second blend and resumed on one rank."""
    base = tmp_path_factory.mktemp("runs")
    json_file = profile(base / "ds.json", 2, bf16=False)
    for name in ("uninterrupted", "killed", "resumed"):
        (base / f"ledger-{name}").mkdir()
    arguments = run_flags(llama, data, base / "uninterrupted", json_file, *STAGES)
    done = run_ranks(2, *arguments, ZEROLM_LEDGER=str(base / "ledger-uninterrupted"))
    assert done.returncode == 0, done.stdout[-4000:]
    (base / "log").write_text(done.stdout)
    arguments = run_flags(llama, data, base / "run", json_file, *STAGES)
    ledger = str(base / "ledger-killed")
    ended = run_ranks(2, *arguments, ZEROLM_LEDGER=ledger, FAULT="step.begin:0:11:kill")
    assert ended.returncode != 0, ended.stdout[-4000:]
    check_changed_stages(llama, data, base / "run", json_file)
    ended = run_ranks(1, *arguments, ZEROLM_LEDGER=str(base / "ledger-resumed"))
    assert ended.returncode == 0, ended.stdout[-4000:]
    return base


def check_changed_stages(llama, data, run_dir: Path, json_file: Path) -> None:
    """With a checkpoint at sequence 64, later blends may be changed, but not the current one."""
    alone = {**environment(), "WORLD_SIZE": "1"}
    later = ["--data_stage", "1408:web=1,code=1,math=2", "--data_stage", f"{108 * SEQ_LEN}:web=1"]
    check.check([*run_flags(llama, data, run_dir, json_file, *later), "--check"], alone)
    now = ["--data_stage", "1408:web=1,code=1,math=3", *STAGES[2:]]
    with pytest.raises(ConfigError) as refusal:
        check.check([*run_flags(llama, data, run_dir, json_file, *now), "--check"], alone)
    (problem,) = refusal.value.problems
    assert "run.json: mixture: [7, 3, 0] from sequence 0; " in problem
    assert "--accept_changes" in problem


def expected(data) -> list[tuple[int, int, dict[str, int]]]:
    """Return (first sequence, end, sequences of each source) of each blend."""
    manifest = json.loads((data["code"] / "manifest.json").read_text())
    allowed = 2 * ((manifest["num_tokens"] - 1) // SEQ_LEN) - (44 - math.floor(44 * 0.7))
    exhausted = 44 + 4 * allowed  # with a quarter of the weight
    assert 44 < exhausted < 108, "the corpus does not suit this test"
    blends = [(0, 44, (7, 3, 0)), (44, exhausted, (1, 1, 2)), (exhausted, 108, (1, 0, 2))]
    found = []
    for start, end, weights in [*blends, (108, STEPS * BATCH, (0, 0, 1))]:
        ends = [
            math.floor((end - start) * Fraction(sum(weights[: number + 1]), sum(weights)))
            for number in range(3)
        ]
        taken = [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
        found.append((start, end, dict(zip(NAMES, taken, strict=True))))
    return found


def test_each_stage_trains_on_sources_by_their_weights(runs, data) -> None:
    steps = read_sources(runs / "ledger-uninterrupted")
    assert list(steps) == list(range(1, STEPS + 1))
    source_of = {number: source for rows in steps.values() for number, source in rows.items()}
    assert sorted(source_of) == list(range(STEPS * BATCH))
    for start, end, counts in expected(data):
        counted = Counter(NAMES[source_of[number]] for number in range(start, end))
        assert counted == Counter({name: count for name, count in counts.items() if count})


def test_a_resume_inside_a_stage_on_another_world_size_changes_nothing(runs) -> None:
    uninterrupted = read_sources(runs / "ledger-uninterrupted")
    killed, resumed = (read_sources(runs / f"ledger-{name}") for name in ("killed", "resumed"))
    assert {**killed, **resumed} == uninterrupted and min(resumed) == 9
    ours, reference = rows(runs / "run", "train/loss"), rows(runs / "uninterrupted", "train/loss")
    assert list(ours) == list(reference) == list(range(1, STEPS + 1))
    assert {step: ours[step] for step in range(1, 9)} == {
        step: reference[step] for step in range(1, 9)
    }
    for step, loss in ours.items():
        assert loss == pytest.approx(reference[step], rel=1e-6), step


def test_the_plan_and_the_log_show_the_stages(runs, data) -> None:
    log = (runs / "log").read_text()
    blends = expected(data)
    totals = {name: sum(counts[name] for _, _, counts in blends) for name in NAMES}
    header = next(line for line in log.splitlines() if line.startswith("source "))
    assert header.split().count("from") == 4 and header.endswith("at most")
    for name in NAMES:
        line = next(line for line in log.splitlines() if line.startswith(f"{name} "))
        assert f" {totals[name] * SEQ_LEN:,} " in line and line.endswith(
            "  2" if name == "code" else "  -"
        )
        assert rows(runs / "run", f"data/{name}/tokens")[STEPS] == totals[name] * SEQ_LEN
    events = [
        json.loads(line)
        for line in (runs / "uninterrupted" / "events.jsonl").read_text().splitlines()
    ]
    started = {event["stage"]: event["step"] for event in events if event["event"] == "stage"}
    assert started == {
        number: start // BATCH + 1 for number, (start, *_) in enumerate(blends, 1) if start
    }
    assert list(rows(runs / "run", "data/stage").values())[-1] == 4
