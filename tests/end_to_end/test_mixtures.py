"""Stages and caps of a mixture in a real run: what the ranks trained on, against arithmetic.

Weights 7 : 3 : 0 of web, code and math; 1 : 1 : 2 from sequence 44 on; math alone from 108 on; and
code, which may be read twice, leaves before that. Batches have 8 sequences, so stages begin inside
of them.
"""

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from recipe import BATCH, SEQ_LEN, profile, recipe

from tests.launching import environment, rows, run_ranks, write_shards
from zerolm import ledger, preflight
from zerolm.errors import ConfigError

pytestmark = pytest.mark.soak  # three launches; tests/zerolm/test_mixture.py has the arithmetic

STEPS, SAVE = 16, 4
NAMES = ("web", "code", "math")
STAGES = ["--data_stage", "1408:web=1,code=1,math=2", "--data_stage", f"{108 * SEQ_LEN}:math=1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("mixture")
    sizes = zip(NAMES, (60, 4, 20), strict=True)
    return {name: write_shards(base / name, size, seed) for seed, (name, size) in enumerate(sizes)}


def words(llama, data, run_dir: Path, json_file: Path, *stages: object) -> list[object]:
    arguments = recipe(llama, f"{data['web']}=7", run_dir, json_file, STEPS, micro=2)
    arguments += ["--data", f"{data['code']}=3", "--data", f"{data['math']}=0", *stages]
    arguments += ["--max_epochs", "code=2", "--over_max_epochs", "redistribute"]
    saving = ["--checkpoint_interval", SAVE, "--checkpoint_keep", 9, "--no-async_checkpoint"]
    return [*map(str, [*arguments, *saving, "--wandb", "off"])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, llama, data):
    """A run on two ranks; and one that is killed inside its second stage and goes on on one."""
    base = tmp_path_factory.mktemp("runs")
    json_file = profile(base / "ds.json", 2, bf16=False)
    for name in ("whole", "cut", "rest"):
        (base / f"ledger-{name}").mkdir()
    arguments = words(llama, data, base / "whole", json_file, *STAGES)
    done = run_ranks(2, *arguments, ZEROLM_LEDGER=str(base / "ledger-whole"))
    assert done.returncode == 0, done.stdout[-4000:]
    (base / "log").write_text(done.stdout)
    arguments = words(llama, data, base / "run", json_file, *STAGES)
    seen = str(base / "ledger-cut")
    ended = run_ranks(2, *arguments, ZEROLM_LEDGER=seen, FAULT="step.begin:0:11:kill")
    assert ended.returncode != 0, ended.stdout[-4000:]
    look_at_changed_stages(llama, data, base / "run", json_file)
    ended = run_ranks(1, *arguments, ZEROLM_LEDGER=str(base / "ledger-rest"))
    assert ended.returncode == 0, ended.stdout[-4000:]
    return base


def look_at_changed_stages(llama, data, run_dir: Path, json_file: Path) -> None:
    """With its checkpoint at sequence 64, a run may change what comes later, not what it is in."""
    alone = {**environment(), "WORLD_SIZE": "1"}
    later = ["--data_stage", "1408:web=1,code=1,math=2", "--data_stage", f"{108 * SEQ_LEN}:web=1"]
    preflight.check([*words(llama, data, run_dir, json_file, *later), "--check"], alone)
    now = ["--data_stage", "1408:web=1,code=1,math=3", *STAGES[2:]]
    with pytest.raises(ConfigError) as refusal:
        preflight.check([*words(llama, data, run_dir, json_file, *now), "--check"], alone)
    (problem,) = refusal.value.problems
    assert "run.json: mixture: [7, 3, 0] from sequence 0; " in problem
    assert "--accept_changes" in problem


def expected(data) -> list[tuple[int, int, dict[str, int]]]:
    """Return (first sequence, end, sequences of each source) of each stage."""
    manifest = json.loads((data["code"] / "manifest.json").read_text())
    allowed = 2 * ((manifest["num_tokens"] - 1) // SEQ_LEN) - (44 - math.floor(44 * 0.7))
    leaves = 44 + 4 * allowed  # with a share of a quarter
    assert 44 < leaves < 108, "the corpus does not suit this test"
    stages = [(0, 44, (7, 3, 0)), (44, leaves, (1, 1, 2)), (leaves, 108, (1, 0, 2))]
    found = []
    for start, end, weights in [*stages, (108, STEPS * BATCH, (0, 0, 1))]:
        ends = [
            math.floor((end - start) * Fraction(sum(weights[: number + 1]), sum(weights)))
            for number in range(3)
        ]
        taken = [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
        found.append((start, end, dict(zip(NAMES, taken, strict=True))))
    return found


def test_each_stage_trains_on_what_its_weights_say(runs, data) -> None:
    steps = ledger.read_sources(runs / "ledger-whole")
    assert list(steps) == list(range(1, STEPS + 1))
    source_of = {number: source for rows in steps.values() for number, source in rows.items()}
    assert sorted(source_of) == list(range(STEPS * BATCH))
    for start, end, counts in expected(data):
        seen = Counter(NAMES[source_of[number]] for number in range(start, end))
        assert seen == Counter({name: count for name, count in counts.items() if count})


def test_a_resume_inside_a_stage_on_another_world_size_changes_nothing(runs) -> None:
    whole = ledger.read_sources(runs / "ledger-whole")
    cut, rest = (ledger.read_sources(runs / f"ledger-{name}") for name in ("cut", "rest"))
    assert {**cut, **rest} == whole and min(rest) == 9
    ours, oracle = rows(runs / "run", "train/loss"), rows(runs / "whole", "train/loss")
    assert list(ours) == list(oracle) == list(range(1, STEPS + 1))
    assert {step: ours[step] for step in range(1, 9)} == {
        step: oracle[step] for step in range(1, 9)
    }
    for step, loss in ours.items():
        assert loss == pytest.approx(oracle[step], rel=1e-6), step


def test_the_plan_and_the_log_say_what_is_trained(runs, data) -> None:
    log = (runs / "log").read_text()
    stages = expected(data)
    totals = {name: sum(counts[name] for _, _, counts in stages) for name in NAMES}
    header = next(line for line in log.splitlines() if line.startswith("source "))
    assert header.split().count("from") == 4 and header.endswith("at most")
    for name in NAMES:
        line = next(line for line in log.splitlines() if line.startswith(f"{name} "))
        assert f" {totals[name] * SEQ_LEN:,} " in line and line.endswith(
            "  2" if name == "code" else "  -"
        )
        assert rows(runs / "run", f"data/{name}/tokens")[STEPS] == totals[name] * SEQ_LEN
    events = [
        json.loads(line) for line in (runs / "whole" / "events.jsonl").read_text().splitlines()
    ]
    begun = {event["stage"]: event["step"] for event in events if event["event"] == "stage"}
    assert begun == {
        number: start // BATCH + 1 for number, (start, *_) in enumerate(stages, 1) if start
    }
    assert list(rows(runs / "run", "data/stage").values())[-1] == 4
