"""Runs that are killed, or stopped, and then resumed."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.launching import events, kill_session, rows, run_ranks, start_ranks

KILL_STEP = 25  # of the 60 steps or so of a run


def wait_for_step(run_dir: Path, step: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = run_dir / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def kill_at(step: int, run_dir: Path, flags: Iterable[object]) -> None:
    """Start a run on two ranks, and kill it after a step."""
    with open(run_dir.with_suffix(".log"), "w") as log:
        ranks = start_ranks(2, log, *flags)
    try:
        wait_for_step(run_dir, step, seconds=120)
    finally:
        kill_session(ranks.session)
        ranks.codes(timeout=30)
    assert "done" not in [event["event"] for event in events(run_dir)], "killed too late"


def resume(run_dir: Path, flags: Iterable[object]) -> None:
    """Run a killed run to its end."""
    done = run_ranks(2, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "resume" in [event["event"] for event in events(run_dir)]


def compare_with_killed(
    base: Path, flags_of: Callable[[str], list[object]], keys: Iterable[str]
) -> str:
    """Require that a run `killed` ends as a run `complete`; return what `complete` prints.

    Args:
        flags_of: returns the flags of a run, given its name.
        keys: metrics that must be equal in every step.
    """
    done = run_ranks(2, *flags_of("complete"))
    assert done.returncode == 0, done.stdout[-4000:]
    kill_at(KILL_STEP, base / "killed", flags_of("killed"))
    resume(base / "killed", flags_of("killed"))
    for key in keys:
        expected = rows(base / "complete", key)
        assert expected and rows(base / "killed", key) == expected, f"{key} differs"
    return done.stdout


def stopped_and_resumed(job: dict, step: int, resumed: dict | None = None) -> list[dict]:
    """Return jobs of `runs_in_one_process`: one that stops after a step, and one that resumes it.

    Args:
        resumed: the second job, if it differs from the first.
    """
    return [{**job, "until": step}, resumed or job]
