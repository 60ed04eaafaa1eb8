"""Whatever is in the files of a run, every program that reads them back says so in one line.

No traceback, no hang, and nothing is written by a refusal. The soak test tries many more examples:

    pytest -m soak tests/end_to_end/test_damaged_files.py
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from launch.supervise.attempt import Attempt
from launch.supervise.restarts import Policy, Restarts
from tests import ROOT
from tests.damaged_runs import NOISE, OBJECTS, Damage, command, damages, make_run
from zerolm.__main__ import main
from zerolm.checkpoint import load, rollback
from zerolm.checkpoint.manifest import manifest_digest
from zerolm.common.errors import EXIT_REFUSED, ZerolmError
from zerolm.common.jsonl import EventRow, MetricsRow, SampleRow
from zerolm.common.run_files import MANIFEST, RunFiles
from zerolm.config.run_records import read_rollbacks
from zerolm.evaluate.attempts import EvaluationAttempts
from zerolm.preflight import check
from zerolm.report.html import render
from zerolm.report.report_data import report_data
from zerolm.report.run_history import read_run
from zerolm.tracking.mirror import Tail
from zerolm.tracking.report_process import start_for
from zerolm.tracking.run_log import RunLog, archive
from zerolm.tracking.wandb import WandbTracker
from zerolm.upload.uploader import _read_sent_list
from zerolm.watchdog import progress, verdict

HANG_SECONDS = 60
METRICS = "run/metrics.jsonl"
NUMBERS, MORE_NUMBERS = (
    ["NaN"],
    ["1e999", "0", "-1", "1e-300", "1e300", "9" * 30, "null", "-Infinity"],
)
FEW, MANY = 25, int(os.environ.get("ZEROLM_DAMAGE_EXAMPLES", "2000"))


@contextlib.contextmanager
def in_the_checkout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # contextlib.chdir needs Python 3.11
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Iterator[Path]:
    """A directory with shards, a model config and a run, which no test changes."""
    base = tmp_path_factory.mktemp("damage") / "original"
    base.mkdir()
    with in_the_checkout(), contextlib.redirect_stdout(io.StringIO()):
        make_run(base)
    store = torch.distributed.FileStore(str(base.with_name("store")), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield base
    torch.distributed.destroy_process_group()


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


def snapshot(base: Path) -> dict[str, Any]:
    found = {}
    for path in base.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_size)
    return found


def call(*words: object) -> tuple[int, str]:
    """Run a command of zerolm in this process; return its exit code and all of its output."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main([str(word) for word in words])
    return code, output.buffer.getvalue().decode()  # type: ignore[attr-defined]


def run_reading_commands(base: Path, damage: Damage) -> None:
    """Run what reads a run and writes nothing; check the exit code, the lines and the files."""
    run = base / "run"
    before = snapshot(base)
    for words in (("status", run), ("status", "--json", run), ("verify-checkpoint", run)):
        code, output = call(*words)
        assert code in (0, EXIT_REFUSED), f"{words}: {output}"
        assert code == 0 or names(damage, base, output), f"{words}: {output}"
    with contextlib.suppress(ZerolmError):
        render(report_data([read_run(run)]))
    assert snapshot(base) == before, "something was written"


def names(damage: Damage, base: Path, text: str) -> bool:
    """Return whether a message names the damaged file, or the directory that it makes invalid."""
    path = base / damage.name
    return str(path) in text or str(path.parent) in text or path.name in text


def accepted(base: Path, damage: Damage) -> bool:
    """Return whether `--check` accepts the run; if not, check its message, and the files."""
    before = snapshot(base)
    try:
        check.check(command(base), {})
    except ZerolmError as error:
        assert error.exit_code == EXIT_REFUSED
        lines = str(error).splitlines()
        assert all(line.isprintable() and len(line) < 1000 for line in lines), lines
        assert names(damage, base, str(error)), lines
        return False
    finally:
        assert snapshot(base) == before, "--check has written something"
    return True


def resume(base: Path) -> None:
    """Call what rank 0 calls to resume, and what its trackers and reports read."""
    run = base / "run"
    with contextlib.suppress(ZerolmError):
        entries = read_rollbacks(run)
        for entry in entries:
            archive(run, entry["number"], entry["to_step"])
        rollback.apply_recorded(run)
        found, _ = load.newest_complete(run, 0, 1)
        step = found.progress.step if found is not None else 0
        if found is not None:
            rollback.with_rollbacks(found.progress, entries)
        EvaluationAttempts(run).load()
        log = RunLog(run, step, writes=True)
        log.sampled_tokens()
        log.ranked_steps("eval/loss")
        log.has(step, "eval/loss")
        log.metrics({"step": step + 1, "tokens": 1})
        log.event("resume", step)
        log.sync()
        log.close("")
    files = RunFiles(run)
    pairs = ((files.metrics, MetricsRow), (files.events, EventRow), (files.samples, SampleRow))
    for path, kind in pairs:
        with contextlib.suppress(OSError):
            Tail(path, kind).read()
    with contextlib.suppress(ZerolmError):
        WandbTracker(run)
    progress.read_heartbeats(run)
    verdict.read_ranks(files.verdict("abcd"))
    for path in files.uploads.glob("*.sent"):
        _read_sent_list(path)
    child = start_for(run)
    assert child is None, "report_interval is 0"


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
        run_reading_commands(base, damage)
        if damage.name.startswith("run/"):
            supervise(base)
        if accepted(base, damage) and damage.name.startswith("run/"):
            with contextlib.redirect_stdout(io.StringIO()):
                resume(base)


OPTIONS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "print_blob": False,
}


def check_examples(base: Path, names: list[str], number: int, check: Callable) -> None:
    @settings(max_examples=number, phases=[Phase.generate], **OPTIONS)
    @given(st.data())
    def examples(data: st.DataObject) -> None:
        check(base, data.draw(damages(base, names)))

    examples()


def test_an_undamaged_run_is_accepted_by_everything(base) -> None:
    nothing = Damage("run/run.json", "nothing", lambda path: None)
    with damaged(base, nothing), in_the_checkout():
        assert accepted(base, nothing)
        assert call("status", base / "run")[0] == call("verify-checkpoint", base / "run")[0] == 0
        assert read_run(base / "run").problems == []


@pytest.mark.parametrize("what", ["a directory", pytest.param("a pipe", marks=pytest.mark.soak)])
def test_each_file_that_is_no_file_of_ours_is_survived(base, what) -> None:
    for name in files_in(base):
        if name.startswith("run/") and MANIFEST not in name:
            survives(base, Damage(name, what, OBJECTS[what]))


def test_random_damage_to_any_file_is_survived(base) -> None:
    check_examples(base, files_in(base), FEW, survives)


def shown(base: Path, what: str) -> None:
    """Check that `status` and the report show a run."""
    for words in (("status",), ("status", "--json")):
        code, output = call(*words, base / "run")
        assert code == 0, f"{what}: {output}"
    json.loads(output, parse_constant=lambda name: pytest.fail(f"{what}: {name} is no JSON"))
    render(report_data([read_run(base / "run")]))


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


@pytest.mark.soak
@pytest.mark.parametrize("group", ["run/", "shards/"])
def test_much_random_damage_to_any_file_is_survived(base, group) -> None:
    number = MANY if group == "run/" else MANY // 5
    check_examples(
        base, [name for name in files_in(base) if name.startswith(group)], number, survives
    )
