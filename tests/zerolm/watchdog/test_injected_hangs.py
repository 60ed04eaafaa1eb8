"""Real processes that hang: the rank at fault is named, and no other one."""

import pytest

from tests import injected_hangs
from tests.launching import run_module


def run(*arguments: object) -> str:
    done = run_module("tests.injected_hangs", *arguments, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_guilty_rank_is_named_where_all_stall_outside_of_collectives() -> None:
    found = dict(enumerate(injected_hangs.cases()))
    assert len(found) == injected_hangs.NUM_CASES
    kind, case = found[1]
    assert kind == "asleep in Python" and case.queued and case.ranks == 3
    assert "1 of 1 verdicts are right" in run("--cases", 1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_guilty_rank_is_named_in_hangs_of_every_kind() -> None:
    """Every third of the hangs of `benchmarks/results/hangs.md`, and slow runs without one."""
    output = run("--every", 3, "--jobs", 4)
    for kind in (*injected_hangs.HANGS, injected_hangs.SLOW_KIND):
        assert f"| {kind} |" in output
