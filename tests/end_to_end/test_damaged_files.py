"""Whatever is in the files of a run, every program that reads them back says so in one line.

No traceback, no hang, and nothing is written by a refusal. tests/fuzz damages them at random.
"""

import contextlib
import io
import json
import re
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from launch.supervise.attempt import Attempt
from launch.supervise.restarts import Policy, Restarts
from tests.damaged_runs import command, make_run
from tests.fuzz.guard import call
from tests.fuzz.mutations import OBJECTS, Damage
from tests.fuzz.readers import accepted, resume, run_reading_commands, shown
from tests.fuzz.targets import in_the_checkout
from tests.launching import one_rank
from zerolm.checkpoint.manifest import manifest_digest
from zerolm.report.run_history import read_run
from zerolm.run_dir.files import MANIFEST

HANG_SECONDS = 60
METRICS = "run/metrics.jsonl"
NUMBERS, MORE_NUMBERS = (
    ["NaN"],
    ["1e999", "0", "-1", "1e-300", "1e300", "9" * 30, "null", "-Infinity"],
)
NOISE = "<raw>"  # in a JSON string: replaced, with its quotes, by a number


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Iterator[Path]:
    """A directory with shards, a model config and a run, which no test changes."""
    base = tmp_path_factory.mktemp("damage") / "original"
    base.mkdir()
    with in_the_checkout(), contextlib.redirect_stdout(io.StringIO()):
        make_run(base)
    with one_rank(base.with_name("store")):
        yield base


def files_in(base: Path) -> list[str]:
    """Return the files to damage: those of programs of ours, but not a checkpoint's weights."""
    found = (path for path in base.glob("*/**/*") if path.is_file() and path.suffix != ".pt")
    return sorted(str(path.relative_to(base)) for path in found)


@contextlib.contextmanager
def damaged(base: Path, damage: Damage) -> Iterator[Path]:
    """Copy the directory to the same place, damaged; the original is back at the end."""
    original = base.with_name("kept")
    base.rename(original)
    try:
        shutil.copytree(original, base)
        damage.apply(base / damage.name)
        yield base
    finally:
        shutil.rmtree(base)
        original.rename(base)


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    def expired(*_: object) -> None:
        raise AssertionError(f"hangs for more than {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def supervise(base: Path) -> None:
    """Let the supervisor watch a launch that fails at once, and decide about a restart."""
    run = base / "run"
    attempt = Attempt(["false"], "damaged", run)
    attempt.events_start = 0
    while attempt.running():
        pass
    attempt.heartbeats()
    attempt.request_stop(signal.SIGTERM)
    outcome = attempt.finish()
    assert isinstance(outcome.exit_code, int)
    assert not any("cannot read" in reason for reason in outcome.reasons), outcome.reasons
    restarts = Restarts(Policy(same_step_limit=1), run)
    assert restarts.add_failure(outcome) is not None


def survives(base: Path, damage: Damage) -> None:
    with damaged(base, damage), time_limit(), in_the_checkout():
        run_reading_commands(base, [damage])
        supervise(base)
        if accepted(base, [damage], command(base)):
            with contextlib.redirect_stdout(io.StringIO()):
                resume(base)


def test_an_undamaged_run_is_accepted_by_everything(base) -> None:
    nothing = Damage("run/run.json", "nothing", lambda path: None)
    with damaged(base, nothing), in_the_checkout():
        assert accepted(base, [nothing], command(base))
        assert call("status", base / "run")[0] == call("verify-checkpoint", base / "run")[0] == 0
        assert read_run(base / "run").problems == []


@pytest.mark.parametrize("what", ["a directory", pytest.param("a pipe", marks=pytest.mark.soak)])
def test_each_file_that_is_no_file_of_ours_is_survived(base, what) -> None:
    for name in files_in(base):
        if name.startswith("run/") and MANIFEST not in name:
            survives(base, Damage(name, what, OBJECTS[what]))


@pytest.mark.parametrize("number", ["-1", pytest.param("1e999", marks=pytest.mark.soak)])
def test_any_number_in_the_events_is_survived(base, number) -> None:
    path = base / "run" / "events.jsonl"
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        for key in json.loads(line):
            changed = json.dumps({**json.loads(line), key: NOISE}).replace(f'"{NOISE}"', number)
            path.write_text("\n".join([*lines[:index], changed, *lines[index + 1 :]]) + "\n")
            shown(base, f"{number} for {key} of event {index}")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.soak
def test_a_manifest_without_any_of_its_keys_is_survived(base) -> None:
    name = f"run/checkpoints/step-00000015/{MANIFEST}"
    manifest = json.loads((base / name).read_text())
    for key in manifest:
        changed = {each: value for each, value in manifest.items() if each != key}
        changed["digest"] = manifest_digest(changed)
        text = json.dumps(changed)
        survives(base, Damage(name, f"without {key}", partial(Path.write_text, data=text)))


@pytest.mark.parametrize(
    "number",
    [*NUMBERS, *(pytest.param(number, marks=pytest.mark.soak) for number in MORE_NUMBERS)],
)
def test_any_number_in_the_metrics_is_survived(base, number) -> None:
    lines = (base / METRICS).read_text().splitlines()
    for key in {key for line in lines for key in json.loads(line)}:
        number_of_key = partial(re.sub, rf'("{key}": )[^,}}]+', rf"\g<1>{number}")
        for where in (slice(None), slice(10, 11), slice(12, 13)):  # all; a step; an evaluation
            changed = lines.copy()
            changed[where] = map(number_of_key, lines[where])
            (base / METRICS).write_text("\n".join(changed) + "\n")
            shown(base, f"{number} for {key}")
    (base / METRICS).write_text("\n".join(lines) + "\n")
