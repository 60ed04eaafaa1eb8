"""What people and machines do to the files and helper processes of a run while it trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.recipe import profile, recipe
from tests.launching import ROOT, environment, write_json
from tests.supervised import Supervised
from tests.wandb_reader import own_rows, wandb_rows, wandb_runs
from zerolm.common import processes

STEPS, SAVE = 30, 4
SLOW = "step.begin:*:*:sleep=0.3"
SECONDS = 1200  # the machine may be busy


def write_settings(path: Path, flags: list[object]) -> Path:
    """Write flags of pretrain.py, each with one value, as a settings file."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    values = {
        str(name)[2:]: value if isinstance(value, int | float) else str(value)
        for name, value in given.items()
    }
    return write_json(path, {**values, "data": [values["data"]]})


def descendants(pid: int) -> list[int]:
    own = [child.pid for child in processes.children(pid)]
    return own + [each for child in own for each in descendants(child)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.soak
@pytest.mark.timeout(4 * SECONDS)
def test_edited_files_and_killed_trackers_change_nothing_of_a_supervised_run(
    tmp_path, llama, corpus
) -> None:
    """The settings are edited, two configs are cut and deleted, and `ranks` is removed."""
    run_dir, model = tmp_path / "run", tmp_path / "model.json"
    shutil.copy(llama, model)
    ds_json = profile(tmp_path / "ds.json", 2, bf16=False)
    flags = recipe(model, corpus, run_dir, ds_json, STEPS, micro=2)
    settings = write_settings(tmp_path / "settings.json", flags)
    arguments = ["--settings", settings, "--checkpoint_interval", SAVE, "--wandb", "offline"]
    with Supervised(run_dir, [*arguments, "--tensorboard"], num_ranks=1, FAULT=SLOW) as run:
        run.wait_for_step(2, SECONDS)
        pid = run.heartbeats()[0]["pid"]
        run.wait_for("no W&B", lambda: list(run_dir.glob("wandb/offline-run-*/*.wandb")), SECONDS)
        helpers = [child for child in descendants(pid) if "zerolm" in command_line(child)]
        cores = [child for child in descendants(pid) if "wandb-core" in command_line(child)]
        assert len(helpers) >= 2 and cores, [command_line(child) for child in descendants(pid)]
        for child in cores + helpers:
            processes.signal_marked(child, signal.SIGKILL, run.mark)
        shutil.rmtree(run_dir / "ranks")

        original = settings.read_text()
        settings.write_text(json.dumps({**json.loads(original), "learning_rate": 1.0}))
        os.truncate(ds_json, 20)
        model.unlink()
        run.wait_for_step(SAVE + 3, SECONDS)
        before = {row["step"]: row for row in own_rows(run_dir) if "train/loss" in row}
        run.send(pid, signal.SIGKILL)
        assert run.wait(SECONDS) == 0, run.output()[-6000:]
        output = run.output()
        assert processes.marked_pids(run.mark) == []
    assert output.count("has changed or cannot be read") == 3
    assert (run_dir / "configs/settings.json").read_text() == original
    assert "resume" in [event["event"] for event in run.events()]
    rows = own_rows(run_dir)
    after = {row["step"]: row for row in rows if "train/loss" in row}
    assert list(after) == list(range(1, STEPS + 1))
    for step, row in before.items():
        assert after[step]["train/loss"] == row["train/loss"], step
    ((_, records),) = wandb_runs(run_dir).items()
    assert wandb_rows(records) == rows


@pytest.mark.soak
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("-n 50", "ulimit -n: 50 open files are allowed"),
        ("-v 3000000", "ulimit -v allows 2.86 GiB"),
    ],
)
def test_a_run_names_the_limit_of_its_shell(tmp_path, llama, corpus, limit, text) -> None:
    flags = recipe(llama, corpus, tmp_path / "run", profile(tmp_path / "ds.json", 2, False), 2, 4)
    command = [sys.executable, str(ROOT / "pretrain.py"), *map(str, flags)]
    done = subprocess.run(
        ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command], env=environment(),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2) and text in done.stdout + done.stderr, done.stderr[-3000:]
