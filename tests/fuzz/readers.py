"""Programs that read the files of a run or of shards back, and what they must do with any file."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.guard import call, snapshot, unprintable
from tests.fuzz.mutations import Damage
from zerolm.checkpoint import load, rollback
from zerolm.common.errors import EXIT_REFUSED, ZerolmError
from zerolm.evaluate.crashes import EvaluationAttempts
from zerolm.preflight import check
from zerolm.report.html import render
from zerolm.report.report_data import report_data
from zerolm.report.run_history import read_run
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import EventRow, MetricsRow, SampleRow
from zerolm.run_dir.records import read_rollbacks
from zerolm.tracking.mirror import Tail
from zerolm.tracking.report_process import start_for
from zerolm.tracking.run_log import RunLog, archive
from zerolm.tracking.wandb import WandbTracker
from zerolm.upload.uploader import _read_sent_list
from zerolm.watchdog import progress, verdict

MAX_LINE = 2000  # characters of a message


def names(damage: Sequence[Damage], base: Path, text: str) -> bool:
    """Return whether a message names a damaged file, or the directory that it makes invalid."""
    paths = [base / each.name for each in damage]
    return not paths or any(
        str(path) in text or str(path.parent) in text or path.name in text for path in paths
    )


def answer(base: Path, damage: Sequence[Damage], *words: object) -> bool:
    """Run a command; check its exit code and message; return whether it accepts the files."""
    code, output = call(*words)
    assert code in (0, EXIT_REFUSED), f"exit code {code} of {words[:2]}: {output}"
    assert code == 0 or names(damage, base, output), f"names no file: {output[-800:]}"
    lines = [line for line in output.splitlines() if len(line) > MAX_LINE]
    assert not lines or "--json" in words, f"long line: {lines[0][:300]}"
    return code == 0


def run_reading_commands(base: Path, damage: Sequence[Damage]) -> bool:
    """Run what reads a run and writes nothing; return whether all accept it."""
    run = base / "run"
    before = snapshot(base)
    commands = (("status", run), ("status", "--json", run), ("verify-checkpoint", run))
    good = [answer(base, damage, *words) for words in commands]
    with contextlib.suppress(ZerolmError):
        render(report_data([read_run(run)]))
    assert snapshot(base) == before, "something was written"
    return all(good)


def accepted(base: Path, damage: Sequence[Damage], words: Sequence[str]) -> bool:
    """Return whether `--check` accepts a run; if not, check its message, and the files."""
    before = snapshot(base)
    try:
        check.check(words, {}).summary()  # which pretrain.py prints by an escaping stream
    except ZerolmError as error:
        assert error.exit_code == EXIT_REFUSED, error
        for line in str(error).splitlines():
            assert not (bad := unprintable(line)), f"{bad} in {line!r}"
            assert len(line) < MAX_LINE, f"long line: {line[:300]}"
        named = names(damage, base, str(error)) or "command line: --" in str(error)
        assert named, f"names no file: {error}"
        return False
    except SystemExit as end:  # of --help and --version
        assert end.code == 0, end.code
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


def shown(base: Path, what: str) -> None:
    """Check that `status` and the report show a run."""
    for words in (("status",), ("status", "--json")):
        code, output = call(*words, base / "run")
        assert code == 0, f"{what}: {output}"
    strict_lines(output)
    render(report_data([read_run(base / "run")]))


def strict_lines(output: str) -> None:
    """Check that every line is JSON that every parser reads."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in io.StringIO(output):
        json.loads(line, parse_constant=refuse)
