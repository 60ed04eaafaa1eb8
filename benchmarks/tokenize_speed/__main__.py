"""Speed of `data_prep tokenize`, compared with raw loops over its backends and with peers.

    bash benchmarks/peers.sh .venv-peers
    python -m benchmarks.tokenize_speed --text_mb 200 --rounds 3 --peer_rounds 1 \
        --peers .venv-peers/bin/python --megatron ../Megatron-LM

All tools run in turn, in rounds, each in new processes, with their start-up included. Figures are
medians; CPU seconds are those of all processes of a tool. Each tool gets the same documents, the
same tokenizer and --workers processes, and all token IDs that it writes are compared with those of
the library `tokenizers`. The text is real: code and documentation on this machine (of Python, its
packages, and /usr), one document per file, without duplicates, in the order of a hash. Files that
contain the text of the EOS token are left out, since most tools would end the document there. Peers
for which --peers or --megatron is missing are left out and reported.
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
import psutil

from benchmarks import ROOT
from benchmarks.tokenize_speed.corpus import join_corpus, write_corpus
from benchmarks.tokenize_speed.tools import RAW, ids_of

VOCAB_SIZE = 32_000
TRAINED_BYTES = 16_000_000
OURS = ("zerolm", "zerolm-tokenizers")
PEERS = ("datatrove", "datasets.map", "litdata", "megatron", "megatron-gigatoken", "megatron-fast")
STOCK = ("datatrove", "datasets.map", "litdata", "megatron")  # use the library `tokenizers`
LIMIT_SECONDS = 1800


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
    arguments = [tool, str(directory), str(out), str(options.workers), str(options.megatron)]
    return [python, "-m", "benchmarks.tokenize_speed.tools", *arguments]


class Run(NamedTuple):
    """Time and memory of a run of a tool."""

    seconds: float
    cpu_seconds: float  # of all processes, user and system
    peak_mb: float  # sum of the resident memory of all processes


def run_timed(command: list[str], environment: dict[str, str], is_watched: bool) -> Run:
    """Run a tool. Watching its memory slows it down, so memory is measured in separate runs."""
    with tempfile.TemporaryFile() as shown:
        start = time.perf_counter()
        process = psutil.Popen(command, env=environment, stdout=shown, stderr=subprocess.STDOUT)
        peak, ended = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while is_watched and not ended.wait(0.05):
                size = 0
                try:
                    for each in (process, *process.children(recursive=True)):
                        size += each.memory_info().rss
                except psutil.Error:
                    continue
                peak = max(peak, size)

        watcher = threading.Thread(target=watch)
        watcher.start()
        limit = threading.Timer(LIMIT_SECONDS, process.kill)
        limit.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        limit.cancel()
        ended.set()
        watcher.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            shown.seek(0)
            text = shown.read().decode(errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command)}: ended with {process.returncode}\n{text}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak / 1e6)


def digest_of(tool: str, out: Path) -> tuple[str, int]:
    """Return (SHA-256 of all token IDs that a tool wrote, their number)."""
    digest, count = hashlib.sha256(), 0
    for ids in ids_of(tool, out):
        digest.update(np.ascontiguousarray(ids).tobytes())
        count += len(ids)
    return digest.hexdigest(), count


def measure(directory: Path, tools: list[str], options: argparse.Namespace) -> dict[str, list]:
    """Run the tools in rounds, slow peers fewer times; return {name: (run, digest of IDs)}."""
    environment = {
        **os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each run compiles its imports
    runs: dict[str, list] = {}

    def once(name: str, tool: str, is_watched: bool) -> None:
        out = directory / "out"
        out.mkdir()
        try:
            command = command_of(tool, directory, out, options)
            run = run_timed(command, environment, is_watched)
            runs.setdefault(name, []).append((run, digest_of(tool, out)))
            print(
                f"{name}: {run.seconds:.2f} s, {run.cpu_seconds:.2f} CPU s, {run.peak_mb:.0f} MB",
                flush=True,
            )
        except RuntimeError as error:
            print(f"{tool} FAILED, left out: {error}", flush=True)
            tools.remove(tool)
            runs.pop(tool, None)
        finally:
            shutil.rmtree(out)

    if "zerolm" in tools:  # the first run also verifies that backends agree, and keeps the result
        once("zerolm, first run", "zerolm", is_watched=True)
    for number in range(options.rounds):
        slow = {*PEERS, "raw-tokenizers", "zerolm-tokenizers"}
        given = [tool for tool in tools if tool not in slow or number < options.peer_rounds]
        for tool in given if number % 2 == 0 else given[::-1]:
            once(tool, tool, is_watched=tool in slow)
    for tool in [tool for tool in tools if tool not in slow]:
        once(f"{tool} watched", tool, is_watched=True)
    return runs


def show(runs: dict[str, list], text_bytes: int) -> None:
    """Print the table, the ratios, and the tools whose IDs differ from those of `tokenizers`."""
    peaks = {name: max(run.peak_mb for run, _ in each) for name, each in runs.items()}
    for name in [name for name in runs if name.endswith(" watched")]:
        peaks[name.removesuffix(" watched")] = peaks[name]
        runs[name.removesuffix(" watched")] += [(None, ids) for _, ids in runs.pop(name)]
    timed = {name: [run for run, _ in each if run is not None] for name, each in runs.items()}
    seconds = {name: statistics.median(run.seconds for run in each) for name, each in timed.items()}
    cpu = {name: statistics.median(run.cpu_seconds for run in each) for name, each in timed.items()}
    expected = runs["raw-tokenizers"][0][1]
    fastest = min((tool for tool in RAW if tool in runs), key=seconds.__getitem__)
    print(
        f"| tool | seconds | MB/s | million tokens/s | CPU seconds | peak MB | of {fastest} "
        f"| by CPU | ids |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sorted(runs, key=seconds.__getitem__):
        digests = {ids for _, ids in runs[name]}
        same = "identical" if digests == {expected} else f"DIFFER ({[ids[1] for ids in digests]})"
        print(
            f"| {name} | {seconds[name]:.2f} | {text_bytes / 1e6 / seconds[name]:.2f} "
            f"| {expected[1] / 1e6 / seconds[name]:.2f} | {cpu[name]:.2f} | {peaks[name]:.0f} "
            f"| {seconds[fastest] / seconds[name]:.3f} | {cpu[fastest] / cpu[name]:.3f} | {same} |"
        )
    if "zerolm" not in runs:
        return
    ratio = seconds[fastest] / seconds["zerolm"]
    print(
        f"\nratio to the raw rate of the fastest backend ({fastest}): {ratio:.3f}; the goal is 0.9"
    )
    stock = [tool for tool in STOCK if tool in runs]
    if stock:
        best = min(stock, key=seconds.__getitem__)
        times = seconds[best] / seconds["zerolm"]
        print(
            f"ratio to the fastest peer ({best} of {', '.join(stock)}): {times:.1f}; the goal is 10"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenize_speed", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--text_mb", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of zerolm and the raw loops")
    parser.add_argument(
        "--peer_rounds", type=int, default=1, help="rounds of the peers, which are slow"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--peers", help="Python of the environment that benchmarks/peers.sh creates"
    )
    parser.add_argument("--megatron", help="checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--only", nargs="+", help="run only these tools, and raw-tokenizers")
    options = parser.parse_args()
    tools = [*RAW, *OURS, *PEERS]
    if options.only:
        tools = [tool for tool in tools if tool in ("raw-tokenizers", *options.only)]
    if not options.peers:
        tools = [tool for tool in tools if tool not in PEERS or tool == "datasets.map"]
    if not options.megatron:
        tools = [tool for tool in tools if not tool.startswith("megatron")]
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
            check=True,
            capture_output=True,
            timeout=LIMIT_SECONDS,
        )
        if options.megatron:
            join_corpus(directory, options.workers)
        print(f"{num_documents:,} documents, {size / 1e6:.1f} MB of text, {VOCAB_SIZE:,} ids")
        runs = measure(directory, tools, options)
    print()
    show(runs, size)


if __name__ == "__main__":
    main()
