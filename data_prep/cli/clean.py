"""`python -m data_prep clean` and `progress`: filters alone, and how far tasks are."""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems
from zerolm.errors import ConfigError

STRAGGLING = 3  # times the median of the tasks that are done


def clean(options: argparse.Namespace) -> None:
    """Filter documents, and print what was dropped."""
    from dataclasses import replace

    from data_prep.bad_input import Tally, summary_lines
    from data_prep.clean import CleanOptions, run_clean
    from data_prep.executors import show_progress
    from data_prep.input_flags import input_rules
    from data_prep.phases import LocalExecutor
    from data_prep.sources import find_inputs
    from data_prep.stage_outputs import dropped_problems, output_problems, overlap_problems
    from zerolm.provenance import versions

    problems = Problems()
    workers = problems.number(
        "workers", options.workers, 1, 4096, default=len(os.sched_getaffinity(0))
    )
    rules = replace(input_rules(options, problems), keep_records=True)
    skip = rules.on_bad_input == "skip"
    found = problems.of(find_inputs, options.input, options.text_field, skip)
    filters = problems.of(_read_filters, options.filters)
    files = [] if found is None else found[0]
    problems.lines += output_problems(options.output)
    problems.lines += overlap_problems(options.output, options.input, files)
    if (dropped := options.keep_dropped) is not None:
        problems.lines += dropped_problems(dropped, options.output)
        problems.lines += overlap_problems(dropped, options.input, files, "--keep_dropped")
    problems.refuse()
    inputs, notes = found
    for note in notes:
        print(note, file=sys.stderr)
    listed = [{"file": each.name, "size_bytes": each.size_bytes} for each in inputs]
    start = time.monotonic()
    manifest = run_clean(
        CleanOptions(tuple(filters), rules, keep_dropped=options.keep_dropped),
        inputs,
        options.output,
        LocalExecutor(workers, show_progress),
        {"inputs": listed, "versions": versions()},
    )
    kept, read = manifest["documents_out"], manifest["documents_in"]
    print(f"{options.output}: kept {kept:,} of {read:,} documents")
    for reason, count in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        print(f"    {reason:<48}{count:>12,}")
    for line in summary_lines(inputs, Tally.from_records([manifest["reading"]]), rules):
        print(line)
    print(f"seconds: {time.monotonic() - start:,.1f} with {workers} workers")


def _read_filters(path: Path) -> Any:
    """Return the list of filters in a file, which may be a recipe.

    Raises:
        ConfigError: all that is wrong with them.
    """
    from data_prep.filters import filter_problems, relative_to

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--filters {path}: cannot be read as JSON ({error}).") from error
    if isinstance(content, dict):
        content = content.get("clean", {})
        content = content.get("filters", []) if isinstance(content, dict) else content
    content = relative_to(path.parent.resolve(), content)
    if wrong := filter_problems(content, f"{path}"):
        raise ConfigError(wrong)
    return content


def progress(options: argparse.Namespace) -> None:
    """Show every phase below a directory: done, running, failed, rate, stragglers."""
    found = sorted(path.parent for path in options.directory.glob("**/records/*/"))
    phases = sorted({path for parent in found for path in parent.iterdir() if path.is_dir()})
    if not phases:
        raise ConfigError(f"{options.directory}: no tasks have begun below it. Check the path.")
    for phase in phases:
        _show_phase(phase, phase.relative_to(options.directory))


def _show_phase(phase: Path, name: Path) -> None:
    done = {path.stem: _read(path) for path in sorted(phase.glob("[0-9]*.json"))}
    running = {path.stem: _read(path) for path in sorted(phase.glob("*.running"))}
    running = {task: note for task, note in running.items() if task not in done and note}
    failed = [path.stem for path in sorted(phase.glob("*.failed")) if path.stem not in done]
    records = [record for record in done.values() if record]
    words = [f"{len(done):,} done", f"{len(running):,} running", f"{len(failed):,} failed"]
    seconds = [record["seconds"] for record in records]
    if records:
        since = min(record["started"] for record in records)
        until = max(record["started"] + record["seconds"] for record in records)
        words.append(f"{60 * len(records) / max(until - since, 1e-9):,.1f} tasks a minute")
        words.append(f"median {statistics.median(seconds):,.1f} s")
        hosts = {record["host"] for record in records}
        words.append(f"{len(hosts):,} hosts" if len(hosts) > 1 else f"on {hosts.pop()}")
    print(f"{name}: {', '.join(words)}")
    limit = STRAGGLING * statistics.median(seconds) if seconds else float("inf")
    for task, note in running.items():
        age = time.time() - note["started"]
        slow = ", more than three times the median" if age > limit else ""
        read = ""
        if note.get("total_bytes"):
            read = f", {note['input_bytes'] / note['total_bytes']:.0%} read"
        print(f"    task {task} on {note['host']} (pid {note['pid']}) for {age:,.0f} s{read}{slow}")
    for task in failed:
        note = _read(phase / f"{task}.failed") or {}
        lines = note.get("refused") or note.get("traceback", "unknown").strip().splitlines()[-1:]
        print(f"    task {task} failed on {note.get('host')}: {lines[0]}")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
