"""The figures of benchmarks/gpu: its files, its table, and whether the goals are reached."""

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import tables
from benchmarks.gpu.cases import EXACT, OURS, TOY_MODELS, TRAINER, Case
from benchmarks.machine import hardware


@dataclass
class Figures:
    """The result of a case.

    Attributes:
        outcome: why there is no result; empty if there is one.
        start_seconds: time from its start to its first line, including compilation.
        case_seconds: time of the complete case.
        data_seconds: median wait of a step for its data; of pretrain.py only, as the next.
        first_stall_seconds, stall_seconds: time that the first checkpoint stopped training, and the
            longest of the later ones; 0 without one.
        planned_bytes: peak memory that the plan expects, without compilation and recomputation.
        graphs, recompiled: graphs that torch made, and those of them for another shape or value.
        attention: kernel of pretrain.py.
        device: clock, power, memory and contexts in the last step that counts.
    """

    case: Case
    micro_batch: int = 0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    peak_bytes: int = 0
    start_seconds: float = 0.0
    case_seconds: float = 0.0
    data_seconds: float = 0.0
    first_stall_seconds: float = 0.0
    stall_seconds: float = 0.0
    reported_tokens_per_second: float = 0.0
    planned_bytes: int = 0
    graphs: int = 0
    recompiled: int = 0
    attention: str = ""
    device: str = ""
    outcome: str = ""


def read(output: Path | None) -> dict[Case, Figures]:
    """Return the cases of an earlier call that have a figure."""
    path = output / "gpu.json" if output else None
    if path is None or not path.exists():
        return {}
    rows = [row | {"case": Case(**row["case"])} for row in json.loads(path.read_text())]
    return {row["case"]: Figures(**row) for row in rows if not row["outcome"]}


def write(results: list[Figures], arguments: argparse.Namespace) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "gpu.md").write_text(table(results, arguments) + "\n")
    rows = [asdict(result) for result in results]
    (arguments.output / "gpu.json").write_text(json.dumps(rows, indent=1) + "\n")


# Heads of the columns after the flags, and their cells; of pretrain.py only where True.
COLUMNS: tuple[tuple[str, Callable[[Figures], str], bool], ...] = (
    ("micro-batch", lambda one: str(one.micro_batch), False),
    ("tokens/s", lambda one: f"{one.tokens_per_second:,.0f}", False),
    ("reported", lambda one: f"{one.reported_tokens_per_second:,.0f}", True),
    ("MFU", lambda one: f"{one.mfu:.1%}", False),
    ("peak GiB", lambda one: f"{one.peak_bytes / 2**30:.1f}", False),
    ("planned", lambda one: f"{one.planned_bytes / 2**30:.1f}", True),
    ("first line after s", lambda one: f"{one.start_seconds:.0f}", False),
    ("case s", lambda one: f"{one.case_seconds:.0f}", False),
    ("data ms", lambda one: f"{1e3 * one.data_seconds:.2f}", True),
    ("saves s", lambda one: f"{one.first_stall_seconds:.2f}, {one.stall_seconds:.2f}", True),
    ("attention", lambda one: one.attention or "-", False),
    ("graphs, recompiled", lambda one: f"{one.graphs}, {one.recompiled}", False),
)


def table(results: list[Figures], arguments: argparse.Namespace) -> str:
    """Return the Markdown table; ratios are to the fastest pretrain.py of the model and length."""
    flags, toy = shlex.join(sys.argv[1:]), arguments.toy
    command = f"`python -m benchmarks.gpu {flags}`".replace(" `", "`")
    base = {
        (result.case.model, result.case.seq_len): result.tokens_per_second
        for result in reversed(results)
        if result.case.contender == OURS and result.case.words == EXACT
    }
    rows = []
    for result in results:
        case = result.case
        model = f"{Path(TOY_MODELS[case.model]).stem} for {case.model}" if toy else case.model
        cells = [
            cell(result) if case.contender == OURS or not is_ours else "-"
            for _, cell, is_ours in COLUMNS
        ]
        if not result.first_stall_seconds:
            cells[9] = "-"
        reference = base.get((case.model, case.seq_len), 0.0)
        ratio = f"{result.tokens_per_second / reference:.2f}" if reference else "-"
        if result.outcome:
            cells[1:] = [result.outcome, *"-----", cells[7], *"----"]
            ratio = "-"
        rows.append(
            [model, f"{case.seq_len:,}", case.contender, case.words or "-", *cells, ratio]
            + [result.device or "-"]
        )
    head = ["model", "tokens", "contender", "flags", *(head for head, _, _ in COLUMNS)]
    shown = tables.table([*head, "of the first", "device"], rows)
    machine = f"{command}, {time.strftime('%Y-%m-%d')}, {hardware()}"
    return "\n".join([machine, "", shown] + (["", *goals(results)] if not toy else []))


def goals(results: list[Figures]) -> list[str]:
    """Return a line for each goal for the 1.3B at the shorter length."""
    short = min((each.case.seq_len for each in results), default=0)
    mine = [each for each in results if (each.case.model, each.case.seq_len) == ("1.3B", short)]

    def fastest(contender: str, pattern: str = "") -> Figures | None:
        found = [one for one in mine if one.case.contender == contender and _speed(one)]
        return max(
            (one for one in found if re.search(pattern, one.case.words)), key=_speed, default=None
        )

    # Cases with other rounding than Trainer's JSON do not count, and fp8 has a goal of its own.
    ours, fp8 = fastest(OURS, "^(?!.*(dtype|--fp8))"), fastest(OURS, "--fp8")
    if ours is None:
        return []
    lines = [f"1.3B: MFU {ours.mfu:.3f} with `{ours.case.words}`; the goal is 0.58 on H200."]
    for other, text in (
        (fp8, "1.3B: fp8 {:.2f} times as fast; the goal is 1.17."),
        (fastest(TRAINER), "1.3B: {:.2f} times as fast as Trainer; the goal is 1.3."),
    ):
        if other is not None:
            ratio = _speed(other) / _speed(ours)
            lines.append(text.format(ratio if other is fp8 else 1 / ratio))
    return lines


def _speed(result: Figures) -> float:
    return result.tokens_per_second
