"""Short runs of pretrain.py for the checks, in new processes."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from benchmarks.contenders import argv, launcher, pretrain
from benchmarks.gpu.cases import ds_config, parse_options
from benchmarks.gpu.run_case import failure_reason
from tests.launching import free_port
from zerolm.common.process_tree import RUNNER
from zerolm.common.shipped import module_command
from zerolm.engine.launcher_options import FORK
from zerolm.shards.writer import ShardWriter

MODELS = {"160M": "model_configs/llama-160m.json", "toy": "model_configs/tiny.json"}
STEPS, SEQ_LEN, STEP_TOKENS = 6, 512, 1024
LEARNING_RATE = "--learning_rate 3e-4"


class Failed(Exception):
    """A check did not pass; the message gives the reason."""


class Runs:
    """Short runs of pretrain.py, in new processes.

    Attributes:
        model: a key of `MODELS` and of results/gpu_parity.json.
        losses: {name of a run: losses by step} for the runs so far.
        first_step_seconds: from the start of the last run to its first new step.
    """

    def __init__(self, toy: bool, scratch: Path, seconds: float):
        self.model, self.scratch, self.seconds = "toy" if toy else "160M", scratch, seconds
        self.losses: dict[str, list[float]] = {}
        self.first_step_seconds = 0.0
        self.compiled: set[str] = set()  # options whose kernels are in torch's cache
        write_documents(scratch / "shards", MODELS[self.model])

    def train(
        self,
        name: str,
        options: str = "",
        kill: bool = False,
        steps: int = STEPS,
        forks: bool = False,
    ) -> list[float]:
        """Train for some steps or until a SIGKILL; return the loss of each step.

        Args:
            kill: once the first checkpoint is complete.
            forks: zerolm's launcher forks the rank, in place of DeepSpeed's.

        Raises:
            Failed: the run ended otherwise, or took more than `seconds`; twice as long if it is the
                first with these options, whose kernels are compiled.
        """
        with self.started(name, options, steps, forks=forks) as (process, log):
            limit = self.seconds * (1 if options in self.compiled else 2)
            deadline = time.monotonic() + limit
            self.first_step_seconds = self.wait(process, log, "\nstep=", deadline)
            if kill:
                self.wait(process, self.scratch / name / "checkpoints/latest", "step", deadline)
            else:
                self.wait(process, log, None, deadline)
            self.compiled.add(options)
        if process.returncode != (-signal.SIGKILL if kill else 0):
            raise Failed(f"{name}: exit code {process.returncode}: {reason(log)}")
        lines = (self.scratch / name / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        by_step = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
        self.losses[name] = [by_step[step] for step in sorted(by_step)]
        return self.losses[name]

    @contextlib.contextmanager
    def started(
        self, name: str, options: str, steps: int, ranks: int = 1, forks: bool = False
    ) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
        """Start a run, and kill it in the end; yield its launcher and its log."""
        rate = "" if "--learning_rate" in options else LEARNING_RATE
        found = parse_options(f"{options} {rate}")
        profile = self.scratch / f"{name}.json"
        profile.write_text(json.dumps(ds_config("ds_configs/zero2.json", found)))
        batch = {"seq_len": SEQ_LEN, "micro_batch_size": 1, "log_interval": 1}
        model = {"model_config": MODELS[self.model], "deepspeed_config": profile}
        own = pretrain(
            STEP_TOKENS, steps, self.scratch / name, self.scratch / "shards",
            checkpoint_interval=steps // 2, **model, **batch,
        )  # fmt: skip
        start = launcher(ranks, port := free_port())
        if forks:
            flags = argv(num_gpus=ranks, master_port=port, rank_start=FORK)
            start = module_command(RUNNER, *flags)
        command = [*start, *own, *found.flags]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        log = self.scratch / f"{name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env={**environment, **found.environment},
            )  # fmt: skip
            try:
                yield process, log
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait(
        self, process: "subprocess.Popen[bytes]", file: Path, text: str | None, deadline: float
    ) -> float:
        """Wait until a file has a text, or the process ends; return the seconds."""
        start = time.monotonic()
        while process.poll() is None and not (text and file.exists() and text in file.read_text()):
            if time.monotonic() > deadline:
                found = file.read_text()[-300:] if file.exists() else "missing"
                raise Failed(f"no end in {time.monotonic() - start:.0f} s: {file.name}: {found}")
            time.sleep(0.1)
        return time.monotonic() - start


def reason(log: Path) -> str:
    """Return why a run ended, from its log."""
    return failure_reason([*log.read_text().splitlines(), ""], 0)


def write_documents(directory: Path, model_config: str) -> None:
    """Write documents of random lengths that a model can learn: noisy counting."""
    vocabulary = json.loads((ROOT / model_config).read_text())["vocab_size"]
    tokenizer = {"name": "numbers", "fingerprint": "numbers", "files": []}
    random = np.random.default_rng(0)
    with ShardWriter(directory, vocab_size=vocabulary, eos_id=0, tokenizer=tokenizer) as writer:
        for _ in range(400):
            start, stride = random.integers(1, vocabulary // 2), random.integers(1, 7)
            ids = 1 + (start + stride * np.arange(random.integers(20, 300))) % (vocabulary - 1)
            writer.add(np.append(ids, 0))
