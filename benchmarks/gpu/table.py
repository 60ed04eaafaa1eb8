"""The figures of benchmarks/gpu: its files, its table, and whether the goals are reached."""

import argparse
import json
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

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


def table(results: list[Figures], arguments: argparse.Namespace) -> str:
    """Return the Markdown table; ratios are to the fastest pretrain.py of the model and length."""
    flags, toy = shlex.join(sys.argv[1:]), arguments.toy
    lines = [
        f"`python -m benchmarks.gpu {flags}`".replace(" `", "`")
        + f", {time.strftime('%Y-%m-%d')}, {hardware()}",
        "",
        "| model | tokens | contender | flags | micro-batch | tokens/s | reported | MFU | peak GiB "
        "| planned | first line after s | case s | data ms | saves s | attention "
        "| graphs, recompiled | of the first | device |",
        "|" + "---|" * 18,
    ]
    base = {
        (result.case.model, result.case.seq_len): result.tokens_per_second
        for result in reversed(results)
        if result.case.contender == OURS and result.case.words == EXACT
    }
    for result in results:
        case = result.case
        model = f"{Path(TOY_MODELS[case.model]).stem} for {case.model}" if toy else case.model
        cells = [model, f"{case.seq_len:,}", case.contender, f"{case.words or '-'}"]
        if result.outcome:
            cells += [
                str(result.micro_batch or "-"),
                result.outcome,
                *"-----",
                f"{result.case_seconds:.0f}",
                *"------",
            ]
        else:
            reference = base.get((case.model, case.seq_len), 0.0)
            ratio = f"{result.tokens_per_second / reference:.2f}" if reference else "-"
            cells += [
                str(result.micro_batch),
                f"{result.tokens_per_second:,.0f}",
                f"{result.reported_tokens_per_second:,.0f}",
                f"{result.mfu:.1%}",
                f"{result.peak_bytes / 2**30:.1f}",
                f"{result.planned_bytes / 2**30:.1f}",
                f"{result.start_seconds:.0f}",
                f"{result.case_seconds:.0f}",
                f"{1e3 * result.data_seconds:.2f}",
            ]
            if case.contender != OURS:
                cells[6] = cells[9] = cells[12] = "-"
            stalls = f"{result.first_stall_seconds:.2f}, {result.stall_seconds:.2f}"
            cells += [stalls if result.first_stall_seconds else "-"]
            cells += [result.attention or "-", f"{result.graphs}, {result.recompiled}"]
            cells += [ratio, result.device or "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines + (["", *goals(results)] if not toy else []))


def goals(results: list[Figures]) -> list[str]:
    """Return a line for each goal for the 1.3B at the shorter length."""
    short = min((result.case.seq_len for result in results), default=0)
    mine = [
        result for result in results if result.case.model == "1.3B" and result.case.seq_len == short
    ]
    # Cases with other rounding than Trainer's JSON do not count, and fp8 has a goal of its own.
    exact = [
        result
        for result in mine
        if result.case.contender == OURS and not re.search("dtype|--fp8", result.case.words)
    ]
    ours = max(exact, key=_speed, default=None)
    trainer = max(
        (result for result in mine if result.case.contender == TRAINER), key=_speed, default=None
    )
    lines = []
    if ours and _speed(ours):
        lines.append(
            f"1.3B: MFU {ours.mfu:.3f} with `{ours.case.words}`; the goal is 0.58 on H200."
        )
        fp8 = max((_speed(each) for each in mine if "--fp8" in each.case.words), default=0.0)
        if fp8:
            lines.append(f"1.3B: fp8 {fp8 / _speed(ours):.2f} times as fast; the goal is 1.17.")
        if trainer and _speed(trainer):
            ratio = _speed(ours) / _speed(trainer)
            lines.append(f"1.3B: {ratio:.2f} times as fast as Trainer; the goal is 1.3.")
    return lines


def _speed(result: Figures) -> float:
    return result.tokens_per_second
