"""`python -m data_prep dedup` and `decontaminate`: what they do and say."""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.command_line import Problems
from data_prep.documents import REASONS, InputRules
from data_prep.input_flags import input_rules
from zerolm.errors import ConfigError


def dedup(options: argparse.Namespace) -> None:
    """Deduplicate, and print what was dropped."""
    from data_prep.dedup import DUPLICATES, DedupOptions, run_dedup

    problems = Problems()
    near = {"on": True, "off": False}.get(options.near)
    if near is None:
        problems.lines.append(f"--near {options.near}: is not on or off.")
    chosen = DedupOptions(
        threshold=_fraction(problems, "threshold", options.threshold, 0.8),
        shingle_words=problems.number("shingle_words", options.shingle_words, 1, default=13),
        exact=options.exact,
        near=near is not False,
        permutations=problems.number("permutations", options.permutations, 1, default=128),
        memory_bytes=problems.number("memory", options.memory, 1, default=1 << 30),
    )
    manifest, seconds = _run(options, problems, chosen, run_dedup, {"memory_bytes": "memory"})
    if (bands := manifest["bands"]) is not None:
        print(
            f"signatures  {bands['bands']} bands of {bands['rows']} rows: "
            f"{manifest['candidate_pairs']:,} candidate pairs, {manifest['similar_pairs']:,} at "
            f"{chosen.threshold} or above"
        )
        print(
            f"too short   {manifest['documents_without_shingles']:,} documents of fewer than "
            f"{chosen.shingle_words} words: only exact copies are looked for"
        )
    _show(options.output, manifest, seconds, options.output / DUPLICATES)


def decontaminate(options: argparse.Namespace) -> None:
    """Decontaminate, and print what was dropped."""
    from data_prep.decontaminate import CONTAMINATED, DecontaminateOptions, run_decontaminate

    problems = Problems()
    chosen = DecontaminateOptions(
        evaluation=tuple(options.evaluation),
        ngram_words=problems.number("ngram_words", options.ngram_words, 1, default=13),
        min_overlap=_fraction(problems, "min_overlap", options.min_overlap, 0.0),
        min_item_words=problems.number("min_item_words", options.min_item_words, 1, default=5),
    )
    problems.of(chosen.read_items)
    manifest, seconds = _run(options, problems, chosen, run_decontaminate, {})
    print(f"looked for  {manifest['items']:,} items, {manifest['texts']:,} texts")
    if manifest["texts_too_short"]:
        print(
            f"not looked  {manifest['texts_too_short']:,} texts of fewer than "
            f"{chosen.min_item_words} words"
        )
    _show(options.output, manifest, seconds, options.output / CONTAMINATED)


def _run(
    options: argparse.Namespace,
    problems: Problems,
    chosen: Any,
    run: Callable[..., dict[str, Any]],
    flags: dict[str, str],
) -> tuple[dict[str, Any], float]:
    """Check everything, run a stage, and return `stage.json` and the seconds.

    Raises:
        ConfigError: all that is wrong with the flags and inputs, before anything is written.
    """
    from data_prep.phases import LocalExecutor
    from data_prep.stage_outputs import output_problems, overlap_problems

    workers = problems.number(
        "workers", options.workers, 1, 4096, default=len(os.sched_getaffinity(0))
    )
    problems.lines += [f"--{flags.get(key, key)}: {what}" for key, what in chosen.problems()]
    problems.lines += output_problems(options.output)
    problems.lines += overlap_problems(options.output, options.input)
    found = problems.of(_open, options.input, input_rules(options, problems), options.output)
    problems.refuse()
    start = time.monotonic()
    shown = set()

    def show(phase: Any, record: dict[str, Any]) -> None:
        if phase.name not in shown:
            shown.add(phase.name)
            print(f"{phase.name}: {phase.num_tasks} tasks", file=sys.stderr, flush=True)

    manifest = run(chosen, *found, options.output, LocalExecutor(workers, show))
    return manifest, time.monotonic() - start


def _open(arguments: list[str], rules: InputRules, output: Path) -> tuple[Any, str, dict[str, Any]]:
    from data_prep.clean import CleanOptions, run_clean
    from data_prep.sources import find_inputs
    from data_prep.stage_documents import stage_documents, unit_documents
    from data_prep.stage_files import is_stage, read_stage
    from data_prep.stage_outputs import overlap_problems

    if len(arguments) == 1 and is_stage(arguments[0]):
        return stage_documents(read_stage(arguments[0]))
    inputs, notes = find_inputs(arguments, rules.text_field, rules.on_bad_input == "skip")
    if among := overlap_problems(output, (), inputs):
        raise ConfigError(among)
    for note in notes:
        print(note, file=sys.stderr)

    def read(rules: InputRules, directory: Path, executor: Any) -> Any:
        print(f"{directory}: input that cannot be cut is read into a stage", file=sys.stderr)
        run_clean(CleanOptions((), rules), inputs, directory, executor, {})
        return read_stage(directory)

    return unit_documents(inputs, rules, read)


def _fraction(problems: Problems, flag: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        problems.lines.append(f"--{flag} {text}: is not a number from 0 to 1.")
        return default
    return value


def _show(output: Path, manifest: dict[str, Any], seconds: float, details: Path) -> None:
    before, after = manifest["documents_in"], manifest["documents_out"]
    print(
        f"documents   {before:,} -> {after:,}, {manifest['text_bytes_in'] / 1e6:,.1f} -> "
        f"{manifest['text_bytes_out'] / 1e6:,.1f} MB of text"
    )
    for reason, count in manifest["dropped"].items():
        size = manifest["dropped_bytes"][reason] / 1e6
        print(f"dropped     {count:,} {reason.replace('_', ' ')}, {size:,.1f} MB")
    for reason, count in manifest["bad_documents"].items():
        print(f"skipped     {count:,} {REASONS[reason]}")
    print(f"which ones  {details}")
    rate = manifest["text_bytes_in"] / 1e6 / max(seconds, 1e-9)
    print(f"seconds     {seconds:,.1f}, {rate:,.1f} MB/s of text")
    if not after:
        print(f"note        {output}: no document is left. Check the options.")
