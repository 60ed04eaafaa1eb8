"""Runs the trial of each family in a pair of rank processes, and collects the outcomes.

The ranks are forked from this process, which has imported everything: a pair starts in a second. If
one crashes or exceeds the time limit, the pair ends with the phase that it was in, and another pair
tries the phases that remain. What a phase wrote is kept: a sweep that is started again does the
rest.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.launching import environment, free_port, write_json
from tests.model_families import trial
from tests.model_families.table import PHASES
from tests.model_families.toy_configs import EOS, FIRST_TEXT_TOKEN, VOCABULARY
from zerolm.shards.writer import ShardWriter

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
PHASE_SECONDS = 240  # many times what a phase takes on a free machine
Job = tuple[str, str]


def sweep(families: Sequence[str], directory: Path, phases: Sequence[str] = PHASES) -> None:
    """Try families; the results are files in the directory, see `outcomes`."""
    shards = directory / "shards"
    if not (shards / "manifest.json").is_file():
        write_shards(shards)
    ShareMemCommBuilder().load()  # once: each load takes seconds
    gc.freeze()  # DeepSpeed collects garbage in each rank; what was imported is none
    for family in families:
        (directory / family).mkdir(exist_ok=True)
        while jobs := [(family, phase) for phase in phases if is_open(directory, family, phase)]:
            run_pair(directory, jobs)


def is_open(directory: Path, family: str, phase: str) -> bool:
    """Return whether a phase has no result yet."""
    if phase != "check" and list((directory / family).glob("check.error*.json")):
        return False
    parts = [directory / family / f"{phase}.{rank}.json" for rank in (0, 1)]
    errors = list((directory / family).glob(f"{phase}.error*.json"))
    return not errors and not all(part.is_file() for part in parts)


def write_shards(directory: Path) -> None:
    """Write documents of 1 to 24 random tokens, none of them special, and the EOS id."""
    generator = np.random.default_rng(0)
    tokenizer = {"name": "test", "fingerprint": "test", "files": []}
    with ShardWriter(
        directory, vocab_size=VOCABULARY, eos_id=EOS, tokenizer=tokenizer, shard_tokens=8192
    ) as writer:
        for length in generator.integers(1, 25, 200):
            ids = generator.integers(FIRST_TEXT_TOKEN, VOCABULARY, length)
            writer.add(np.append(ids, EOS))


def run_pair(directory: Path, jobs: list[Job]) -> None:
    """Run jobs on two ranks until they are done, or one of them fails or takes too long."""
    current = directory / "current"
    current.write_text(" ".join(jobs[0]))
    port, context = free_port(), multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, port, directory, jobs)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    reason = ""
    while not reason and any(rank.is_alive() for rank in ranks):
        multiprocessing.connection.wait([rank.sentinel for rank in ranks], timeout=0.5)
        if time.time() - current.stat().st_mtime > PHASE_SECONDS:
            reason = f"not finished after {PHASE_SECONDS} s"
        elif any(rank.exitcode for rank in ranks):
            reason = f"exit codes {[rank.exitcode for rank in ranks]}"
            ranks[0].join(2), ranks[1].join(2)  # the other may have an error of its own to write
    for rank in ranks:
        if rank.is_alive():
            os.killpg(rank.pid or 0, signal.SIGKILL)
        rank.join()
    family, phase = current.read_text().split()
    if is_open(directory, family, phase):
        write_json(
            directory / family / f"{phase}.error.json",
            {"outcome": "hangs" if reason.startswith("not") else "crashes", "error": reason},
        )


def _rank(rank: int, port: int, directory: Path, jobs: list[Job]) -> None:
    os.setsid()
    log = os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= environment(
        RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_SIZE="2", WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    trial.main(directory, jobs)
