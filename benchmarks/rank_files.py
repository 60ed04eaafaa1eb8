"""File system calls of a rank's watchdog and of the supervisor, by the number of ranks.

    python -m benchmarks.rank_files [--output FILE] [--seconds 60]

A run's directory is shared by all of its hosts, so what each rank does there is multiplied by
thousands. Here one real watchdog runs beside the heartbeat files of a run of N ranks, 8 on each
host, which stand-ins rewrite; strace counts its calls below `ranks/`. Roles: rank 0, the first rank
of another host, and one of the other ranks. States: the run makes progress, or every rank but one
is stuck, which is when ranks read each other's heartbeats. No rank is blamed in either. The last
column is the sum over all ranks of the run, from these counts.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT
from benchmarks.machine import storage
from zerolm.common.run_files import RunFiles

WORLD_SIZES = (8, 64, 512, 4096)
LOCAL = 8  # ranks of a host
ROLES = {"rank 0": 0, "first rank of a host": LOCAL, "any other rank": LOCAL + 1}
STUCK_TIMEOUT = 20.0  # --hang_timeout of a stuck run, so that it is exceeded soon
STARTED_SECONDS = 45.0  # until the watchdog is in the state to measure
CALL = re.compile(r'^\d+ +(\w+)\([^"]*"([^"]+)"')
CHANGES = {"rename", "renameat", "renameat2", "link", "unlink", "mkdir"}

WATCHED = '''
import json, os, sys, time
from pathlib import Path
from zerolm.distributed import collectives
from zerolm.watchdog import watchdog
from zerolm.watchdog.progress import record_progress

class Stop: reason = None

run_dir, rank, stuck, seconds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
peers = json.loads((run_dir / "peers.json").read_text())
collectives.broadcast_object = lambda value: "token"

def gather(own):
    for peer in peers:
        if peer["rank"] // 8 == rank // 8:  # ranks of this machine: a process that stays
            peer |= {"machine": own["machine"], "pid": 1, "start_ticks": START}
    return [own if peer["rank"] == rank else peer for peer in peers]

from zerolm.common import processes
START = processes.inspect_process(1).start_ticks
collectives.gather_objects = gather
dog = watchdog.Watchdog(run_dir, rank, float(stuck) or 600.0, Stop())
dog.connect(len(peers))
record_progress("data", 1); record_progress("optimizer", 1); record_progress("optimizer", 2)
end = time.monotonic() + float(seconds)
loop = """
while time.monotonic() < end:
    if not float(stuck):
        record_progress("optimizer", 2)
    time.sleep(0.2)
"""
# To the watchdog, code in a file of torch's is a rank that waits in a collective.
exec(compile(loop, "torch/distributed/x.py", "exec"))
os._exit(0)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write (default: only print)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    arguments = parser.parse_args()
    lines = [
        "# File system calls of the watchdogs of a run",
        "",
        f"`python -m benchmarks.rank_files`, {storage()}. Calls per second below `ranks/`; in "
        f"brackets those that change the directory.",
        "",
        "| ranks | state | " + " | ".join(ROLES) + " | all ranks together |",
        "|---:|---|" + "---:|" * (len(ROLES) + 1),
    ]
    for world_size in WORLD_SIZES:
        for state, timeout in (("progress", 0.0), ("stuck", STUCK_TIMEOUT)):
            rates = [
                measure(world_size, rank, timeout, arguments.seconds) if rank < world_size else None
                for rank in ROLES.values()
            ]
            lines.append(row(world_size, state, rates))
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def row(world_size: int, state: str, rates: list[tuple[float, float] | None]) -> str:
    """Return a row of the table.

    Args:
        rates: of each role, (calls, changes of the directory) per second.
    """
    hosts = world_size // LOCAL
    counts = (1, hosts - 1, world_size - hosts)
    known = [rate or rates[0] or (0.0, 0.0) for rate in rates]
    if rates[2] is None:
        known[2] = known[0]
    total = [
        sum(count * rate[n] for count, rate in zip(counts, known, strict=True)) for n in (0, 1)
    ]
    cells = [f"{rate[0]:.2f} ({rate[1]:.2f})" if rate else "" for rate in rates]
    return f"| {world_size} | {state} | {' | '.join(cells)} | {total[0]:.0f} ({total[1]:.0f}) |"


def measure(world_size: int, rank: int, hang_timeout: float, seconds: float) -> tuple[float, float]:
    """Return the calls per second of one rank's watchdog, and those that change the directory."""
    with tempfile.TemporaryDirectory() as directory:
        files, trace = RunFiles(directory), Path(directory) / "trace"
        files.ranks.mkdir()
        (files.run_dir / "peers.json").write_text(json.dumps(peers(world_size)))
        command = ["strace", "-f", "-ttt", "-e", "trace=%file", "-o", str(trace)]
        command += [sys.executable, "-c", WATCHED, directory, str(rank), str(hang_timeout)]
        command += [str(STARTED_SECONDS + seconds)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank)}
        process = subprocess.Popen(command, env=environment, cwd=ROOT)
        while process.poll() is None:
            for peer in range(world_size):
                if peer != rank:
                    beat(files.heartbeat(peer), peer, hang_timeout, world_size)
            time.sleep(3.0)
        if process.returncode:
            raise SystemExit(f"the watchdog of rank {rank} of {world_size} has ended the run")
        return counted(trace, str(files.ranks), seconds)


def counted(trace: Path, below: str, seconds: float) -> tuple[float, float]:
    """Return the rates of calls on files in a directory, in the last seconds of a trace."""
    lines = trace.read_text().splitlines()
    times = [float(line.split()[1]) for line in lines]
    start = times[-1] - seconds
    calls = changes = 0
    for when, line in zip(times, lines, strict=True):
        number, _, call = line.split(maxsplit=2)
        found = CALL.match(f"{number} {call}")
        if when < start or not found or not found[2].startswith(below):
            continue
        calls += 1
        changes += found[1] in CHANGES or "O_CREAT" in call
    return calls / seconds, changes / seconds


def peers(world_size: int) -> list[dict[str, object]]:
    """Return what the ranks of a run tell each other when they connect."""
    return [
        {
            "rank": rank, "host": f"host{rank // LOCAL}", "machine": f"machine{rank // LOCAL}",
            "pid": 1, "start_ticks": 1, "launcher_pid": None, "supervisor": None, "start_bytes": 0,
        }
        for rank in range(world_size)
    ]  # fmt: skip


def beat(path: Path, rank: int, hang_timeout: float, world_size: int) -> None:
    """Write the heartbeat of a stand-in. The last one works, so that nobody is blamed."""
    quiet = 10 * hang_timeout if rank != world_size - 1 else 0.0
    content = peers(1)[0] | {
        "rank": rank, "token": "token", "phase": "forward", "step": 2, "beats": 3,
        "sequences": None, "waiting": rank != world_size - 1, "groups": {}, "calls": [],
        "quiet_seconds": quiet,
        "limit_seconds": hang_timeout, "time": "", "monotonic": time.monotonic(),
        "state": "running", "reason": "",
    }  # fmt: skip
    path.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
