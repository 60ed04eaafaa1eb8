"""Run directories for the tests of trackers, written by hand."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerolm.parts.settings import RunSettings
from zerolm.tracking.run_log import RunLog


def unused_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run directory without steps, and remove W&B's variables from the environment."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    (path / "checkpoints").mkdir(parents=True)
    settings = {"wandb": "offline", "wandb_project": "mine", "wandb_tags": "tiny, fast"}
    record = {"settings": settings, "git_commit": "abc123", "versions": {"torch": "2"}}
    (path / "run.json").write_text(json.dumps(record))
    return path


def begin(run_dir: Path, step: int, tensorboard: bool = False, mode: str = "offline") -> RunLog:
    record = json.loads((run_dir / "run.json").read_text())
    record["settings"]["wandb"] = mode
    (run_dir / "run.json").write_text(json.dumps(record))
    log = RunLog(run_dir, step, writes=True)
    log.track(RunSettings(wandb=mode, tensorboard=tensorboard))
    return log


def write_steps(log: RunLog, *steps: int) -> None:
    """Write rows whose times differ each time a step is repeated, as in a real run."""
    for step in steps:
        row = {"step": step, "tokens": 10 * step, "train/loss": 1 / 3 / step, "null": None}
        log.metrics({**row, "seconds": time.perf_counter()})


def publish(run_dir: Path, log: RunLog, step: int) -> None:
    name = f"step-{step:08d}"
    directory = run_dir / "checkpoints" / name
    directory.mkdir()
    manifest = {"digest": "d" * 64, "progress": {"step": step, "tokens": 10 * step}}
    (directory / "MANIFEST.json").write_text(json.dumps(manifest))
    (directory / "weights.pt").write_bytes(b"w" * 1000)
    (run_dir / "checkpoints" / "latest").write_text(name + "\n")
    log.event("checkpoint", step, checkpoint=name)


def sample(run_dir: Path, step: int) -> None:
    row = {"step": step, "tokens": 10 * step, "prompt_number": 0, "prompt": "One", "text": " two"}
    with open(run_dir / "samples.jsonl", "a") as file:
        file.write(json.dumps({**row, "seed": 1, "temperature": 1.0, "top_k": 0}) + "\n")


def end(log: RunLog, how: str = "done") -> None:
    log.close(how)
    log.finish_trackers()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def offline_runs(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.glob("wandb/offline-run-*")}


def wait_for_start(run_dir: Path, earlier: set[str]) -> None:
    """Wait until an offline run that is not in `earlier` has started: seconds on a loaded machine.

    At its end a run waits only a few seconds for a tracker that has not connected yet.
    """

    def is_started() -> bool:
        logs = run_dir.glob("wandb/offline-run-*/logs/debug.log")
        new = [log for log in logs if log.parts[-3] not in earlier]
        return any("run started" in log.read_text(errors="replace") for log in new)

    wait_for(is_started)


def kill(log: RunLog, run_dir: Path, name: str) -> None:
    """Kill the tracker processes once one of them is working, as the loss of a host would."""
    wait_for(lambda: list(run_dir.glob(name)))
    time.sleep(1.5)
    for process in log.trackers._processes:
        process.child.kill()
    log.close()
