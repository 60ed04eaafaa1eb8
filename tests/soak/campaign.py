"""The campaign: the next chunks, until the log has enough kills or the time is over.

`run_dir` has `data/`; `references/`, the digests of runs without faults, one for each
configuration, number of steps and version of the code; and `chunk-0007/` of a chunk that is
running, was interrupted, or has differences.
"""

import contextlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tests.launching import launch
from tests.soak import chunk, comparison, configurations, kills, log, strike
from tests.soak.configurations import Configuration
from zerolm.checkpoint import memory
from zerolm.common.provenance import git_commit

TRAINING_SECONDS = 2.5  # on average between two kills; 15 in the experiment of torchft
MIN_KILLS, MAX_KILLS = 3, 60  # of a chunk
CHUNK_SECONDS = 600.0  # of the first chunk, before the log says how long they take
REFERENCE_SECONDS = 3600.0


@dataclass
class Campaign:
    """Settings of a campaign, and the chunks that are running.

    Attributes:
        num_kills: stop when the log has this many.
        steps: of each run, with the full batch.
        kinds: only these; all if empty.
        rotation: configurations, by the number of the chunk.
        count: kills of a chunk; None: one for each `TRAINING_SECONDS` of its reference.
    """

    run_dir: Path
    log: Path
    num_kills: int
    steps: int
    kinds: Sequence[str] = ()
    rotation: Sequence[Configuration] = configurations.ROTATION
    count: int | None = None
    until: float = float("inf")  # on the clock of time.monotonic
    running: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, parallel: int) -> None:
        """Run chunks until there are enough kills, or no time is left for another chunk."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        configurations.write_data(self.run_dir / "data")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ThreadPoolExecutor(parallel) as pool:
            threads = [pool.submit(self.run_chunks) for _ in range(parallel)]
            try:
                wait(threads)
            except KeyboardInterrupt:
                self.stop()
            for thread in threads:
                thread.result()

    def stop(self) -> NoReturn:
        """End this process and the chunks that are running, which will be repeated."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one would leave processes behind
        self.lock.acquire()  # so that nothing of them is logged
        try:
            for base in [*self.run_dir.glob("references/*"), *map(self.directory, self.running)]:
                end(base)
        except Exception:
            traceback.print_exc()
        finally:  # the threads wait for the lock: this process would never end
            os._exit(128 + signal.SIGINT)

    def directory(self, number: int) -> Path:
        return self.run_dir / f"chunk-{number:04d}"

    def run_chunks(self) -> None:
        while (number := self.next_chunk()) is not None:
            try:
                code = configurations.code_version()
                entry = self.run_chunk(number)
                if configurations.code_version() != code:
                    print(f"chunk {number}: the code has changed meanwhile: again", flush=True)
                    continue
                with self.lock:
                    log.append(self.log, entry)
                print(shown(entry), flush=True)
            except Exception:
                traceback.print_exc()  # now: the pool raises it when the other chunks are done
                raise
            finally:
                self.running.discard(number)

    def next_chunk(self) -> int | None:
        """Return the number of the next chunk, None if there should be no more."""
        with self.lock:
            chunks = log.read(self.log)
            recent = [each["seconds"] for each in chunks[-10:]]
            expected = statistics.median(recent) if recent else CHUNK_SECONDS
            late = time.monotonic() + expected > self.until
            if late or log.num_kills(chunks) >= self.num_kills:
                return None
            number = log.next_number(chunks, self.running)
            self.running.add(number)
            return number

    def run_chunk(self, number: int) -> dict[str, Any]:
        """Run one chunk and return its entry in the log; its directory is kept if it differs."""
        rng, began = random.Random(number), time.monotonic()
        configuration = self.rotation[number % len(self.rotation)]
        base = self.directory(number)
        remove_chunk(base)
        reference = self.reference(configuration)
        for name in ("ledger", "once", "tmp", "run"):
            (base / name).mkdir(parents=True)
        applicable = kills.applicable(configuration, is_root=os.geteuid() == 0)
        chosen = [kind for kind in applicable if kind in self.kinds or not self.kinds]
        steps = reference["digest"]["progress"]["step"]
        plan = kills.planned(
            rng, chosen, configuration.ranks, int(steps), self.count or reference["num_kills"]
        )
        arguments = configurations.flags(configuration, self.run_dir, base / "run", self.steps)
        run = chunk.KilledRun(
            base, arguments, configuration.ranks, plan, rng,
            TORCHINDUCTOR_CACHE_DIR=str(self.run_dir / "inductor"),
        )  # fmt: skip
        differences: list[str] = []
        recoveries: list[dict[str, Any]] = []
        with small_disk(base / "run", "full disk" in chosen):
            try:
                run.train()
                run.problems += [f"left behind: {each}" for each in run.left_processes()]
                run.problems += chunk.command_problems(run.run_dir)
                run.problems += chunk.left_files(run.run_dir)
                recoveries = [chunk.seconds_of(each) for each in run.events("recovered")]
                found = comparison.digest(run.run_dir, base / "ledger")
                differences = comparison.differences(found, reference["digest"])
            except (chunk.Failed, AssertionError, subprocess.TimeoutExpired) as error:
                run.problems.append(f"{type(error).__name__}: {error}")
            finally:
                run.clean()
                if differences or run.problems:
                    shutil.copytree(base / "run", base / "kept", dirs_exist_ok=True)
        entry = {
            "chunk": number, "configuration": configuration.name,
            "commit": git_commit(Path(__file__).parent), "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": machine(), "steps": int(steps),
            "seconds": round(time.monotonic() - began, 1),
            "training_seconds": round(run.training_seconds, 1), "starts": run.starts,
            "refused": run.refused, "left_in_tmp": names_in(base / "tmp"),
            "kills": chunk.performed(run.kills), "recoveries": recoveries,
            "num_differences": len(differences),
            "differences": differences[: log.MAX_DIFFERENCES], "problems": run.problems,
        }  # fmt: skip
        if log.is_equal(entry):
            remove_chunk(base)
        return entry

    def reference(self, configuration: Configuration) -> dict[str, Any]:
        """Return the digest of the run without faults, which is trained once for each code.

        Returns:
            `digest`, and `num_kills`: how many kills a run of its length should have.
        """
        name = f"{configuration.name}-{self.steps}-{configurations.code_version()}"
        base = self.run_dir / "references" / name
        path = base / "digest.json"
        if path.exists():
            return json.loads(path.read_text())
        remove_chunk(base)
        (base / "ledger").mkdir(parents=True)
        mark = uuid.uuid4().hex
        (base / "marks").write_text(f"ZEROLM_TEST={mark}")
        arguments = configurations.flags(configuration, self.run_dir, base / "run", self.steps)
        done = launch(
            configuration.ranks, *arguments, timeout=REFERENCE_SECONDS,
            ZEROLM_TEST=mark, ZEROLM_LEDGER=str(base / "ledger"),
            TORCHINDUCTOR_CACHE_DIR=str(self.run_dir / "inductor"),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        count = round(comparison.step_seconds(base / "run") / TRAINING_SECONDS)
        found = {
            "digest": comparison.digest(base / "run", base / "ledger"),
            "num_kills": min(MAX_KILLS, max(MIN_KILLS, count)),
        }
        path.with_suffix(".tmp").write_text(json.dumps(found))
        path.with_suffix(".tmp").rename(path)
        return found


def remove_chunk(base: Path) -> None:
    """Remove a chunk's directory, and what an interrupted campaign has left running in it."""
    end(base)
    shutil.rmtree(base, ignore_errors=True)


def end(base: Path) -> None:
    """Kill the processes that a chunk or a reference has started; remove its copies and mount."""
    path = base / "marks"
    for mark in path.read_text().split() if path.exists() else ():
        strike.kill_marked(mark)
    memory.remove_copies(base / "run")
    if os.path.ismount(base / "run"):
        with contextlib.suppress(subprocess.CalledProcessError):  # its thread was faster
            unmount(base / "run")


def unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=60)


@contextlib.contextmanager
def small_disk(directory: Path, wanted: bool):
    """Mount a small file system for the run directory, which can be filled."""
    if not wanted:
        yield
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={chunk.SMALL_DISK}", "tmpfs", str(directory)]
    subprocess.run(command, check=True, timeout=60)
    try:
        yield
    finally:
        unmount(directory)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())[:20]


def machine() -> str:
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if "model name" in line), "?")
    return f"{cpu}, {os.cpu_count()} cores, Linux {platform.release()}"


def shown(entry: dict[str, Any]) -> str:
    """Return a line about a chunk for the console."""
    result = "equal" if log.is_equal(entry) else "DIFFERENT"
    problems = [*entry["differences"][:3], *entry["problems"]]
    return (
        f"chunk {entry['chunk']} {entry['configuration']}: {len(entry['kills'])} kills, "
        f"{entry['seconds']:.0f} s: {result}" + "".join(f"\n    {line}" for line in problems)
    )
