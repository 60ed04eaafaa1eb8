"""Speed of `data_prep tokenize`, compared with raw loops over its backends and with peers.

    bash benchmarks/peers.sh .venv-peers
    python -m benchmarks.tokenize_speed --text_mb 200 --rounds 3 --peer_rounds 1 \
        --peers .venv-peers/bin/python

All tools run in turn, in rounds, each in new processes, with their start-up included. Figures are
medians; CPU seconds are summed over all processes of a tool, and its peak is the largest resident
set of a single process. Each tool gets the same documents, the same tokenizer and --workers
processes, and all token IDs that it writes are compared with the output of the library
`tokenizers`. The text is real: code and documentation on this machine (of Python, its packages, and
/usr), one document per file, without duplicates, in the order of a hash. Files that contain the
text of the EOS token are left out, since most tools would end the document there. Peers for which
--peers is missing are left out and reported.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import ROOT, require
from benchmarks.machine import processor
from benchmarks.tables import parser, show, table
from benchmarks.tokenize_speed.corpus import write_corpus
from benchmarks.tokenize_speed.tools import RAW, ids_of

VOCAB_SIZE = 32_000
TRAINED_BYTES = 16_000_000
OURS = ("zerolm", "zerolm-tokenizers")
PEERS = ("datatrove", "datasets.map")  # use the library `tokenizers`
SLOW = {*PEERS, "raw-tokenizers", "zerolm-tokenizers"}
LIMIT_SECONDS = 1800
HEAD = ["tool", "seconds", "MB/s", "million tokens/s", "CPU seconds", "peak MB"]


def command_of(tool: str, directory: Path, out: Path, options: argparse.Namespace) -> list[str]:
    """Return the argv of a tool."""
    if tool in OURS:
        encoder = "auto" if tool == "zerolm" else "tokenizers"
        files = [str(directory / f"corpus-{part}.jsonl") for part in range(options.workers)]
        return [
            *(sys.executable, "-m", "data_prep", "tokenize", "--input", *files),
            *("--tokenizer", str(directory / "tokenizer"), "--output", str(out / "shards")),
            *("--workers", str(options.workers), "--encoder", encoder),
        ]
    python = sys.executable if tool in (*RAW, "datasets.map") else options.peers
    arguments = [tool, str(directory), str(out), str(options.workers)]
    return [python, "-m", "benchmarks.tokenize_speed.tools", *arguments]


class Run(NamedTuple):
    """Time and memory of a tool's run, and its output."""

    seconds: float
    cpu_seconds: float  # of all processes, user and system
    peak_mb: float  # of its largest process
    digest: str  # SHA-256 of all token IDs
    num_tokens: int


def run_timed(tool: str, command: list[str], out: Path, environment: dict[str, str]) -> Run:
    with tempfile.TemporaryFile() as shown:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=shown, stderr=subprocess.STDOUT)
        limit = threading.Timer(LIMIT_SECONDS, process.kill)
        limit.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        limit.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            shown.seek(0)
            text = shown.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command)}: ended with {process.returncode}\n{text}")
    digest, count = hashlib.sha256(), 0
    for ids in ids_of(tool, out):
        digest.update(np.ascontiguousarray(ids).tobytes())
        count += len(ids)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu_seconds, usage.ru_maxrss * 1024 / 1e6, digest.hexdigest(), count)


def measure(directory: Path, tools: list[str], options: argparse.Namespace) -> dict[str, list[Run]]:
    """Run the tools in rounds, slow peers fewer times; return {name: runs}."""
    environment = {
        **os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each run compiles its imports
    runs: dict[str, list[Run]] = {}

    def once(name: str, tool: str) -> None:
        out = directory / "out"
        out.mkdir()
        try:
            command = command_of(tool, directory, out, options)
            run = run_timed(tool, command, out, environment)
            runs.setdefault(name, []).append(run)
            print(f"{name}: {run.seconds:.2f} s, {run.cpu_seconds:.2f} CPU s", flush=True)
        except RuntimeError as error:
            print(f"{tool} FAILED, left out: {error}", flush=True)
            tools.remove(tool)
            runs.pop(tool, None)
        finally:
            shutil.rmtree(out)

    if "zerolm" in tools:  # the first run also verifies that backends agree, and keeps the result
        once("zerolm, first run", "zerolm")
    for number in range(options.rounds):
        given = [tool for tool in tools if tool not in SLOW or number < options.peer_rounds]
        for tool in given if number % 2 == 0 else given[::-1]:
            once(tool, tool)
    return runs


def describe(runs: dict[str, list[Run]], text_bytes: int) -> list[str]:
    """Return the table, the tools whose IDs differ from those of `tokenizers`, and the ratios."""
    seconds = {name: statistics.median(run.seconds for run in each) for name, each in runs.items()}
    cpu = {name: statistics.median(run.cpu_seconds for run in each) for name, each in runs.items()}
    expected = runs["raw-tokenizers"][0]
    fastest = min((tool for tool in RAW if tool in runs), key=seconds.__getitem__)
    rows = []
    for name in sorted(runs, key=seconds.__getitem__):
        same = all(run.digest == expected.digest for run in runs[name])
        counts = sorted({run.num_tokens for run in runs[name]})
        rows.append([
            name, f"{seconds[name]:.2f}", f"{text_bytes / 1e6 / seconds[name]:.2f}",
            f"{expected.num_tokens / 1e6 / seconds[name]:.2f}", f"{cpu[name]:.2f}",
            f"{max(run.peak_mb for run in runs[name]):.0f}",
            f"{seconds[fastest] / seconds[name]:.3f}", f"{cpu[fastest] / cpu[name]:.3f}",
            "identical" if same else f"DIFFER ({counts})",
        ])  # fmt: skip
    paragraphs = [table([*HEAD, f"of {fastest}", "by CPU", "ids"], rows)]
    if "zerolm" in runs:
        ratio = seconds[fastest] / seconds["zerolm"]
        paragraphs.append(
            f"ratio to the raw rate of the fastest backend ({fastest}): {ratio:.3f}; the goal is "
            "0.9"
        )
        if peers := [tool for tool in PEERS if tool in runs]:
            best = min(peers, key=seconds.__getitem__)
            paragraphs.append(
                f"ratio to the fastest peer ({best} of {', '.join(peers)}): "
                f"{seconds[best] / seconds['zerolm']:.1f}; the goal is 10"
            )
    return paragraphs


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--text_mb", type=float, default=200)
    flags.add_argument("--rounds", type=int, default=3, help="rounds of zerolm and the raw loops")
    flags.add_argument("--peer_rounds", type=int, default=1, help="rounds of the slow peers")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--peers", help="Python of the environment that benchmarks/peers.sh creates")
    flags.add_argument("--only", nargs="+", help="run only these tools, and raw-tokenizers")
    options = flags.parse_args()
    require("gigatoken")
    tools = [*RAW, *OURS, *PEERS]
    if options.only:
        tools = [tool for tool in tools if tool in ("raw-tokenizers", *options.only)]
    if not options.peers:
        tools = [tool for tool in tools if tool not in PEERS or tool == "datasets.map"]
    print(f"tools: {', '.join(tools)}; left out: {', '.join({*RAW, *OURS, *PEERS} - {*tools})}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        num_documents, size = write_corpus(directory, int(options.text_mb * 1e6), options.workers)
        subprocess.run(
            [
                *(sys.executable, "-m", "data_prep", "train-tokenizer", "--input"),
                *(str(directory / f"corpus-{part}.jsonl") for part in range(options.workers)),
                *("--sample_bytes", str(TRAINED_BYTES), "--vocab_size", str(VOCAB_SIZE)),
                *("--output", str(directory / "tokenizer")),
            ],
            check=True, capture_output=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        text = f"{num_documents:,} documents, {size / 1e6:.1f} MB of text, {VOCAB_SIZE:,} ids"
        runs = measure(directory, tools, options)
    show([text, *describe(runs, size)], processor(), options.output)


if __name__ == "__main__":
    main()
