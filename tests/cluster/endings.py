"""What Slurm says of a run after each way to end: `sacct`, `squeue`, and whether it runs again.

    python -m tests.cluster.endings --output benchmarks/results/slurm_endings.md

Each job is what `zerolm render slurm` writes, on two nodes with accounting.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import Cluster, missing
from tests.cluster.slurm import Slurm, missing_accounting
from tests.launching import LLAMA, events, write_json, write_shards

STEPS, SAVE, BATCH, SEQ_LEN = 40, 8, 8, 32
SECONDS = 400.0
PYTHON = ".venv/bin/python"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
HEAD = "| how it ended | `sacct -D`: states, exit codes | `squeue` then | last | events |"


class Job(NamedTuple):
    """A submitted run."""

    number: str
    run_dir: Path
    log: Path


class Endings:
    """Runs the jobs, one after another.

    Args:
        cluster: two hosts that have started.
    """

    def __init__(self, cluster: Cluster):
        self.cluster, self.slurm = cluster, Slurm(cluster, accounting=True)
        self.inputs = cluster.directory / "inputs"
        self.inputs.mkdir()
        write_shards(self.inputs / "data")
        zero = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}
        self.flags = [
            "--deepspeed_config", write_json(self.inputs / "ds.json", zero),
            "--model_config", write_json(self.inputs / "model.json", LLAMA),
            "--data", self.inputs / "data", "--seq_len", SEQ_LEN,
            "--batch_tokens", SEQ_LEN * BATCH, "--precision", "fp32", "--wandb", "off",
            "--checkpoint_interval", SAVE, "--total_tokens", SEQ_LEN * BATCH * STEPS,
            "--log_interval", 1, "--hang_timeout", 60,
        ]  # fmt: skip

    def submit(self, name: str, *flags: object, seconds: float = 0.2, limit: str = "8m") -> Job:
        """Submit a run whose steps take some seconds."""
        run_dir, log = self.cluster.directory / name, self.cluster.directory / f"{name}.out"
        script = self.cluster.directory / f"{name}.sh"
        render = [
            "render", "slurm", "--nodes", 2, "--devices_per_node", 1, "--time", limit,
            "--save_time", "30s", "--output", script, "--env", "OMP_NUM_THREADS=1",
            "--env", f"FAULT=step.begin:*:*:sleep={seconds}",
        ]  # fmt: skip
        own = [*self.flags, *flags, "--run_dir", run_dir]
        done = self.cluster.run("node1", PYTHON, "-m", "zerolm", *render, "--", *own)
        assert done.returncode == 0, done.stderr
        return Job(self.slurm.submit(script, f"--output={log}"), run_dir, log)

    def at_step(self, job: Job, step: int) -> None:
        def reached() -> bool:
            with suppress(OSError):
                return f'"step": {step},' in (job.run_dir / "metrics.jsonl").read_text()
            return False

        self.slurm.wait(reached, f"step {step}: {job.log}", SECONDS)

    def over(self, job: Job) -> str:
        """Wait until the job is over, whatever it takes; return its last state."""

        def is_over() -> bool:
            if self.slurm.state(job.number) == "PENDING":  # Slurm lets it wait for two minutes
                time.sleep(5)  # it starts no job at once on nodes that have just killed it
                with suppress(AssertionError):
                    change = ("scontrol", "update", f"jobid={job.number}", "starttime=now")
                    self.slurm.command(*change)
            return self.slurm.state(job.number) in OVER

        self.slurm.wait(is_over, f"the job to end: {job.log}", SECONDS)
        return self.slurm.state(job.number)

    def queued(self, job: Job) -> str:
        shown = self.slurm.command("squeue", "-h", "-o", "%T (%r)", "-t", "all", "-j", job.number)
        return shown.strip().replace("\n", "; ") or "-"

    def settled(self, job: Job) -> str:
        """Wait until no process of the job runs; return what squeue says then."""
        wait = ("RUNNING", "COMPLETING")
        self.slurm.wait(
            lambda: not any(each in self.queued(job) for each in wait), str(job.log), SECONDS
        )
        time.sleep(3)  # of a requeue that comes later
        return self.queued(job)

    def row(self, how: str, job: Job, queued: str, last: str) -> str:
        words = ("sacct", "-D", "-X", "-n", "-P", "-j", job.number, "-o", "State,ExitCode")
        time.sleep(3)  # the controller tells its database in batches
        found = [line.replace("|", " ") for line in self.slurm.command(*words).split("\n") if line]
        kinds = [each["event"] for each in events(job.run_dir)] if job.run_dir.exists() else []
        quiet = ("checkpoint", "startup", "recovered", "step_skipped")
        shown = [kind for kind, _ in groupby(each for each in kinds if each not in quiet)]
        return f"| {how} | {'; '.join(found)} | {queued} | {last} | {', '.join(shown) or '-'} |"

    # ---- The endings

    def done(self) -> str:
        job = self.submit("done", seconds=0.0)
        last = self.over(job)
        return self.row("done", job, self.queued(job), last)

    def refused(self) -> str:
        job = self.submit("refused", "--data", self.inputs / "absent")
        last = self.over(job)
        return self.row("refused", job, self.queued(job), last)

    def gave_up(self) -> str:
        endless = ["--learning_rate", 1e6, "--schedule", "constant", "--cooldown_after", 0,
                   "--rollback_after", 1, "--max_rollbacks", 1, "--warmup_tokens", 0]  # fmt: skip
        job = self.submit("gave_up", *endless, seconds=0.0)
        last = self.over(job)
        return self.row("gave up", job, self.queued(job), last)

    def cancelled(self) -> str:
        return self._stopped("scancel", lambda job: self.slurm.command("scancel", job.number))

    def preempt(self, *_: Job) -> None:
        """Submit what takes the nodes from all other jobs for two seconds."""
        script = self.cluster.directory / "urgent"
        script.write_text("#!/bin/sh\nsleep 2\n")
        options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
        self.slurm.submit(script, *options)

    def fail_node(self, *_: Job) -> None:
        node = ("scontrol", "update", "nodename=node2")
        self.slurm.command(*node, "state=down", "reason=test")
        time.sleep(5)
        with suppress(AssertionError):  # it has come back by itself
            self.slurm.command(*node, "state=resume")

    def preempted(self) -> str:
        return self._stopped("preemption", self.preempt)

    def node_failed(self) -> str:
        return self._stopped("node set DOWN (NODE_FAIL)", self.fail_node)

    def time_limit(self) -> str:
        """Two minutes, of which a run of 100 s and its start need more."""
        job = self.submit("limit", seconds=2.5, limit="2m")
        queued = self.settled(job)
        return self.row("time limit", job, queued, self.over(job))

    def _stopped(self, how: str, act: Callable[[Job], Any]) -> str:
        job = self.submit(how.split()[0])
        self.at_step(job, SAVE + 2)
        act(job)
        queued = self.settled(job)
        return self.row(how, job, queued, self.over(job))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.endings", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table to this file")
    parser.add_argument("--only", nargs="+", help="names of the methods of `Endings`")
    given = parser.parse_args(argv)
    if reason := missing() or missing_accounting():
        print(reason)
        return 2
    names = ("done", "refused", "gave_up", "cancelled", "preempted", "node_failed", "time_limit")
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    directory = Path(tempfile.mkdtemp(prefix="zerolm-endings-")) / "hosts"
    with Cluster(directory, 2) as cluster:
        endings = Endings(cluster)
        for name in given.only or names:
            try:
                lines.append(getattr(endings, name)())
            except AssertionError as error:
                lines.append(f"| {name} | FAILED: {str(error)[-300:]} | | | |")
            print(lines[-1], flush=True)
    if given.output:
        given.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
