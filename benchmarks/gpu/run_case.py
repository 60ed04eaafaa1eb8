"""Run one case of benchmarks/gpu in new processes, until it has its figures or no time is left."""

import argparse
import contextlib
import gzip
import json
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.cases import (
    OURS,
    Case,
    command,
    model_figures,
    model_file,
    parse_options,
    shards_of,
)
from benchmarks.gpu.table import Figures
from benchmarks.random_shard import write_random_shard
from tests.launching import free_port

LINE = re.compile(r"step=(\d+)\b.*?\bloss=")
PEAK = re.compile(r"\bpeak_bytes=(\d+)")
# The last line of a Python error of a script, a rank, argparse or pretrain.py.
ERROR = re.compile(
    r"(?:\[rank\d+\]: *)?(?:\w+\.)*\w*(?:Error|Exception)\b|pretrain\.py: |.*: error: "
)
REFUSED = "pretrain.py: refused"  # the next line has the reason
OUT_OF_MEMORY = "out of memory"
TORCH_LOGS = "recompiles,graph_code"
GRAPH, RECOMPILED = "TRACED GRAPH\n", "Recompiling function"  # lines of these logs
ATTENTION = re.compile(r"attention: (\w+)")
STALL, RATE = "checkpoint/stall_seconds", "throughput/tokens_per_second"
MAX_REASON_LENGTH = 240
MIN_SECONDS = 20  # less time gives no result


def remove_locks() -> None:
    """Remove locks left behind by a killed case, for which the next case would wait forever."""
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    for lock in Path(root).glob("**/lock"):
        lock.unlink(missing_ok=True)


def run_with_fitting_batch(
    case: Case, arguments: argparse.Namespace, deadline: float, limit: float
) -> Figures:
    """Run a case; when it runs out of memory, repeat it with half the micro-batch."""
    model, peak = model_figures(case, arguments)
    factor = parse_options(case.words).micro_factor
    micro = max(1, int((arguments.micro_batch_size or model["micro_batch"]) * factor))
    accumulation = max(1, int(arguments.accumulation / factor))
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
    result.planned_bytes = model["planned_bytes"](result.micro_batch)
    return result


def device_state() -> str:
    """Return each GPU's clock, power, memory and contexts, as reported by nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return ""
    queries = (
        "--query-gpu=clocks.sm,power.draw,memory.used",
        "--query-compute-apps=gpu_bus_id,used_memory",
    )
    found = []
    for query in queries:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            found.append(", ".join(done.stdout.split("\n")).strip(", "))
    return "; contexts ".join(found)


def keep_profile(scratch: Path, output: Path | None) -> None:
    """Copy the operators of a profiled case, which are gone with its run directory otherwise."""
    for path in (scratch / "run/profile").glob("*.operators.txt"):
        if output:
            output.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, output)
    for path in (scratch / "run/profile").glob("*.trace.json.gz"):
        with gzip.open(path) as file:
            share = idle_share(json.load(file)["traceEvents"])
        if share is not None:
            print(
                f"{path.name}: the device is idle for {share:.1%} from its first kernel to its last"
            )


def idle_share(events: list[dict[str, Any]]) -> float | None:
    """Return the share of a step without a kernel, copy or fill; None on a CPU."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    if not spans:
        return None
    idle, end = 0.0, spans[0][0]
    for begin, finish in spans:
        idle, end = idle + max(0.0, begin - end), max(end, finish)
    return idle / (end - spans[0][0])


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
    write_random_shard(shards_of(case, scratch), str(model_file(case, arguments.toy, scratch)))
    environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TORCH_LOGS": TORCH_LOGS}
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
                result.device = device_state()  # the last one is of a step that counts
                if peak_found := PEAK.search(line):
                    result.peak_bytes = int(peak_found[1])
    except queue.Empty:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result.case_seconds = time.monotonic() - start_time
    result.graphs = sum(line.endswith(GRAPH) for line in lines)
    result.recompiled = sum(RECOMPILED in line for line in lines)
    attention = next(filter(None, map(ATTENTION.match, lines)), None)
    result.attention = attention[1] if attention else ""
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
        stalls = [row[STALL] for row in rows if STALL in row]
        # The first save also pins the host's buffers.
        result.first_stall_seconds, *later = stalls or [0.0]
        result.stall_seconds = max(later, default=0.0)
        rates = [row[RATE] for row in rows if RATE in row][arguments.warmup_lines :]
        result.reported_tokens_per_second = statistics.median(rates) if rates else 0.0
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
