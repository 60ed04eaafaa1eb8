"""Tokens per second, MFU and memory on one GPU: 160M, 1.3B and a 1.6B mixture of experts.

    python -m benchmarks.gpu --output results-of-this-gpu
    python -m benchmarks.gpu --toy        # the same end to end on a CPU, with tiny models

pretrain.py, Hugging Face Trainer with the same DeepSpeed JSON, and a bare compiled PyTorch loop
train the same model with the same tokens and batch size, at 2,048 and 8,192 tokens per sequence,
and pretrain.py with single options changed. A case ends after `--lines`, and one that runs out of
memory is repeated with half the micro-batch. benchmarks/README.md describes what runs when.

    MFU = tokens/s x FLOPs per token / peak

FLOPs are those of `zerolm.model.flops`: forward and backward, attention over all keys, without
recomputation (Chowdhery et al. 2022, appendix B). tokens/s are measured by this command; the
figures reported by pretrain.py are shown next to them. The peak is the datasheet's dense bf16
figure; on a CPU, the rate of a matrix product timed here. Memory is the peak that torch has
allocated; on a CPU, the peak resident memory. "Planned" is the memory estimated by a plan of the
run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT, require, tables
from benchmarks.gpu.cases import FIRST_CASES, MODELS, TOY_MODELS, cases, first_cases
from benchmarks.gpu.checks import run_checks
from benchmarks.gpu.run_case import run_with_fitting_batch
from benchmarks.gpu.table import Figures, read, table, write

GRAPHS = str(Path(tempfile.gettempdir()) / "compiled-for-gpu-benchmark")


def main() -> None:
    arguments = parse_arguments()
    require("accelerate")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + arguments.seconds
    lengths = (64, 128) if arguments.toy else (2048, 8192)
    measured = read(arguments.output)
    if re.search(arguments.only, "ceilings"):
        print(ceilings(arguments), flush=True)
    results: list[Figures] = []
    compiled: set[tuple[str, int, str]] = set()  # kinds whose graphs are in torch's cache
    graphs = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", GRAPHS))
    same_machine = graphs.exists()
    chosen = first_cases(lengths[0]) if arguments.first else cases(lengths)
    for number, case in enumerate(chosen):
        if number == FIRST_CASES and not arguments.first and re.search(arguments.only, "checks"):
            print(run_checks(arguments, deadline), flush=True)
        if not re.search(arguments.only, case.title):
            continue
        kind = case.model, case.seq_len, case.contender
        is_slow = case.builds or (case.compiles and kind not in compiled)
        seconds = arguments.case_seconds * (2 if is_slow else 1)
        result = measured.get(case) or run_with_fitting_batch(case, arguments, deadline, seconds)
        if case.compiles and not result.outcome and (same_machine or case not in measured):
            compiled.add(kind)
        results.append(result)
        shown = result.outcome or f"{result.tokens_per_second:,.0f} tokens/s"
        print(f"{case.title}: {shown}", flush=True)
        if arguments.output:  # after each case, in case the machine is taken away
            done = {result.case for result in results}
            write(results + [measured[each] for each in measured if each not in done], arguments)
    print("\n" + table(results, arguments))


def parse_arguments() -> argparse.Namespace:
    parser = tables.parser(__doc__, has_table=False)
    parser.add_argument("--seconds", type=float, default=570, help="time limit for all cases")
    parser.add_argument(
        "--case_seconds", type=float, default=75, help="time limit for a case, with its start"
    )
    parser.add_argument(
        "--lines", type=int, default=3, help="lines that count, after which a case ends"
    )
    parser.add_argument(
        "--warmup_lines", type=int, default=1, help="first lines of a case, which do not count"
    )
    parser.add_argument("--log_interval", type=int, default=4, help="steps per line")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--micro_batch_size", type=int, help="(default: the largest that fits)")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    parser.add_argument(
        "--only",
        default="",
        help="run the cases whose title matches this regular expression; likewise `ceilings` and "
        "`checks`",
    )
    parser.add_argument(
        "--first", action="store_true", help="run what ten minutes on a new card are for"
    )
    parser.add_argument("--toy", action="store_true", help="use tiny models and short sequences")
    parser.add_argument("--output", type=Path, help="directory for gpu.md and gpu.json")
    return parser.parse_args()


def ceilings(arguments: argparse.Namespace) -> str:
    """Return the table of the device's own rates, measured in another process, or its error."""
    path = arguments.output / "ceilings.md" if arguments.output else None
    if path and path.exists():
        return path.read_text()
    model = (TOY_MODELS if arguments.toy else MODELS)["1.3B"]
    command = [sys.executable, "-m", "benchmarks.gpu.ceilings", "--model_config", model]
    command += ["--tokens", "128", "--seq_len", "64"] if arguments.toy else []
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=arguments.case_seconds
        )
    except subprocess.TimeoutExpired:
        return f"no ceilings in {arguments.case_seconds:.0f} s"
    found = done.stdout if done.returncode == 0 else f"no ceilings: {done.stderr[-300:]}"
    if path and done.returncode == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    return found


if __name__ == "__main__":
    if shutil.which("ninja") is None:
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    main()
