"""One fault during a run on several hosts: how the run ends, who is blamed, and what it learns."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.supervise.outcome import LOST_EVENTS
from tests.cluster.hosts import Cluster
from tests.cluster.slurm import Slurm
from tests.end_to_end.run_digest import differences, digest
from tests.launching import LLAMA, events, run_ranks, write_json, write_shards
from zerolm.common.process_tree import NODE_LAUNCHER, RUNNER

STEPS, SAVE, BATCH, SEQ_LEN = 45, 8, 12, 32  # a batch that two and three ranks share
STEP_SECONDS, HANG_SECONDS = 0.15, 30
TRIAL_SECONDS = 400.0
PYTHON = ".venv/bin/python"
SSH, SLURM = "ssh", "Slurm"
VICTIM, NOBODY, ANYONE = "the host", "nobody", "anyone"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        blame: who may be named: the host with the fault, nobody, or anyone (a network has two
            ends).
        fault: injected by `zerolm.common.faults`, as `point:{rank}:{step}:action`.
        make: makes the fault otherwise; given a `Trial`.
        mend: ends it, when the run has ended or `mend_seconds` have passed.
        modes: where it is tried.
        resubmit: whether the run ends for good, and is started again by hand.
    """

    blame: str
    fault: str = ""
    make: "Callable[[Trial], Any] | None" = None
    mend: "Callable[[Trial], Any] | None" = None
    mend_seconds: float = 60.0
    modes: tuple[str, ...] = (SSH, SLURM)
    resubmit: bool = False


def _kill(number: int, *words: str) -> "Callable[[Trial], None]":
    """Return what sends a signal to the victim's rank, or to its process with these words."""

    def send(trial: "Trial") -> None:
        for pid in trial.processes(*words):
            os.kill(pid, number)

    return send


def _firewall(trial: "Trial", action: str) -> None:
    rule = ["-i", "eth0", "-p", "tcp", "-m", "multiport", "!", "--ports", "22,6817,6818"]
    done = trial.cluster.run(trial.victim, "iptables", action, "INPUT", *rule, "-j", "DROP")
    assert done.returncode == 0, done.stderr


def _stop_ssh(trial: "Trial") -> None:
    trial.cluster.refuse_ssh(trial.victim)
    _kill(signal.SIGKILL)(trial)


def _abort_peers(trial: "Trial") -> None:
    """Kill the victim; the other ranks abort a second later, as NCCL makes them."""
    peers = [pid for name in trial.cluster.names for pid in trial.processes(host=name)]
    _kill(signal.SIGKILL)(trial)
    time.sleep(1.0)
    for pid in peers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)


def _memory_group() -> tuple[Path, str]:
    """Return a new group of processes with a memory of its own, and the name of its limit."""
    first = Path("/sys/fs/cgroup/memory")  # of version 1
    root, limit = (first, "memory.limit_in_bytes") if first.exists() else (
        first.parent, "memory.max")  # fmt: skip
    return root / f"zerolm-{os.getpid()}", limit


def _fill_memory(trial: "Trial") -> None:
    """Let another process fill the memory that the victim's rank shares with it."""
    group, limit = _memory_group()
    group.mkdir(exist_ok=True)
    (group / limit).write_text(str(4 << 20))
    script = f"echo $$ >{group}/cgroup.procs; exec {sys.executable} -c 'b\"x\" * (1 << 26)'"
    for pid in trial.processes():
        (group / "cgroup.procs").write_text(str(pid))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")  # the first to be killed
    subprocess.run(["sh", "-c", script], capture_output=True, timeout=60, check=False)


def _empty_group(trial: "Trial") -> None:
    trial.wait(lambda: not (_memory_group()[0] / "cgroup.procs").read_text(), "the kernel to kill")
    _memory_group()[0].rmdir()


def _update_node(state: str) -> "Callable[[Trial], None]":
    def update(trial: "Trial") -> None:
        trial.slurm.command(
            "scontrol", "update", f"nodename={trial.victim}", f"state={state}", "reason=test"
        )

    return update


def _resume_node(trial: "Trial") -> None:
    with contextlib.suppress(AssertionError):  # it has registered itself again already
        _update_node("resume")(trial)


def _preempt(trial: "Trial") -> None:
    script = trial.directory / "urgent"
    script.write_text("#!/bin/sh\nsleep 2\n")
    nodes = f"--nodes={len(trial.cluster.names)}"
    trial.slurm.submit(script, "--partition=urgent", nodes, "--exclusive", "--output=/dev/null")


def _scontrol(*words: str) -> "Callable[[Trial], Any]":
    return lambda trial: trial.slurm.command(*words, trial.job)


def _time(event: dict[str, Any]) -> float:
    """Return the Unix time of an event, which has complete seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()


KINDS = {
    "SIGKILL to a rank": Kind(VICTIM, make=_kill(signal.SIGKILL)),
    "SIGSTOP to a rank": Kind(VICTIM, make=_kill(signal.SIGSTOP)),
    "SIGKILL to a node's launcher": Kind(VICTIM, make=_kill(signal.SIGKILL, NODE_LAUNCHER)),
    "SIGKILL to all of a host": Kind(
        VICTIM, make=lambda trial: (_kill(signal.SIGKILL, NODE_LAUNCHER)(trial),
                                    _kill(signal.SIGKILL)(trial))),
    "a host without power": Kind(
        VICTIM, make=lambda trial: trial.cluster.power_off(trial.victim),
        mend=lambda trial: trial.boot(), modes=(SSH,)),
    "a link is cut": Kind(
        ANYONE, make=lambda trial: trial.cluster.cut(trial.victim),
        mend=lambda trial: trial.cluster.connect(trial.victim), modes=(SSH,)),
    "a firewall": Kind(
        ANYONE, make=lambda trial: _firewall(trial, "-A"),
        mend=lambda trial: _firewall(trial, "-D"), modes=(SSH,)),
    "a slow link": Kind(
        NOBODY, make=lambda trial: trial.cluster.slow(trial.victim, 10),
        mend=lambda trial: trial.cluster.slow(trial.victim, 0), mend_seconds=10),
    "no ssh server at the restart": Kind(
        VICTIM, make=_stop_ssh, mend=lambda trial: trial.cluster.accept_ssh(trial.victim),
        modes=(SSH,)),
    "an exception": Kind(VICTIM, "step.backward:{rank}:{step}:raise"),
    "a rank exits": Kind(VICTIM, "step.end:{rank}:{step}:exit"),
    "an endless loop": Kind(VICTIM, "step.begin:{rank}:{step}:hang"),
    "a killed save": Kind(VICTIM, "checkpoint.write:{rank}:{save}:kill"),
    "a full disk": Kind(NOBODY, "checkpoint.write:{rank}:{save}:enospc"),
    "a disk error": Kind(NOBODY, "checkpoint.write:{rank}:{save}:eio"),
    "SIGTERM to the supervisor": Kind(
        NOBODY, make=_kill(signal.SIGTERM, "supervise"), modes=(SSH,), resubmit=True),
    "scancel": Kind(NOBODY, make=_scontrol("scancel"), modes=(SLURM,), resubmit=True),
    "scontrol requeue": Kind(NOBODY, make=_scontrol("scontrol", "requeue"), modes=(SLURM,)),
    "preemption": Kind(NOBODY, make=_preempt, modes=(SLURM,)),
    "a node set DOWN": Kind(
        NOBODY, make=_update_node("down"), mend=_resume_node, mend_seconds=5,
        modes=(SLURM,)),
    "a rank killed, its peers aborted": Kind(VICTIM, make=_abort_peers),
    "the out-of-memory killer": Kind(VICTIM, make=_fill_memory, mend=_empty_group),
}  # fmt: skip


@dataclass
class Draw:
    """What is tried.

    Attributes:
        stage: of ZeRO.
        victim: number of the host, from 0.
        has_stages: whether each host has a pipeline stage.
    """

    kind: str
    mode: str
    hosts: int
    stage: int
    victim: int
    step: int
    has_stages: bool = False


def draw(number: int, has_stages: bool = False) -> Draw:
    """Return a trial of the campaign: each kind in turn, the rest at random."""
    chance = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    hosts = chance.choice([2, 3])
    victim = chance.randrange(1, hosts) if KINDS[kind].mend else chance.randrange(hosts)
    if kind in ("SIGTERM to the supervisor", "scancel"):
        victim = 0
    mode = chance.choice(KINDS[kind].modes)
    stage = chance.choice([1, 2] if has_stages else [2, 3])
    return Draw(kind, mode, hosts, stage, victim, chance.randrange(10, 28), has_stages)


@dataclass
class Outcome:
    """How a trial went.

    Attributes:
        endings: exit codes of the supervisor or states of the job, until the run is done.
        seconds: from the fault until the first attempt has ended; None if none did.
        total_seconds: from the fault until the run was done.
        blamed: hosts named in events, and `wrong` those that must not be.
        differences: from an undisturbed run on one host, in any bit.
        left: processes of the run that are left on the hosts.
    """

    draw: dict[str, Any]
    endings: list[str] = field(default_factory=list)
    seconds: float | None = None
    total_seconds: float = 0.0
    blamed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    left: int = 0
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.differences or self.left or self.problem)


class Trial:
    """Runs one draw on hosts of its own.

    Args:
        directory: for the hosts and the run; not yet existing.
        references: digests of undisturbed runs, by (hosts, stage); added to.
    """

    def __init__(self, drawn: Draw, directory: Path, references: dict[tuple[int, int], Any]):
        self.drawn, self.directory, self.references = drawn, directory, references
        self.kind = KINDS[drawn.kind]
        self.job = ""

    def run(self) -> Outcome:
        outcome = Outcome(asdict(self.drawn))
        with Cluster(self.directory, self.drawn.hosts) as self.cluster:
            self.victim = self.cluster.names[self.drawn.victim]
            self._write_inputs()
            if self.drawn.mode == SLURM:
                self.slurm = Slurm(self.cluster)
            try:
                self._run(outcome)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                outcome.problem = str(error)[-2000:]
            outcome.left = len(self._left())
        return outcome

    # ---- Used by the kinds

    def processes(self, *words: str, host: str = "") -> list[int]:
        """Return the rank of a host, the victim's, or its processes of the run with these words."""
        pids = self.cluster.pids(host or self.victim, "--run_dir", str(self.run_dir), *words)
        if words:
            return pids
        own = ("launch", "supervise", NODE_LAUNCHER, RUNNER, "train")
        return [
            pid for pid in pids
            if not {*own} & {*Path(f"/proc/{pid}/cmdline").read_text().split("\0")}
        ]  # fmt: skip

    def boot(self) -> None:
        self.cluster.boot(self.victim)

    # ---- Inside

    def _write_inputs(self) -> None:
        self.run_dir, inputs = self.directory / "run", self.directory / "inputs"
        self.log = self.directory / "run.out"
        for name in ("inputs", "ledger", "once", "reference-ledger"):
            (self.directory / name).mkdir()
        shards = write_shards(inputs / "data")
        zero = {"stage": self.drawn.stage}
        profile = {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {}}}
        model = LLAMA
        if self.drawn.has_stages:
            profile["pipeline"] = {"stages": self.drawn.hosts}
            model = {**LLAMA, "num_hidden_layers": 4}
        self.flags = [
            "--deepspeed_config", write_json(inputs / "ds.json", profile),
            "--model_config", write_json(inputs / "model.json", model), "--data", shards,
            "--seq_len", SEQ_LEN, "--batch_tokens", SEQ_LEN * BATCH, "--micro_batch_size", 2,
            "--precision", "fp32", "--wandb", "off", "--checkpoint_interval", SAVE,
            "--total_tokens", SEQ_LEN * BATCH * STEPS, "--log_interval", 1,
            "--hang_timeout", HANG_SECONDS,
        ]  # fmt: skip
        save = SAVE * (1 + self.drawn.step // SAVE)
        place = {"rank": self.drawn.victim, "step": self.drawn.step, "save": save}
        self.variables = {
            "FAULT": f"step.begin:*:*:sleep={STEP_SECONDS}",
            "ZEROLM_LEDGER": str(self.directory / "ledger"), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        if self.kind.fault:
            once = {"FAULT_ONCE": str(self.directory / "once")}
            self.variables |= {"FAULT": self.kind.fault.format(**place), **once}
        lines = (f"{name}={value}\n" for name, value in self.variables.items())
        (self.directory / ".deepspeed_env").write_text("".join(lines))

    def _reference(self) -> Any:
        key = (self.drawn.hosts, self.drawn.stage)
        if key not in self.references:
            run_dir, ledger = self.directory / "reference", self.directory / "reference-ledger"
            flags = [*self.flags, "--run_dir", run_dir]
            done = run_ranks(key[0], *flags, ZEROLM_LEDGER=str(ledger), OMP_NUM_THREADS="1")
            assert done.returncode == 0, done.stdout[-3000:]
            self.references[key] = digest(run_dir, ledger)
        return self.references[key]

    def _run(self, outcome: Outcome) -> None:
        reference = self._reference()
        self._start()
        self.wait(lambda: self._step() >= self.drawn.step, "the step of the fault")
        made = time.time()
        if self.kind.make is not None:
            self.kind.make(self)
        if self.kind.mend is not None:
            started = time.monotonic()
            limit = self.kind.mend_seconds
            self.wait(lambda: self._failed() or time.monotonic() - started > limit, "an ending")
            self.kind.mend(self)
        for _ in range(4):
            outcome.endings.append(self._wait_for_end())
            if outcome.endings[-1] in ("0", "COMPLETED"):
                break
            assert self.kind.resubmit, f"ended with {outcome.endings}: {self._output()}"
            outcome.seconds = outcome.seconds or round(time.time() - made, 1)
            self._start()
        outcome.total_seconds = round(time.time() - made, 1)
        if (failed := self._failed()) and not outcome.seconds:
            after = [_time(event) - made for event in failed if _time(event) > made - 1]
            outcome.seconds = round(max(0.0, after[0]), 1) if after else None
        lost = [
            event for event in events(self.run_dir)
            if event["event"] in LOST_EVENTS and _time(event) > made - 1
        ]  # fmt: skip
        outcome.blamed = sorted({rank["host"] for event in lost for rank in event["ranks"]})
        if self.drawn.has_stages:
            self._require_stages(lost)
        allowed = {VICTIM: [self.victim], NOBODY: [], ANYONE: self.cluster.names}[self.kind.blame]
        outcome.wrong = [host for host in outcome.blamed if host not in allowed]
        if self.kind.blame == VICTIM and not outcome.blamed:
            reasons = " ".join(map(str, (event["reasons"] for event in self._failed())))
            named = [name for name in self.cluster.names if name in reasons]
            first = min(named, key=reasons.find, default="nobody is named")
            outcome.wrong = [first] * (first != self.victim)
        found = differences(digest(self.run_dir, self.directory / "ledger"), reference)
        outcome.differences = found[:5]

    def _require_stages(self, lost: Sequence[dict[str, Any]]) -> None:
        """Require that the stage of each rank that is blamed is logged and printed.

        A launcher that has ended is named by its host.
        """
        output = self.log.read_text()
        for event in lost:
            for rank in event["ranks"]:
                number, stage = rank["rank"], f"{rank['rank'] + 1} of {self.drawn.hosts}"
                shown = rf"rank {number} on {rank['host']} \(pid {rank['pid']}.*, stage {stage}\)"
                assert rank["stage"] == stage, rank
                if event["event"] != "launcher_lost":
                    assert re.search(shown, output), f"not printed: {shown}"

    def _start(self) -> None:
        flags = [*self.flags, "--run_dir", self.run_dir]
        if self.drawn.mode == SLURM:
            names = ("ZEROLM_LEDGER", "FAULT", "FAULT_ONCE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
            variables = [
                word for name in names if name in self.variables
                for word in ("--env", f"{name}={self.variables[name]}")
            ]  # fmt: skip
            script = self.directory / "job"
            render = ["render", "slurm", "--nodes", self.drawn.hosts, "--devices_per_node", 1]
            render += ["--time", "8m", "--save_time", "30s", "--output", script, *variables]
            done = self.cluster.run("node1", PYTHON, "-m", "zerolm", *render, "--", *flags)
            assert done.returncode == 0, done.stderr
            self.job = self.slurm.submit(script, f"--output={self.log}")
            return
        train = ["train", "--hostfile", self.cluster.hostfile(), *flags]
        command = [PYTHON, "-m", "zerolm", "supervise", "--", "zerolm", *map(str, train)]
        with self.log.open("a") as log:
            more = {"DS_ENV_FILE": str(self.directory / ".deepspeed_env")}
            self.process = self.cluster.start("node1", command, more, stdout=log, stderr=log)

    def _wait_for_end(self) -> str:
        if self.drawn.mode == SSH:
            return str(self.process.wait(timeout=TRIAL_SECONDS))
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY")

        def is_over() -> bool:
            state = self.slurm.state(self.job)
            if state == "PENDING":  # Slurm lets a requeued job wait for two minutes
                with contextlib.suppress(AssertionError):
                    self.slurm.command("scontrol", "update", f"jobid={self.job}", "starttime=now")
            return state in ended

        self.wait(is_over, "the job to end")
        return self.slurm.state(self.job)

    def _step(self) -> int:
        if self.drawn.mode == SSH:
            assert self.process.poll() is None or self._failed(), self._output()
        with contextlib.suppress(OSError, IndexError):
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        return 0

    def _failed(self) -> Sequence[dict[str, Any]]:
        with contextlib.suppress(OSError):
            return events(self.run_dir, "attempt_failed")
        return []

    def _left(self) -> list[int]:
        deadline = time.monotonic() + 15
        while left := [
            pid for name in self.cluster.names
            for pid in self.cluster.pids(name, "--run_dir", str(self.run_dir))
        ]:  # fmt: skip
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        return left

    def _output(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + TRIAL_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self._output()}"
            time.sleep(0.1)
