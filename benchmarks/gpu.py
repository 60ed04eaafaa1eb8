"""Tokens per second, MFU and memory on one GPU: 160M, 1.3B and a 1.6B mixture of experts.

    python benchmarks/gpu.py --output results-of-this-gpu
    python benchmarks/gpu.py --toy        # the same end to end on a CPU, with tiny models

pretrain.py, Hugging Face Trainer with the same DeepSpeed JSON, and a bare compiled PyTorch loop
train the same model on the same tokens in batches of the same size, at 2,048 and 8,192 tokens a
sequence; then each lever of pretrain.py alone. A case has `--case_seconds`, its start in them, and
ends after `--lines`; all together have `--seconds`, the most important first: what there was no
time for is in the table too. A case without memory for its micro-batch runs with half of it.

    MFU = tokens/s x FLOPs per token / peak

with the FLOPs of zerolm/flops.py (forward and backward, attention over all keys, recomputation not
counted; Chowdhery et al. 2022, appendix B) and the datasheet's dense bf16 peak of the card, which
on a CPU is a matrix product's, timed here. Memory is the most that torch had allocated, on a CPU
the most that the process had resident. benchmarks/carry.py fetches what an offline machine lacks.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from contender import free_port  # noqa: E402
from gpu_cases import (  # noqa: E402
    OURS,
    TOY_MODELS,
    TRAINER,
    Case,
    about,
    cases,
    command,
    model_file,
    read_words,
    shards_of,
)
from training_speed import hardware, write_shard  # noqa: E402

LINE = re.compile(r"step=(\d+)\b.*?\bloss=")
PEAK = re.compile(r"\bpeak_bytes=(\d+)")
# A Python error, as a script, a rank, argparse or pretrain.py end with it.
ERROR = re.compile(
    r"(?:\[rank\d+\]: *)?(?:\w+\.)*\w*(?:Error|Exception)\b|pretrain\.py: |.*: error: "
)
REFUSED = "pretrain.py: refused"  # and in the next line why
OUT_OF_MEMORY = "out of memory"
LONGEST_REASON = 240
LEAST_SECONDS = 20  # in which a case could come to something


@dataclass
class Figures:
    """What came of a case.

    Attributes:
        outcome: empty, or why there is no figure.
        start_seconds: from its start to its first line, compilation in it.
    """

    case: Case
    micro_batch: int = 0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    peak_bytes: int = 0
    start_seconds: float = 0.0
    outcome: str = ""


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + arguments.seconds
    lengths = (64, 128) if arguments.toy else (2048, 8192)
    wanted = [one for one in cases(lengths) if re.search(arguments.only, one.title)]
    found = []
    for case in wanted:
        found.append(run_as_it_fits(case, arguments, deadline))
        one = found[-1]
        print(
            f"{case.title}: {one.outcome or f'{one.tokens_per_second:,.0f} tokens/s'}", flush=True
        )
        if arguments.output:  # as far as it is: the machine may be taken away
            write(found, arguments)
    print("\n" + table(found, arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=570, help="of all cases together")
    parser.add_argument("--case_seconds", type=float, default=75, help="of one, with its start")
    parser.add_argument("--lines", type=int, default=4, help="after which a case ends early")
    parser.add_argument("--warmup_lines", type=int, default=1, help="of a case that do not count")
    parser.add_argument("--log_interval", type=int, default=1, help="steps between two lines")
    parser.add_argument("--accumulation", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--micro_batch_size", type=int, help="(default: the most that fit)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    parser.add_argument("--only", default="", help="cases whose title has this regular expression")
    parser.add_argument("--toy", action="store_true", help="tiny models and short sequences")
    parser.add_argument("--output", type=Path, help="directory for gpu.md and gpu.json")
    return parser.parse_args()


# -------------------------------------------------------------------------------------------------
# One case


def run_as_it_fits(case: Case, arguments: argparse.Namespace, deadline: float) -> Figures:
    """Run one case, with half of the micro-batch, in twice as many, while memory is short."""
    model, peak = about(case, arguments)
    divisor = read_words(case.words).micro_divisor
    micro = max(1, (arguments.micro_batch_size or model["micro_batch"]) // divisor)
    accumulation = arguments.accumulation * divisor
    while True:
        seconds = min(deadline - time.monotonic() - 5, arguments.case_seconds * case.patience)
        if seconds < min(arguments.case_seconds, LEAST_SECONDS):
            return Figures(case, outcome="not run: out of time")
        arguments.port = free_port()
        with tempfile.TemporaryDirectory() as scratch:
            found = run(case, micro, accumulation, arguments, Path(scratch), seconds)
        if found.outcome != OUT_OF_MEMORY or micro == 1:
            break
        micro, accumulation = micro // 2, accumulation * 2
    found.mfu = found.tokens_per_second * model["flops_per_token"] / peak
    return found


def run(
    case: Case,
    micro: int,
    accumulation: int,
    arguments: argparse.Namespace,
    scratch: Path,
    seconds: float,
) -> Figures:
    """Run one case in processes of its own, for at most so many seconds."""
    found = Figures(case, micro)
    write_shard(shards_of(case, scratch), str(model_file(case, arguments.toy, scratch)))
    environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        command(case, micro, accumulation, arguments, scratch), cwd=ROOT, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **environment, **read_words(case.words).environment},
    )  # fmt: skip
    said: queue.Queue[tuple[float, str]] = queue.Queue()
    threading.Thread(target=_read, args=(process, said), daemon=True).start()
    lines: list[str] = []
    steps: list[tuple[float, int]] = []
    try:
        while len(steps) < arguments.warmup_lines + arguments.lines:
            when, line = said.get(timeout=max(0.01, began + seconds - time.monotonic()))
            lines.append(line)
            if not line:
                break
            if match := LINE.match(line):
                steps.append((when, int(match[1])))
                if peak_found := PEAK.search(line):
                    found.peak_bytes = int(peak_found[1])
    except queue.Empty:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    counted = steps[arguments.warmup_lines :]
    if len(counted) < 2:
        found.outcome = why_none(lines, seconds)
        return found
    (first, start), (last, end) = counted[0], counted[-1]
    tokens = (end - start) * case.seq_len * micro * accumulation
    found.tokens_per_second = tokens / (last - first)
    found.start_seconds = steps[0][0] - began
    if case.contender == OURS:
        rows = (scratch / "run/metrics.jsonl").read_text().splitlines()
        peaks = [json.loads(row).get("memory/peak_bytes", 0) for row in rows]
        found.peak_bytes = max(peaks, default=0)
    return found


def _read(process: "subprocess.Popen[str]", said: "queue.Queue[tuple[float, str]]") -> None:
    for line in process.stdout or ():
        said.put((time.monotonic(), line))
    said.put((time.monotonic(), ""))


def why_none(lines: list[str], seconds: float) -> str:
    """Say why a case came to no figure, by what it printed."""
    if any(re.search(OUT_OF_MEMORY, line, re.IGNORECASE) for line in lines):
        return OUT_OF_MEMORY
    if not lines or lines[-1]:
        return f"no figure in {seconds:.0f} s"
    said = [line.strip() for line in lines if line.strip()]
    for line, following in pairwise(said):
        if line.startswith(REFUSED):
            return f"refused: {following}".replace("|", "/")[:LONGEST_REASON]
    errors = [line for line in said if ERROR.match(line)]
    reason = next(reversed(errors or said), "without a word")
    return f"ended: {reason}".replace("|", "/")[:LONGEST_REASON]


# -------------------------------------------------------------------------------------------------
# What is written


def write(found: list[Figures], arguments: argparse.Namespace) -> None:
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "gpu.md").write_text(table(found, arguments) + "\n")
    rows = [asdict(one) for one in found]
    (arguments.output / "gpu.json").write_text(json.dumps(rows, indent=1) + "\n")


def table(found: list[Figures], arguments: argparse.Namespace) -> str:
    """Return the Markdown table; ratios are to the fastest pretrain.py of the model and length."""
    flags, toy = shlex.join(sys.argv[1:]), arguments.toy
    lines = [
        f"`python benchmarks/gpu.py {flags}`".replace(" `", "`")
        + f", {time.strftime('%Y-%m-%d')}, {hardware()}",
        "",
        "| model | tokens | contender | flags | micro-batch | tokens/s | MFU | peak GiB "
        "| first line after s | of pretrain.py --compile |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = {
        (one.case.model, one.case.seq_len): one.tokens_per_second
        for one in reversed(found)
        if one.case.contender == OURS and one.case.words == "--compile"
    }
    for one in found:
        case = one.case
        model = f"{Path(TOY_MODELS[case.model]).stem} for {case.model}" if toy else case.model
        cells = [model, f"{case.seq_len:,}", case.contender, f"{case.words or '-'}"]
        if one.outcome:
            cells += [str(one.micro_batch or "-"), one.outcome, *"----"]
        else:
            whole = base.get((case.model, case.seq_len), 0.0)
            ratio = f"{one.tokens_per_second / whole:.2f}" if whole else "-"
            cells += [str(one.micro_batch), f"{one.tokens_per_second:,.0f}", f"{one.mfu:.1%}"]
            cells += [f"{one.peak_bytes / 2**30:.1f}", f"{one.start_seconds:.0f}", ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines + (["", *goals(found)] if not toy else []))


def goals(found: list[Figures]) -> list[str]:
    """Say how far the two goals for the 1.3B at the shorter length were met."""
    short = min((one.case.seq_len for one in found), default=0)
    mine = [one for one in found if one.case.model == "1.3B" and one.case.seq_len == short]
    # What rounds otherwise than Trainer's JSON does not count.
    exact = [one for one in mine if one.case.contender == OURS and "dtype" not in one.case.words]
    ours = max(exact, key=_speed, default=None)
    trainer = max((one for one in mine if one.case.contender == TRAINER), key=_speed, default=None)
    lines = []
    if ours and _speed(ours):
        lines.append(
            f"1.3B: MFU {ours.mfu:.3f} with `{ours.case.words}`; the goal is 0.60 on H200."
        )
        if trainer and _speed(trainer):
            ratio = _speed(ours) / _speed(trainer)
            lines.append(f"1.3B: {ratio:.2f} times as fast as Trainer; the goal is 1.3.")
    return lines


def _speed(one: Figures) -> float:
    return one.tokens_per_second


if __name__ == "__main__":
    if shutil.which("ninja") is None:
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    main()
