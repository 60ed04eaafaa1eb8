"""For tests with real processes: a tiny model, small shards, and ways to start `pretrain.py`."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from tests import ROOT
from tests.fork_server import ForkedRanks
from zerolm.common.process_tree import RUNNER
from zerolm.common.shipped import module_command
from zerolm.shards.writer import ShardWriter

VOCABULARY, EOS = 512, 0
LAUNCH_SECONDS = 240
SIBLING_SECONDS = 10.0  # time for the other ranks to end by themselves after one has failed

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_shards(
    directory: Path, num_documents: int = 400, seed: int = 0, shard_tokens: int = 8192
) -> Path:
    """Write a shard directory of documents that a small model can learn: noisy counting."""
    generator = np.random.default_rng(seed)
    tokenizer = {"name": "test", "fingerprint": "test", "files": []}
    with ShardWriter(
        directory,
        vocab_size=VOCABULARY,
        eos_id=EOS,
        tokenizer=tokenizer,
        shard_tokens=shard_tokens,
    ) as writer:
        for _ in range(num_documents):
            length = int(generator.integers(20, 120))
            start, stride = generator.integers(1, 400, 2)
            ids = 1 + (start + (stride % 7 + 1) * np.arange(length)) % (VOCABULARY - 1)
            noise = generator.random(length) < 0.1
            ids[noise] = generator.integers(1, VOCABULARY, noise.sum())
            writer.add(np.append(ids, EOS))
    return directory


@contextlib.contextmanager
def one_rank(store: Path) -> Iterator[None]:
    """Make this process a process group of its own, unless it has one; `store` is a new file."""
    from torch import distributed

    if distributed.is_initialized():
        yield
        return
    shared = distributed.FileStore(str(store), 1)
    distributed.init_process_group("gloo", store=shared, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    defaults = {
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",  # tests of trackers use --wandb
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
        # ranks of a test communicate within this machine only
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {**os.environ, **defaults, **more}


def command(num_ranks: int, *arguments: object, launcher: tuple[str, ...] = ()) -> list[str]:
    """Return the argv of `deepspeed --num_gpus N pretrain.py ...`, as zerolm starts it."""
    argv = module_command(RUNNER, "--num_gpus", num_ranks, "--master_port", free_port())
    argv += [*launcher, str(ROOT / "pretrain.py")]
    return argv + [str(argument) for argument in arguments]


def start(num_ranks: int, log: Path, *arguments: object, **more: str) -> subprocess.Popen[bytes]:
    """Start `pretrain.py` under `deepspeed` in a session of its own, with its output in a file."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command(num_ranks, *arguments), env=environment(**more), stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def launch(
    num_ranks: int, *arguments: object, timeout: float = LAUNCH_SECONDS, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `pretrain.py` under `deepspeed` until it ends, in a session of its own.

    On a timeout every process of that session is killed, so that no rank outlives its test.

    Args:
        more: additional environment variables.
    """
    process = subprocess.Popen(
        command(num_ranks, *arguments),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {timeout} s:\n{output[-6000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def run_ranks(
    num_ranks: int, *arguments: object, timeout: float = LAUNCH_SECONDS, **more: str
) -> subprocess.CompletedProcess[str]:
    """Do as `launch`, but without the launcher and without importing torch for each rank.

    Returns the code of the first rank that failed. The others end by themselves when their process
    group breaks, or are killed.
    """
    reader, writer = os.pipe()
    with open(reader, errors="replace") as output:
        with open(writer, "w") as shared:
            ranks = start_ranks(num_ranks, shared, *arguments, **more)
        deadline = time.monotonic() + timeout
        killer = threading.Timer(timeout, kill_session, [ranks.session])
        killer.start()
        content = output.read()  # until the last process that writes to it has ended
        killer.cancel()
    late = time.monotonic() > deadline
    codes = None if late else ranks.codes(deadline - time.monotonic())
    assert codes is not None, f"not finished after {timeout} s:\n{content[-6000:]}"
    code = next((code for _, code in codes if code), 0) % 256
    return subprocess.CompletedProcess(arguments, code, content, "")


def start_ranks(num_ranks: int, output: IO, *arguments: object, **more: str) -> ForkedRanks:
    """Do as `run_ranks`, but do not wait."""
    more |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": str(num_ranks)}
    argv = ["--local_rank={rank}", *map(str, arguments)]
    return _forked(ROOT / "pretrain.py", argv, [output] * num_ranks, SIBLING_SECONDS, more)


def run_workers(
    num_ranks: int, script: Path, *arguments: object, timeout: float = 300, **more: str
) -> str:
    """Run a script other than pretrain.py, once for each rank; return the output of rank 0."""
    more["LOCAL_WORLD_SIZE"] = str(num_ranks)
    logs = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(num_ranks)]
    # A rank that dies leaves the others waiting for it: its own output is what counts.
    ranks = _forked(script, [*map(str, arguments)], logs, 0.0, more)
    try:
        codes = ranks.codes(timeout)
        assert codes is not None, f"not finished after {timeout} s:\n{_ends(logs)}"
        failed = {rank: code for rank, code in codes if code}
        assert not failed, f"exit codes by rank: {failed}\n{_ends(logs)}"
        return _end(logs[0], None)
    finally:
        kill_session(ranks.session)
        for log in logs:
            log.close()


def _forked(
    script: Path, argv: list[str], outputs: list[Any], sibling_seconds: float, more: dict[str, str]
) -> ForkedRanks:
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    more["WORLD_SIZE"] = str(len(outputs))
    pairs = [(output, output) for output in outputs]
    return ForkedRanks(script, argv, _forked_environment(more), pairs, sibling_seconds)


def _forked_environment(more: dict[str, str]) -> dict[str, str]:
    """Name the accelerator that DeepSpeed would find, so that all launches share one server."""
    no_gpu = not Path("/dev/nvidiactl").exists()
    return environment(**({"DS_ACCELERATOR": "cpu"} if no_gpu else {}) | more)


def run_module(
    name: str, *arguments: object, timeout: float = 300, **more: str
) -> subprocess.CompletedProcess[str]:
    """Do as `python -m NAME ...`, without importing torch for it."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        argv = [str(argument) for argument in arguments]
        variables = _forked_environment(more)
        process = ForkedRanks(name, argv, variables, [(output, errors)], 0.0)
        try:
            codes = process.codes(timeout)
            texts = [_end(output, None), _end(errors, None)]
            assert codes is not None, f"not finished after {timeout} s: {texts}"
            return subprocess.CompletedProcess([name, *argv], codes[0][1], *texts)
        finally:
            kill_session(process.session)


def run_here(
    main: Callable[[list[str]], int], *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Do as `run_module` in this process, given the module's `main`."""
    argv = [str(argument) for argument in arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(argv)
    return subprocess.CompletedProcess(argv, code, output.getvalue(), errors.getvalue())


def _ends(logs: list[Any]) -> str:
    return "\n".join(f"rank {rank}: {_end(log, 4000)}" for rank, log in enumerate(logs))


def _end(log: Any, characters: int | None) -> str:
    log.seek(0)
    return log.read()[-characters if characters else 0 :]


def session_members(session: int) -> list[int]:
    """Return the process IDs of a session; the ranks of a launch stay in the session of it."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                members.append(int(entry.name))
    return members


def kill_session(session: int) -> None:
    for pid in session_members(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def rows(run_dir: Path, key: str) -> dict[int, Any]:
    """Return {step: value} of one metric of a run; fail if a step was logged twice."""
    values: dict[int, Any] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if key in row:
            assert row["step"] not in values, f"{key} of step {row['step']} was logged twice"
            values[row["step"]] = row[key]
    return values


def events(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a run, or those of a kind."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if kind in (None, event["event"])]
