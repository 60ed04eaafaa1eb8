"""`zerolm sweep`: its grid, its refusals, its job file, and how it goes on after a stop or a kill.

A stand-in for `zerolm train` writes the files of a run; real runs: tests/end_to_end/test_sweep.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.experiments import grid, results, sweep
from tests import ROOT
from tests.launching import environment
from zerolm.report.run_history import RunHistory

FLAGS = ["--set", "learning_rate=1e-3,2e-3,4e-3", "--set", "seed=0,1", "--data", "shards"]
# Loss and end of a run by its learning rate; the stand-in fails in run `fails` of the environment.
TRAIN = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
flags = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
run_dir = Path(flags["run_dir"])
with open(run_dir.parent / "started", "a") as file:
    file.write(run_dir.name + "\\n")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if os.environ.get("FAILS") == run_dir.name:
    sys.exit("no such device")
(run_dir / "run.json").write_text('{{"settings": {{"total_tokens": 100}}}}')
if os.environ.get("WAITS") == run_dir.name:
    while not asked:
        time.sleep(0.01)
    sys.exit(75)
rate, seed = float(flags["learning_rate"]), int(flags["seed"])
loss = 3 + (rate - 2e-3) ** 2 * 1e5 + seed / 100
rows = [dict(step=1, tokens=100) | {{"train/loss": 9.0, "eval/loss": loss}}]
(run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
event = dict(event="done", step=1, tokens=100, time="2026-01-01T00:00:00+0000")
(run_dir / "events.jsonl").write_text(json.dumps(event) + "\\n")
"""
CALL = """
import sys
from launch.__main__ import main
from launch.experiments import sweep
def check(found, jobs):
    found.launcher.setdefault("num_gpus", "1")
    found.tokens = {point.name: 100 for point in found.points}
sweep._check = check
sys.executable = sys.argv[1]
sys.exit(main(["sweep", *sys.argv[2:]]))
"""


@pytest.fixture
def train(tmp_path) -> Path:
    script = tmp_path / "train"
    script.write_text(TRAIN.format(python=sys.executable))
    script.chmod(0o755)
    return script


def start(train: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CALL, str(train), *FLAGS, "--run_dir", train.parent / "grid"]
    return subprocess.Popen(
        [*map(str, command), *more], cwd=ROOT, env=environment(**variables),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)


def started(train: Path) -> list[str]:
    return (train.parent / "grid" / "started").read_text().split()


def test_names_of_points_depend_on_the_values_alone():
    def names(*given: str) -> list[str]:
        problems: list[str] = []
        points = grid.grid(grid.read_axes(given, problems))
        assert not problems
        return [point.name for point in points]

    assert names("seed=0,1", "learning-rate=1e-3") == [
        "learning_rate=0.001,seed=0", "learning_rate=0.001,seed=1",
    ]  # fmt: skip
    assert names("learning_rate=0.0010", "seed=0,1") == names("seed=0,1", "learning_rate=1e-3")
    assert names("total_tokens=2M,4e6") == ["total_tokens=2000000", "total_tokens=4000000"]
    assert names("model_config=a/small.json,large.json")[0] == "model_config=small"


def test_every_mistake_is_reported_and_nothing_is_written(tmp_path, capsys):
    words = ["--set", "learning_rat=1,2", "--set", "seed=0,x", "--set", "run_dir=a", "--set"]
    words += ["beta1=0.9,.9", "--set", "beta2=", "--set", "weight_decay=0.1", "--weight_decay"]
    words += ["0.1", "--num_gpu", "2", "--hostfile", "hosts", "--run_dir", str(tmp_path / "grid")]
    assert main(["sweep", *words]) == 2
    errors = capsys.readouterr().err
    for expected in (
        'learning_rat: no such setting. Did you mean "learning_rate"?', "seed: x is not a number",
        "run_dir: each run of a sweep has its own", "same directory as 0.9", "beta2 lacks a value",
        "--weight_decay: given in --set too", "--num_gpu: no such flag", "--hostfile: a sweep",
    ):  # fmt: skip
        assert expected in errors, expected
    assert not any(tmp_path.iterdir())


def test_a_sweep_names_its_optimum_and_does_not_repeat_what_is_done(train):
    code, output, errors = finish(start(train, "--jobs", "2"))
    assert (code, errors) == (0, "")
    assert "best learning_rate 0.00" in output and "90% interval" in output
    assert "loss: eval/loss" in output
    record = json.loads((train.parent / "grid" / "sweep.json").read_text())
    assert [point["state"] for point in record["points"]] == ["done"] * 6
    assert record["optima"][""]["seeds"] == 2
    assert (train.parent / "grid" / "sweep.png").stat().st_size > 5000
    assert finish(start(train))[0] == 0
    assert len(started(train)) == 6
    assert finish(start(train, "--table"))[1] in finish(start(train))[1]


def test_a_failed_run_is_named_and_the_others_go_on(train):
    name = "learning_rate=0.002,seed=0"
    code, output, errors = finish(start(train, FAILS=name))
    assert code == 1 and errors == f"sweep: failed: {name}\n"
    assert f"{name}: exit code 1, see " in output
    assert "no such device" in (train.parent / "grid" / name / sweep.LOG).read_text()
    assert output.count(" done after") == 5
    assert finish(start(train))[0] == 0
    assert started(train).count(name) == 2 and len(started(train)) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_or_killed_sweep_goes_on_where_it_was(train, number):
    name = "learning_rate=0.002,seed=1"
    process = start(train, WAITS=name)
    wait_for(train.parent / "grid" / name / "run.json")
    os.kill(process.pid, number)
    assert finish(process)[0] == (75 if number == signal.SIGTERM else -number)
    assert len(started(train)) == 4
    code, output, _ = finish(start(train))
    assert code == 0 and started(train)[4:] == [
        name, "learning_rate=0.004,seed=0", "learning_rate=0.004,seed=1"
    ]  # fmt: skip
    assert output.count("already done") == 3


def test_values_that_are_no_numbers_have_a_column_each_and_no_optimum(tmp_path, capsys):
    for number, name in enumerate(("model_config=a", "model_config=b")):
        for seed in (0, 1):
            run_dir = tmp_path / f"{name},seed={seed}"
            run_dir.mkdir()
            (run_dir / "run.json").write_text('{"settings": {}}')
            row = {"step": 1, "tokens": 100, "train/loss": 9.0, "eval/loss": 3.0 + number + seed}
            (run_dir / "metrics.jsonl").write_text(json.dumps(row) + "\n")
            event = {"event": "done", "step": 1, "tokens": 100, "time": "2026-01-01T00:00:00+0000"}
            (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    words = ["--set", "model_config=a.json,b.json", "--set", "seed=0,1"]
    assert main(["sweep", *words, "--run_dir", str(tmp_path), "--table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]][::3] == [
        "model_config=a,seed=0", "model_config=b,seed=1"
    ]  # fmt: skip
    assert not any(line.startswith("best") for line in lines)
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def test_the_job_file_is_an_array_with_a_task_for_each_point(tmp_path, capsys):
    path = tmp_path / "job.sbatch"
    words = ["--deepspeed_config", "zero1.json", "--upload_to", "s3://bucket/x", "--jobs", "2"]
    words += ["--model_config", "m's.json", "--run_dir", "runs/grid", "--directory", "/shared"]
    assert main(["sweep", *FLAGS, *words, "--render", str(path)]) == 0
    text = path.read_text()
    assert "#SBATCH --array=0-5%2" in text and "#SBATCH --output=grid-%A-%a.log" in text
    assert subprocess.run(["bash", "-n", path], timeout=60, check=False).returncode == 0
    # What the task of a point starts, as bash expands it.
    body = text[text.index("case $SLURM") :]
    body = re.sub(r"exec .*? supervise --requeue -- \\\n", "printf '%s\\\\n' ", body)
    script = f"SLURM_ARRAY_TASK_ID=3 SLURM_NODEID=0 master=host\n{body}"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    argv = shown.stdout.splitlines()
    assert argv[argv.index("--master_port") + 1] == "29503"
    flags = argv[argv.index("pretrain.py") + 1 :]
    assert flags[-4:] == [
        "--learning_rate=2e-3", "--seed=1", "--run_dir=runs/grid/learning_rate=0.002,seed=1",
        "--upload_to=s3://bucket/x/learning_rate=0.002,seed=1",
    ]  # fmt: skip
    assert "--model_config=m's.json" in flags


def row(rate: str, seed: str, loss: float | None, state: str = "done") -> results.Result:
    values = {"learning_rate": rate, "seed": seed}
    name = ",".join(f"{key}={value}" for key, value in values.items())
    return results.Result(name, f"grid/{name}", values, state, 100, loss, "eval/loss")


def test_runs_that_gave_up_failed_or_lost_their_loss_are_counted_and_their_values_not_compared():
    rows = [row("0.001", "0", 3.1), row("0.001", "1", 3.11), row("0.002", "0", 3.0)]
    rows += [row("0.002", "1", 3.01), row("0.004", "0", 2.9), row("0.004", "1", None, "gave up")]
    rows += [row("0.008", "0", None), row("0.008", "1", None, "failed")]
    found = results.optima(rows, "learning_rate")
    text = results.as_text(rows, "learning_rate", found)
    assert found[""].measured == 2e-3 and found[""].incomplete == {4e-3: 1, 8e-3: 2}
    assert "8 runs: 5 done, 1 failed, 1 gave up, 1 without a final loss" in text
    assert "Not compared: 0.004, where 1 run gave up, failed or ended without a finite loss" in text
    assert "Not compared: 0.008, where 2 runs gave up" in text
    json.dumps(results.as_json(rows, "learning_rate", found))
    assert not results.optima([row("0.001", "0", None, "gave up")], "learning_rate")


@pytest.mark.parametrize("losses", [[3.0, float("nan")], [3.0, float("inf")]])
def test_a_training_loss_that_was_lost_at_the_end_is_no_final_loss(losses):
    run = RunHistory(Path("run"))
    for step, loss in enumerate(losses):
        run.curves.add({"step": step, "tokens": step, "train/loss": loss})
    assert results.final_loss(run) is None
