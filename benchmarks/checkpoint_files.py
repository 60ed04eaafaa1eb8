"""File system calls and bytes of a rank for checkpoints, by the number of ranks.

    python -m benchmarks.checkpoint_files [--output FILE] [--world_sizes 8 64 512 4096]

One real `CheckpointWriter` is one rank of N of a ZeRO-2 run, beside the files that stand-ins write
for all others; its collectives return what those ranks would send. strace counts its calls below
the run directory, in phases: it saves a checkpoint (its own file of 1 MiB; rank 0 also that of the
weights, 256 MiB), publishes it (rank 0), deletes the previous one, and at the next start finds and
compares the newest one. The first number is that of calls that name, open, list, change or sync
files; in brackets MiB read and written. Calls of DeepSpeed itself at a resume are not counted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import storage

WORLD_SIZES = (8, 64, 512, 4096)
ROLES = {"rank 0": 0, "another rank": 5}
PHASES = ("save", "publish", "delete", "resume")
OWN_BYTES, COMMON_BYTES = 1 << 20, 256 << 20
CALL = re.compile(r"^\d+ +(?:<\.\.\. )?(\w+)[( ](.*?)(?: = (-?\d+))?(?: [A-Z<(].*)?$")
MOVED = ("read", "pread64", "readv", "write", "pwrite64", "writev")
FREE = ("close", "lseek", "fcntl", "ioctl", "fadvise64", "mmap", "dup")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write (default: only print)")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=list(WORLD_SIZES))
    parser.add_argument("--directory", type=Path, help="for the files (default: temporary)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(*json.loads(arguments.rank))
        return
    lines = [
        "# Calls and bytes of a rank for checkpoints",
        "",
        f"`python -m benchmarks.checkpoint_files`, {storage()}. Calls; MiB read, written.",
        "",
        "| ranks | role | " + " | ".join(PHASES) + " | manifest, KiB |",
        "|---:|---|" + "---:|" * (len(PHASES) + 1),
    ]
    for world_size in arguments.world_sizes:
        for role, rank in ROLES.items():
            counts, size = measure(world_size, rank, arguments.directory)
            cells = [shown(counts[phase]) for phase in PHASES]
            lines.append(f"| {world_size:,} | {role} | {' | '.join(cells)} | {size / 1024:.0f} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text)


def shown(count: dict[str, int]) -> str:
    if not count:
        return ""
    return f"{count['calls']} ({count['read'] / 2**20:.1f}, {count['written'] / 2**20:.1f})"


def measure(
    world_size: int, rank: int, parent: Path | None
) -> tuple[dict[str, dict[str, int]], int]:
    """Return {phase: calls and bytes} of one rank, and the bytes of the manifest."""
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        run_dir, trace = Path(directory, "run"), Path(directory, "trace")
        (run_dir / "checkpoints").mkdir(parents=True)
        command = ["strace", "-f", "-y", "-s", "400", "-e", "trace=%file,%desc", "-o", str(trace)]
        command += [sys.executable, "-m", "benchmarks.checkpoint_files", "--rank"]
        command += [json.dumps([str(run_dir), rank, world_size])]
        subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stderr=subprocess.DEVNULL)
        manifest = run_dir / "checkpoints" / "step-00000002" / "MANIFEST.json"
        return counted(trace, str(run_dir)), manifest.stat().st_size


def counted(trace: Path, below: str) -> dict[str, dict[str, int]]:
    """Return the calls of each phase on paths or descriptors in a directory."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: {"calls": 0, "read": 0, "written": 0})
    phase = "setup"
    for line in trace.read_text(errors="replace").splitlines():
        if mark := re.search(r'"/phase/(\w+)"', line):
            phase = mark[1]
        found = CALL.match(line)
        if phase == "setup" or not found or below not in line or found[1] in FREE:
            continue
        if found[1] in MOVED:
            kind = "read" if "read" in found[1] else "written"
            counts[phase][kind] += max(0, int(found[3] or 0))
        else:
            counts[phase]["calls"] += 1
    return counts


def mark(phase: str) -> None:
    """Leave a call in the trace, from where on calls belong to this phase."""
    Path(f"/phase/{phase}").exists()


# -------------------------------------------------------------------------------------------------
# In the traced process


def be_rank(directory: str, rank: int, world_size: int) -> None:
    import torch

    from zerolm.checkpoint import directory as layout
    from zerolm.checkpoint import load, writer
    from zerolm.checkpoint.manifest import Progress
    from zerolm.checkpoint.rotation import Retention

    torch.set_num_threads(1)
    run_dir = Path(directory)
    files = StandIns(run_dir, rank, world_size)
    states = {"states": torch.zeros(OWN_BYTES // 4)}
    weights = {"weights": torch.zeros(COMMON_BYTES // 4)}

    class Engine:
        global_rank = rank
        checkpoint_engine: Any = None

        def __init__(self) -> None:
            self.world_size = world_size

        def zero_optimization_stage(self) -> int:
            return 2

        def save_checkpoint(self, parent: str, tag: str, save_latest: bool) -> None:
            mark("setup")
            temporary = Path(parent, tag)
            temporary.mkdir(exist_ok=True)
            files.write(temporary)
            mark("save")
            if rank == 0:
                self.checkpoint_engine.save(weights, str(temporary / files.COMMON))
            self.checkpoint_engine.save(states, str(temporary / files.own(rank)))

    def gather(value: Any) -> Any:
        if isinstance(value, list) and value and "file" in value[0]:
            mark("publish")
            return [[*value, *files.entries]] if rank == 0 else []
        return [value]

    def gather_on_rank0(value: Any) -> Any:
        return gather(value) if rank == 0 else None

    def broadcast(value: Any) -> Any:
        if rank and isinstance(value, list):  # rank 0 publishes the new one and retires the old one
            mark("setup")
            temporary = run_dir / "checkpoints" / ".tmp-step-00000002"
            layout.publish(temporary, files.manifest(2, files.entries + files.last))
            old = run_dir / "checkpoints" / "step-00000001"
            value = [old.rename(old.with_name(".tmp-step-00000001"))]
            (value[0] / "MANIFEST.json").unlink()
        mark("delete")
        return value

    for name, function in {
        "gather_objects": gather,
        "gather_on_rank0": gather_on_rank0,
        "broadcast_object": broadcast,
    }.items():
        setattr(writer, name, function)
    saver = writer.CheckpointWriter(Engine(), run_dir, Retention(last=1))
    files.write_old()
    mark("save")
    saver.save(Progress(step=2))
    job = saver._job
    assert job is not None and job.thread is not None
    job.thread.join()
    files.last = job.entries or []
    assert saver.finish().error is None  # type: ignore[union-attr]
    mark("setup")
    if not (run_dir / "checkpoints" / "step-00000002").exists():  # an earlier release, rank > 0
        temporary = run_dir / "checkpoints" / ".tmp-step-00000002"
        layout.publish(temporary, files.manifest(2, files.entries + files.last))
    found, _ = layout.candidates(run_dir)
    listed = [(one.directory.name, one.digest) for one in found if one.progress.step == 2]
    load.gather_objects = lambda value: [value]
    load.require_on_all_ranks = lambda condition, problem: None
    load.broadcast_object = lambda value: (
        (value if rank == 0 else (listed, [], [])) if isinstance(value, tuple) else value
    )
    mark("resume")
    checkpoint, damage = load.newest_complete(run_dir, rank, world_size)
    mark("setup")
    assert checkpoint is not None and checkpoint.progress.step == 2 and not damage, damage


class StandIns:
    """The files of all other ranks, and their entries in the manifest."""

    COMMON = "mp_rank_00_model_states.pt"

    def __init__(self, run_dir: Path, rank: int, world_size: int):
        self.run_dir, self.rank, self.world_size = run_dir, rank, world_size
        self.last: list[dict[str, Any]] = []  # of the real rank
        self.entries = [
            self._entry(self.own(other), OWN_BYTES, {"rank": other})
            for other in range(world_size)
            if other != rank
        ]
        if rank:
            self.entries.append(self._entry(self.COMMON, COMMON_BYTES, {}))

    def own(self, rank: int) -> str:
        return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def _entry(self, name: str, size: int, more: dict[str, Any]) -> dict[str, Any]:
        return {"file": name, "size_bytes": size, **digest_of_zeros(size), **more}

    def write(self, directory: Path) -> None:
        for entry in self.entries:
            with open(directory / entry["file"], "wb") as file:
                file.truncate(entry["size_bytes"])

    def write_old(self) -> None:
        """Publish the checkpoint of step 1, with the files of all ranks."""
        from zerolm.checkpoint import directory as layout

        temporary = self.run_dir / "checkpoints" / ".tmp-step-00000001"
        temporary.mkdir()
        self.write(temporary)
        mine = [self._entry(self.own(self.rank), OWN_BYTES, {"rank": self.rank})]
        if self.rank == 0:
            mine.append(self._entry(self.COMMON, COMMON_BYTES, {}))
        for entry in mine:
            with open(temporary / entry["file"], "wb") as file:
                file.truncate(entry["size_bytes"])
        layout.publish(temporary, self.manifest(1, self.entries + mine))

    def manifest(self, step: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
        from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress

        return {
            "format": FORMAT, "version": VERSION, "progress": vars(Progress(step=step)),
            "world_size": self.world_size, "zero_stage": 2,
            "files": sorted(entries, key=lambda entry: entry["file"]),
        }  # fmt: skip


def digest_of_zeros(size: int, known: dict[int, dict[str, str]] = {}) -> dict[str, str]:  # noqa: B006
    """Return the checksum of a file of zeros, as the release that runs writes it."""
    import hashlib

    if size not in known:
        try:
            from zerolm.checkpoint.checksums import XXH3, RangeHash
        except ImportError:
            known[size] = {"sha256": hashlib.sha256(bytes(size)).hexdigest()}
        else:
            hasher = RangeHash()
            hasher.update(bytes(size))
            known[size] = {XXH3: hasher.hexdigest()}
    return known[size]


if __name__ == "__main__":
    main()
