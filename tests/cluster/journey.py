"""A Slurm user's way from `sbatch` to the exported model, through everything that interrupts it.

    python -m tests.cluster.journey --output benchmarks/results/slurm_journey.md

One run on two nodes is preempted, loses a node, and reaches its time limit twice; its export waits
as a dependent job. Then a sweep is an array job, one of whose tasks is preempted, and its table a
dependent job. At last a refused run, whose export must not wait for ever. The commands are those of
docs/operate.md and docs/experiments.md.
"""

import argparse
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.cluster.endings import BATCH, PYTHON, SECONDS, SEQ_LEN, Endings, Job
from tests.cluster.hosts import Cluster, missing
from tests.cluster.slurm import missing_accounting
from tests.end_to_end.run_digest import differences, digest
from tests.launching import ROOT, events, run_ranks

STEPS, PREEMPTED, FAILED = 90, 10, 20
STEP_SECONDS = 1.2  # 90 of them are more than one time limit has
HEAD = "| what | seconds | outcome |"
ZEROLM = f"{ROOT}/.venv/bin/zerolm"


class Journey(Endings):
    """Goes the way, and collects a line for each part of it."""

    def __init__(self, cluster: Cluster):
        super().__init__(cluster)
        self.lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]

    def note(self, what: str, since: float, outcome: object) -> None:
        self.lines.append(f"| {what} | {time.monotonic() - since:.0f} | {outcome} |")
        print(self.lines[-1], flush=True)

    def after(self, job: Job, name: str, command: str) -> Job:
        """Submit what depends on the end of a job."""
        log = self.cluster.directory / f"{name}.out"
        options = (f"--dependency=afterok:{job.number}", "--kill-on-invalid-dep=yes")
        number = self.slurm.command(
            "sbatch", "--parsable", *options, f"--output={log}", f"--wrap={command}"
        )
        return Job(number.strip(), self.cluster.directory / name, log)

    # ---- One run and its export

    def a_run_and_its_export(self) -> None:
        total = ["--total_tokens", SEQ_LEN * BATCH * STEPS, "--learning_rate", 3e-3]
        reference, ledger = self.cluster.directory / "reference", self.cluster.directory / "ledger"
        ledger.mkdir()
        done = run_ranks(2, *self.flags, *total, "--run_dir", reference, ZEROLM_LEDGER=str(ledger))
        assert done.returncode == 0, done.stdout[-3000:]

        since = time.monotonic()
        job = self.submit("long", *total, seconds=STEP_SECONDS, limit="2m")
        exported = self.cluster.directory / "exported"
        words = [ZEROLM, "export", job.run_dir, exported]
        export = self.after(job, "export", shlex.join(map(str, words)))
        self.at_step(job, PREEMPTED)
        self.note(f"`sbatch` until step {PREEMPTED}", since, self.queued(export))

        since = time.monotonic()
        self.preempt()
        self.settled(job)
        self.start_now(job)
        self.at_step(job, FAILED)
        self.note(f"preempted, resumed, at step {FAILED}", since, self.queued(export))

        since = time.monotonic()
        self.fail_node()
        self.settled(job)
        state = self.over(job)
        found = differences(digest(job.run_dir), digest(reference))
        kinds = [event["event"] for event in events(job.run_dir)]
        stops = f"{kinds.count('stopped')} stops, {kinds.count('resume')} resumes"
        equal = f"{len(found)} differences from an undisturbed run on one host"
        self.note("a node set DOWN, then the time limit, until the run ended", since,
                  f"{state}; {stops}; {equal}")  # fmt: skip
        assert state == "COMPLETED" and not found, (state, found[:5])

        since = time.monotonic()
        state = self.over(export)
        assert state == "COMPLETED", export.log.read_text()
        model = AutoModelForCausalLM.from_pretrained(exported)
        with torch.no_grad():
            loss = model(input_ids=(ids := torch.arange(2, 34)[None]), labels=ids).loss.item()
        self.note("the export, by dependency", since,
                  f"{state}; transformers loads it, loss of a made-up text {loss:.3f}")  # fmt: skip

    # ---- A sweep and its table

    def a_sweep_and_its_table(self) -> None:
        since = time.monotonic()
        directory, script = self.cluster.directory / "sweep", self.cluster.directory / "sweep.sh"
        total = ["--total_tokens", SEQ_LEN * BATCH * 40]
        sweep = [
            "sweep", "--render", script, "--nodes", 2, "--devices_per_node", 1, "--time", "8m",
            "--save_time", "30s", "--env", "OMP_NUM_THREADS=1",
            "--env", "FAULT=step.begin:*:*:sleep=0.2", "--jobs", 1,
            "--set", "learning_rate=1e-3,3e-3", "--set", "seed=0,1", *self.flags, *total,
            "--run_dir", directory,
        ]  # fmt: skip
        done = self.cluster.run("node1", PYTHON, "-m", "zerolm", *sweep)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        number = self.slurm.submit(script, f"--output={self.cluster.directory}/sweep-%a.out")
        job = Job(number, directory, self.cluster.directory / "sweep-0.out")
        again = [ZEROLM, "sweep", "--table", *sweep[sweep.index("--set") :]]
        table = self.after(job, "table", shlex.join(map(str, again)))
        self.slurm.wait(lambda: list(directory.glob("*/metrics.jsonl")), "the first run", SECONDS)
        time.sleep(5)
        self.preempt()
        self.note("an array job of four runs; the first is preempted", since, self.queued(table))

        since = time.monotonic()
        last = self.array_over(job)
        ended = [events(path)[-1]["event"] for path in sorted(directory.glob("learning_rate*"))]
        kinds = [
            each["event"] for path in directory.glob("learning_rate*") for each in events(path)
        ]
        self.note("until all are done", since,
                  f"{last}; events {', '.join(ended)}; {kinds.count('resume')} resume")  # fmt: skip
        assert ended == ["done"] * 4, ended

        since = time.monotonic()
        state = self.over(table)
        text = table.log.read_text()
        shown = re.findall(r"^.*(?:best|minimum).*$", text, re.MULTILINE)
        self.note("its table, by dependency", since, f"{state}; {'; '.join(shown[:2])}")
        assert state == "COMPLETED", text

    # ---- A refusal

    def a_refused_run(self) -> None:
        since = time.monotonic()
        job = self.submit("refused", "--data", self.inputs / "absent")
        export = self.after(job, "never", "touch never")
        last = self.over(job)
        self.slurm.wait(lambda: "PENDING" not in self.queued(export), "the dependent job", SECONDS)
        self.note("a run with a wrong path, and its export", since,
                  f"{last}; {self.queued(export)}")  # fmt: skip

    # ---- Inside

    def start_now(self, job: Job) -> None:
        """Spare the two minutes that Slurm lets a requeued job wait."""
        time.sleep(5)
        self.slurm.command("scontrol", "update", f"jobid={job.number}", "starttime=now")

    def array_over(self, job: Job) -> str:
        """Wait until all tasks of an array are over; return their states."""
        states: list[str] = []

        def is_over() -> bool:
            shown = self.slurm.command("squeue", "-h", "-r", "-o", "%i %T", "-t", "all",
                                       "-j", job.number)  # fmt: skip
            states[:] = [line.split()[1] for line in shown.splitlines()]
            for line in shown.splitlines():
                if line.endswith("PENDING"):
                    self.cluster.run(
                        "node1", "scontrol", "update", f"jobid={line.split()[0]}", "starttime=now"
                    )
            time.sleep(1)
            return bool(states) and not {*states} & {"PENDING", "RUNNING", "COMPLETING"}

        self.slurm.wait(is_over, str(job.log), SECONDS)
        return ", ".join(states)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.journey", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table to this file")
    given = parser.parse_args(argv)
    if reason := missing() or missing_accounting():
        print(reason)
        return 2
    directory = Path(tempfile.mkdtemp(prefix="zerolm-journey-")) / "hosts"
    with Cluster(directory, 2) as cluster:
        journey = Journey(cluster)
        journey.a_run_and_its_export()
        journey.a_sweep_and_its_table()
        journey.a_refused_run()
    if given.output:
        given.output.write_text("\n".join(journey.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
