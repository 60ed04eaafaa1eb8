"""The soak tests are divided into turns that fit into CI, and each commit has the next one."""

import json
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests import soak_rotation
from tests.soak_rotation import (
    MINUTES,
    SECONDS,
    START_SECONDS,
    duration,
    ended,
    groups,
    length,
    number_of_commit,
    run,
    run_group,
    turns,
)

FILES = ("test_a.py", "test_b.py", "test_c.py", "test_d.py")


def some_tests(seed: int) -> dict[str, float]:
    """Return {name: seconds} of random tests."""
    rng = random.Random(seed)
    return {
        f"tests/{rng.choice(FILES)}::test_{number}": rng.uniform(1, 900)
        for number in range(rng.randint(1, 120))
    }


@pytest.mark.parametrize("seed", range(20))
def test_each_test_has_one_turn_and_no_turn_is_too_long(seed):
    seconds = some_tests(seed)
    names = sorted(seconds)
    found = turns(names, seconds, most_seconds=2100)
    assert sorted(name for turn in found for group in turn for name in group) == names
    assert all(length(turn, seconds) <= 2100 for turn in found)
    # As many as fit: fewer turns could not hold half as much again.
    total = sum(duration(group, seconds) for group in groups(names, seconds))
    assert len(found) <= max(1, total / 2100 * 1.5 + 1)


def test_tests_of_a_file_share_a_process_unless_they_take_long():
    seconds = {"a::1": 100.0, "a::2": 150.0, "a::3": 200.0, "b::1": 10.0, "c::1": 5000.0}
    found = groups([*seconds], seconds)
    assert found == [["a::1", "a::2"], ["a::3"], ["b::1"], ["c::1"]]
    assert duration(found[0], seconds) == 250 + START_SECONDS
    # One that is longer than a turn still comes up, alone.
    assert [["c::1"]] in turns([*seconds], seconds, most_seconds=2100)


def test_all_recorded_tests_come_up_within_24_commits():
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
    assert len(turns([*seconds], seconds, MINUTES * 60)) <= 24


def git(directory: Path, *words: object) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *map(str, words)], cwd=directory, capture_output=True, text=True,
        check=True, timeout=60,
    ).stdout.strip()  # fmt: skip


def test_consecutive_commits_have_consecutive_turns_and_a_shallow_clone_has_one(tmp_path):
    full, shallow = tmp_path / "full", tmp_path / "shallow"
    full.mkdir()
    git(full, "init", "--quiet")
    numbers = []
    for _ in range(4):
        git(full, "commit", "--quiet", "--allow-empty", "--message", "x")
        numbers.append(number_of_commit(full))
    assert numbers == [1, 2, 3, 4]
    git(tmp_path, "clone", "--quiet", "--depth", 1, full.as_uri(), shallow)
    assert number_of_commit(shallow) == int(git(shallow, "rev-parse", "HEAD")[:12], 16)


TESTS = """
import pathlib, subprocess, pytest
pytestmark = pytest.mark.soak
def test_good(): pass
def test_bad(): assert 0
def test_unlucky():
    mark = pathlib.Path(__file__).with_suffix(".mark")
    before = mark.exists()
    mark.touch()
    assert before
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
def test_endless():
    sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
    pathlib.Path(__file__).with_suffix(".pid").write_text(str(sleeper.pid))
    sleeper.wait()
"""


@pytest.mark.soak
def test_a_failure_fails_the_turn_and_a_test_that_does_not_end_is_ended(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text(TESTS)
    now = time.monotonic()
    good, found = run_group([f"{file}::test_good", f"{file}::test_skipped"], now + 60)
    assert good and [each.outcome for each in found] == ["passed", "skipped: no GPU"]
    group = [f"{file}::{name}" for name in ("test_bad", "test_good", "test_unlucky")]
    good, found = run([group], {}, now + 600, now + 60)
    assert [each.outcome for each in found] == [
        "failed", "passed", "failed", "failed at the second try", "passed at the second try",
    ]  # fmt: skip
    assert not good
    good, found = run([group[1:]], {}, now + 600, now + 60)
    assert good and [each.outcome for each in found] == ["passed", "passed"]
    endless, until = [f"{file}::test_endless"], time.monotonic() + 20
    assert run_group(endless, until) == (False, ended(endless))
    pid = int(file.with_suffix(".pid").read_text())
    deadline = time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(("recorded", "passes"), [(-START_SECONDS, False), (30.0, True)])
def test_what_is_ended_has_failed_only_after_three_times_its_seconds(monkeypatch, recorded, passes):
    monkeypatch.setattr(soak_rotation, "run_group", lambda group, until: (False, ended(group)))
    later = time.monotonic() + 600
    assert run([["a::b"]], {"a::b": recorded}, later, later) == (passes, ended(["a::b"]))


def test_a_group_that_no_longer_fits_waits_and_fails_nothing(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text(TESTS)
    now = time.monotonic()
    turn = [[f"{file}::test_good"], [f"{file}::test_bad"]]
    good, found = run(turn, {}, start_before=now, until=now + 200)
    assert good and [each.outcome for each in found] == ["passed", "waits: out of time"]
    good, found = run(turn, {}, start_before=now, until=now + 60)
    assert good and [each.outcome for each in found] == ["waits: out of time"] * 2
