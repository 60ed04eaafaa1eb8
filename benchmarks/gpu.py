"""Tokens per second, MFU and memory on one GPU: 160M, 1.3B and a 1.6B mixture of experts.

    python benchmarks/gpu.py --output results-of-this-gpu
    python benchmarks/gpu.py --toy        # the same end to end on a CPU, with tiny models

First come the rates of the device itself (gpu_ceilings.py) and checks that training on it is
correct (gpu_checks.py). Then pretrain.py, Hugging Face Trainer with the same DeepSpeed JSON, and a
bare compiled PyTorch loop train the same model with the same tokens and batch size, at 2,048 and
8,192 tokens per sequence, and pretrain.py with single options changed. A case may take
`--case_seconds`, including its start, the first that compiles a model twice as long, and ends after
`--lines`. All cases together may take `--seconds`, the most important first; the table lists those
that did not run. A second call with the same --output runs only those that have no figure yet. A
case that runs out of memory is repeated with half the micro-batch.

    MFU = tokens/s x FLOPs per token / peak

FLOPs are those of `zerolm.model.flops`: forward and backward, attention over all keys, without
recomputation (Chowdhery et al. 2022, appendix B). The peak is the datasheet's dense bf16 figure; on
a CPU, that of a matrix product timed here. Memory is the peak that torch has allocated; on a CPU,
the peak resident memory. benchmarks/carry.py collects the wheels for an offline machine.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from contender import free_port  # noqa: E402
from gpu_cases import (  # noqa: E402
    MODELS,
    OURS,
    TOY_MODELS,
    Case,
    cases,
    command,
    model_figures,
    model_file,
    parse_options,
    shards_of,
)
from gpu_checks import run_checks  # noqa: E402
from gpu_table import Figures, read, table, write  # noqa: E402
from training_speed import write_shard  # noqa: E402

LINE = re.compile(r"step=(\d+)\b.*?\bloss=")
PEAK = re.compile(r"\bpeak_bytes=(\d+)")
# The last line of a Python error of a script, a rank, argparse or pretrain.py.
ERROR = re.compile(
    r"(?:\[rank\d+\]: *)?(?:\w+\.)*\w*(?:Error|Exception)\b|pretrain\.py: |.*: error: "
)
REFUSED = "pretrain.py: refused"  # the next line has the reason
OUT_OF_MEMORY = "out of memory"
MAX_REASON_LENGTH = 240
GRAPHS = str(Path(tempfile.gettempdir()) / "compiled-for-gpu-benchmark")
MIN_SECONDS = 20  # less time gives no result


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + arguments.seconds
    lengths = (64, 128) if arguments.toy else (2048, 8192)
    measured = read(arguments.output)
    print(ceilings(arguments), flush=True)
    print(run_checks(arguments, deadline), flush=True)
    results: list[Figures] = []
    compiled: set[tuple[str, int, str]] = set()  # kinds whose graphs are in torch's cache
    graphs = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", GRAPHS))
    same_machine = graphs.exists()
    for case in cases(lengths):
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        "--only", default="", help="run the cases whose title matches this regular expression"
    )
    parser.add_argument("--toy", action="store_true", help="use tiny models and short sequences")
    parser.add_argument("--output", type=Path, help="directory for gpu.md and gpu.json")
    return parser.parse_args()


# -------------------------------------------------------------------------------------------------
# One case


def ceilings(arguments: argparse.Namespace) -> str:
    """Return the table of the device's own rates, measured in another process, or its error."""
    path = arguments.output / "ceilings.md" if arguments.output else None
    if path and path.exists():
        return path.read_text()
    model = (TOY_MODELS if arguments.toy else MODELS)["1.3B"]
    command = [sys.executable, "benchmarks/gpu_ceilings.py", "--model_config", model]
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


def remove_locks() -> None:
    """Remove what a killed case left behind, for which the next would wait without end."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(root).glob("**/lock"):
        lock.unlink(missing_ok=True)


def run_with_fitting_batch(
    case: Case, arguments: argparse.Namespace, deadline: float, limit: float
) -> Figures:
    """Run a case; when it runs out of memory, repeat it with half the micro-batch."""
    model, peak = model_figures(case, arguments)
    divisor = parse_options(case.words).micro_divisor
    micro = max(1, (arguments.micro_batch_size or model["micro_batch"]) // divisor)
    accumulation = arguments.accumulation * divisor
    while True:
        seconds = min(deadline - time.monotonic() - 5, limit)
        if seconds < min(arguments.case_seconds, MIN_SECONDS):
            return Figures(case, outcome="not run: out of time")
        arguments.port = free_port()
        with tempfile.TemporaryDirectory() as scratch:
            result = run(case, micro, accumulation, arguments, Path(scratch), seconds)
            keep_profile(Path(scratch), arguments.output)
        if result.outcome != OUT_OF_MEMORY or micro == 1:
            break
        micro, accumulation = micro // 2, accumulation * 2
    result.mfu = result.tokens_per_second * model["flops_per_token"] / peak
    return result


def keep_profile(scratch: Path, output: Path | None) -> None:
    """Copy the operators of a profiled case, which are gone with its run directory otherwise."""
    for path in (scratch / "run/profile").glob("*.operators.txt"):
        if output:
            output.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, output)


def run(
    case: Case,
    micro: int,
    accumulation: int,
    arguments: argparse.Namespace,
    scratch: Path,
    seconds: float,
) -> Figures:
    """Run one case in new processes, for at most `seconds`."""
    result = Figures(case, micro)
    remove_locks()
    write_shard(shards_of(case, scratch), str(model_file(case, arguments.toy, scratch)))
    environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    start_time = time.monotonic()
    process = subprocess.Popen(
        command(case, micro, accumulation, arguments, scratch), cwd=ROOT, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **environment, **parse_options(case.words).environment},
    )  # fmt: skip
    output: queue.Queue[tuple[float, str]] = queue.Queue()
    threading.Thread(target=_read, args=(process, output), daemon=True).start()
    lines: list[str] = []
    steps: list[tuple[float, int]] = []
    try:
        while len(steps) < arguments.warmup_lines + arguments.lines:
            when, line = output.get(timeout=max(0.01, start_time + seconds - time.monotonic()))
            lines.append(line)
            if not line:
                break
            if match := LINE.match(line):
                steps.append((when, int(match[1])))
                if peak_found := PEAK.search(line):
                    result.peak_bytes = int(peak_found[1])
    except queue.Empty:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result.case_seconds = time.monotonic() - start_time
    counted = steps[arguments.warmup_lines :]
    if len(counted) < 2:
        result.outcome = failure_reason(lines, seconds)
        return result
    (first, start), (last, end) = counted[0], counted[-1]
    tokens = (end - start) * case.seq_len * micro * accumulation
    result.tokens_per_second = tokens / (last - first)
    result.start_seconds = steps[0][0] - start_time
    if case.contender == OURS:
        with (scratch / "run/metrics.jsonl").open() as file:
            rows = [json.loads(row) for row in file]
        result.peak_bytes = max((row.get("memory/peak_bytes", 0) for row in rows), default=0)
        waits = [row["throughput/data_seconds"] for row in rows if "throughput/data_seconds" in row]
        result.data_seconds = statistics.median(waits) if waits else 0.0
        result.stall_seconds = max(row.get("checkpoint/stall_seconds", 0) for row in rows)
    return result


def _read(process: "subprocess.Popen[str]", output: "queue.Queue[tuple[float, str]]") -> None:
    for line in process.stdout or ():
        output.put((time.monotonic(), line))
    output.put((time.monotonic(), ""))


def failure_reason(lines: list[str], seconds: float) -> str:
    """Return why a case has no result, from the lines that it printed."""
    if any(re.search(OUT_OF_MEMORY, line, re.IGNORECASE) for line in lines):
        return OUT_OF_MEMORY
    if not lines or lines[-1]:
        return f"no figure in {seconds:.0f} s"
    printed = [line.strip() for line in lines if line.strip()]
    for line, following in pairwise(printed):
        if line.startswith(REFUSED):
            return f"refused: {following}".replace("|", "/")[:MAX_REASON_LENGTH]
    errors = [line for line in printed if ERROR.match(line)]
    reason = next(reversed(errors or printed), "without output")
    return f"ended: {reason}".replace("|", "/")[:MAX_REASON_LENGTH]


if __name__ == "__main__":
    if shutil.which("ninja") is None:
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    main()
