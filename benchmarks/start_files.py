"""File system calls of a rank from its start to its first batch, by the number of ranks.

    python -m benchmarks.start_files [--output FILE]

At each start every rank of a run reads the same few files and its own. Here a real run is resumed
by stand-ins for ranks of 8 to 4,096: each carries out everything that a rank does with files until
its first batch, with collectives that return at once, under strace. The checkpoint has the files of
as many ranks, a few bytes each. Left out: the model and its states, since a rank reads two files of
DeepSpeed's by name; imports, which are counted by themselves; and /proc, /sys, /dev and other files
of the host alone. Roles: rank 0, the first rank of another host, and one of the other ranks. In
brackets: calls that change a directory. KiB: bytes read of these files.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import ROOT
from benchmarks.machine import storage
from benchmarks.rank_files import ROLES, WORLD_SIZES
from tests.launching import LLAMA, environment, run_ranks, write_json, write_shards
from zerolm.checkpoint.file_lists import with_lists
from zerolm.checkpoint.file_writer import write_hashed
from zerolm.checkpoint.manifest import manifest_digest
from zerolm.common.run_files import MANIFEST, RunFiles

SEQ_LEN, STEPS = 32, 4
CALL = re.compile(r"^(\d+) +(\w+)\((.*?)(?:\) += (-?\d+).*|<unfinished .*)$")
NAME, OPENED = re.compile(r'"(/[^"]*)"'), re.compile(r"^\d+<(/[^>]*)>")
CHANGES = {"rename", "renameat", "renameat2", "link", "unlink", "unlinkat", "mkdir", "mkdirat"}
READS = {"read", "pread64", "getdents64"}

STARTED = """
import contextlib, json, os, sys
from functools import partial
from pathlib import Path
import torch
import pretrain
from zerolm.checkpoint import load
from zerolm.checkpoint.directory import candidates
from zerolm.common.processes import inspect_process
from zerolm.distributed import collectives
from zerolm.preflight import check
from zerolm.tracking import run_log
from zerolm.train import data_feed, run_directory
from zerolm.watchdog import watchdog

class Stop: reason = None

def mark(name):
    with contextlib.suppress(OSError):
        os.stat(f"/mark/{name}")

def start(rank, world_size, run_dir, flags, listed):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % 8), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_SIZE": "8", "CROSS_SIZE": str(world_size // 8)}
    of_rank_0 = []  # what other ranks receive next
    for module in (load, collectives):
        module.broadcast_object = lambda value: of_rank_0.pop(0) if rank else value
        module.gather_objects = lambda value: [value]
        module.require_on_all_ranks = lambda holds, text: None
    collectives.barrier = lambda: None
    sys.stdout = open(os.devnull, "w")
    mark("preflight")
    plan = check.check([*flags, "--run_dir", run_dir])
    mark("claim")
    if rank == 0:
        run_directory.claim(plan.run_dir)
        candidates(plan.run_dir)
    mark("connect")
    of_rank_0.append("token")
    dog = watchdog.Watchdog(plan.run_dir, rank, 600.0, Stop())
    dog.connect(world_size)
    dog._quit.set()
    mark("checkpoint")
    of_rank_0 += [(listed, [], []), []]
    found, damage = load.newest_complete(plan.run_dir, rank, world_size)
    assert found is not None and not damage
    mark("logs")
    run_directory.write(plan.run_dir, run_directory.record(plan), rank)
    log = run_log.RunLog(plan.run_dir, found.progress.step, rank == 0)
    log.ranked_steps("eval/loss")
    mark("data")
    feed = data_feed.DataFeed(plan, rank, torch.device("cpu"), print)
    next(feed.batches(found.progress))
    mark("end")

mark("imports")
import deepspeed, transformers
for job in json.loads(Path(sys.argv[1]).read_text()):
    pid = os.fork()
    if not pid:
        start(**job)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, job
"""
PARTS = ("preflight", "claim", "connect", "checkpoint", "logs", "data")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write (default: only print)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        text = measure(Path(directory))
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def measure(base: Path) -> str:
    """Return the tables."""
    flags = [
        "--model_config", write_json(base / "llama.json", LLAMA), "--data",
        write_shards(base / "corpus", 2000), "--deepspeed_config", ROOT / "ds_configs/zero2.json",
        "--seq_len", SEQ_LEN, "--batch_tokens", SEQ_LEN * WORLD_SIZES[-1],
        "--total_tokens", STEPS * SEQ_LEN * WORLD_SIZES[-1], "--wandb", "off",
        "--checkpoint_interval", 1, "--num_workers", 0, "--max_epochs", 1000,
    ]  # fmt: skip
    run = [*flags, "--micro_batch_size", 64, "--run_dir", base / "run", "--stop_after", "1s"]
    done = run_ranks(1, *run, timeout=900)
    assert done.returncode == 75, done.stdout[-3000:]
    jobs = []
    for world_size in WORLD_SIZES:
        run_dir = base / f"run-{world_size}"
        listed = stand_in_run(base / "run", run_dir, world_size)
        for rank in (rank for rank in ROLES.values() if rank < world_size):
            own = [*map(str, flags), "--micro_batch_size", "1"]
            job = {"rank": rank, "world_size": world_size, "run_dir": str(run_dir)}
            jobs.append({**job, "flags": own, "listed": listed})
    write_json(base / "jobs.json", jobs)
    command = ["strace", "-f", "-y", "-s", "300", "-e", "trace=%file,read,pread64,getdents64"]
    command += ["-o", str(base / "trace"), sys.executable, "-c", STARTED, str(base / "jobs.json")]
    subprocess.run(command, env=environment(), cwd=ROOT, check=True)
    return tables(base, jobs)


def stand_in_run(real: Path, run_dir: Path, world_size: int) -> list[tuple[str, str]]:
    """Copy a run, with a checkpoint of as many ranks; return its name and digest."""
    shutil.copytree(real, run_dir)
    files = RunFiles(run_dir)
    (checkpoint,) = files.checkpoints.glob("step-*")
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for path in checkpoint.glob("*.pt"):
        path.unlink()
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world_size)]
    template = write_hashed(run_dir / "template", {}, lambda: False)
    content = (run_dir / "template").read_bytes()
    kept = [entry for entry in manifest["files"] if not entry["file"].endswith(".pt")]
    for rank, name in enumerate([*names, "mp_rank_00_model_states.pt"]):
        (checkpoint / name).write_bytes(content)
        kept.append({"file": name, **template, **({"rank": rank} if rank < world_size else {})})
    manifest = with_lists(checkpoint, {**manifest, "files": kept, "world_size": world_size})
    digest = manifest_digest(manifest)
    write_json(checkpoint / MANIFEST, {**manifest, "digest": digest})
    for rank in range(world_size):  # of the last start
        files.heartbeat(rank).write_text("{}")
    return [(checkpoint.name, digest)]


def tables(base: Path, jobs: list[dict[str, object]]) -> str:
    """Return the counts of a trace as Markdown."""
    part_of: dict[str, str] = {}  # by process
    main, num_imports = "", 0  # the process that imports, and forks the others
    order: list[str] = []
    calls: Counter[tuple[str, str]] = Counter()
    changes: Counter[tuple[str, str]] = Counter()
    read: Counter[tuple[str, str]] = Counter()
    for line in (base / "trace").read_text(errors="replace").splitlines():
        found = CALL.match(line)
        if not found:
            continue
        process, name, arguments, result = found.groups()
        main = main or process
        match = NAME.search(arguments) or OPENED.search(arguments)
        path = match[1] if match else ""
        if path.startswith("/mark/"):
            part_of[process] = path.removeprefix("/mark/")
            if part_of[process] == "preflight":
                order.append(process)
            continue
        if process == main:
            num_imports += name not in READS
            continue
        part = part_of.get(process, "")
        if not part or not path.startswith(str(base)):
            continue
        if name in READS:
            read[process, part] += max(0, int(result or 0))
            if name != "getdents64":
                continue
        calls[process, part] += 1
        changes[process, part] += name in CHANGES or "O_CREAT" in arguments
    lines = [
        "# File system calls of a rank at its start", "",
        f"`python -m benchmarks.start_files`, {storage()}. Imports: {num_imports:,} calls of "
        f"each rank, on the disk of the Python environment.", "",
        "| ranks | role | " + " | ".join(PARTS) + " | together | KiB |",
        "|---:|---|" + "---:|" * (len(PARTS) + 2),
    ]  # fmt: skip
    roles = {rank: role for role, rank in ROLES.items()}
    for process, job in zip(order, jobs, strict=True):
        cells = [f"{calls[process, p]} ({changes[process, p]})" for p in PARTS]
        both = [sum(counts[process, p] for p in PARTS) for counts in (calls, changes, read)]
        role = roles[job["rank"]]  # type: ignore[index]
        total = f"{both[0]} ({both[1]}) | {both[2] / 1024:.0f}"
        lines.append(f"| {job['world_size']} | {role} | {' | '.join(cells)} | {total} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
