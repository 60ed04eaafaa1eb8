"""The doctor's part on each host: answers questions about this machine, a JSON line for each.

It runs over ssh where a rank would run, in the same directory, with the same interpreter and the
environment that DeepSpeed would hand on. It looks, and writes nothing but the token that shows
whether the hosts share the run directory.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, TextIO

from zerolm import machine, resources
from zerolm.errors import ConfigError
from zerolm.flags import parse_settings
from zerolm.provenance import git_commit, versions
from zerolm.settings import Settings
from zerolm.shards import Source, verify
from zerolm.sources import open_sources

ROOT = Path(__file__).parent.parent
MARK = "@zerolm "  # before each answer: a login shell may print lines of its own
CODE = ("pretrain.py", "zerolm/*.py", "launch/*.py")
SAMPLE_BLOCKS, SAMPLE_BLOCK_BYTES = 64, 1 << 20
BUSY_SHARE = 0.05  # of a device's memory, in use by somebody else
COMMAND_SECONDS = 20.0


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answer each line until there are no more. An error of ours is an answer too."""
    for line in questions:
        question = json.loads(line)
        try:
            answer = {"answer": ANSWERS[question.pop("ask")](**question)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(MARK + json.dumps(answer) + "\n")
        answers.flush()


# -------------------------------------------------------------------------------------------------
# The facts


def facts(flags: list[str], deep: bool, port: int) -> dict[str, Any]:
    """Return what the doctor compares. What could not be found out is in `problems`.

    Args:
        flags: of pretrain.py; empty: nothing is asked about a run.
        deep: read every byte of the shards and check it against their manifests.
        port: on which rank 0 would listen.
    """
    settings, problems = parse_settings(flags)
    device = devices(problems)
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "commit": git_commit(ROOT),
        "code": {str(path.relative_to(ROOT)): _sha256(path) for path in _code_files()},
        "configs": _configs(settings),
        "data": data(settings, deep),
        "devices": device,
        "disk": disk(settings),
        "shared_memory": resources.shared_memory(),
        "port": resources.port_problem(port),
        "locks": [[str(lock) for lock in locks] for locks in machine.build_locks(os.environ)],
        "operators": operators(),
        "addresses": addresses(),
        "free_port": _free_port(),
        "problems": problems,
    }


def devices(problems: list[str]) -> dict[str, Any]:
    """Return {kind, count, busy: a line for each device that somebody else uses}."""
    import deepspeed.accelerator  # also shows whether it can be imported at all

    found = machine.local_device({**os.environ, "LOCAL_RANK": "0"}, problems)
    if not found.is_gpu:
        return {"kind": "cpu", "count": len(os.sched_getaffinity(0)), "busy": []}
    count = deepspeed.accelerator.get_accelerator().device_count()
    return {"kind": found.kind, "count": count, "busy": _busy_devices()}


def _busy_devices() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader"]
    said = _output(query + ["--id=" + os.environ["CUDA_VISIBLE_DEVICES"]]
                   if os.environ.get("CUDA_VISIBLE_DEVICES") else query)  # fmt: skip
    busy = []
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            index, used, total = line.replace("MiB", "").split(",")
            if int(used) > BUSY_SHARE * int(total):
                busy.append(f"device {index}: {int(used)} of {int(total)} MiB are in use")
    return busy


def data(settings: Settings, deep: bool) -> dict[str, Any]:
    """Return what the sources are like from here, and what is wrong with them.

    Of each shard there is a checksum over blocks of it; the time of reading them, from the storage
    and not from memory, gives the speed.
    """
    problems: list[str] = []
    opened = open_sources(settings, problems)
    found: dict[str, Any] = {"problems": problems, "sources": {}}
    for source in [*opened.training, *opened.validation]:
        shards, size, seconds = sample_of(source)
        entry = {"fingerprint": source.fingerprint, "shards": shards, "bytes": size}
        found["sources"][str(source.directory)] = {**entry, "seconds": seconds}
        if deep:
            try:
                verify(source.directory)
            except ConfigError as error:
                problems += error.problems
    return found


def sample_of(source: Source) -> tuple[dict[str, str], int, float]:
    """Return (checksum of blocks of each shard, bytes read in all, seconds of reading them).

    Blocks stand at equal distances over all shards, and one at least at the start of each.
    """
    shards, found = source.manifest["shards"], {}
    total = sum(shard["size_bytes"] for shard in shards)
    step = max(SAMPLE_BLOCK_BYTES, total // SAMPLE_BLOCKS)
    size, seconds = 0, 0.0
    for shard in shards:
        digest, position = hashlib.sha256(), 0
        if not source.is_remote:
            with open(source.directory / shard["file"], "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while position < shard["size_bytes"]:
            end = min(position + SAMPLE_BLOCK_BYTES, shard["size_bytes"])
            began = time.perf_counter()
            block = source.files.bytes_of(shard["file"], position, end)
            seconds += time.perf_counter() - began
            digest.update(block)
            size += len(block)
            position += step
        found[shard["file"]] = digest.hexdigest()[:16]
    return found, size, seconds


def disk(settings: Settings) -> dict[str, Any]:
    """Return how the run directory is seen from here; empty without one."""
    if settings.run_dir is None:
        return {}
    free, checkpoints = resources.checkpoint_room(settings.run_dir, 1, settings.checkpoint_keep)
    return {
        "problem": machine.unwritable(settings.run_dir),
        "free": free,
        "checkpoints": checkpoints,
    }


def operators() -> dict[str, Any]:
    """Return {built: DeepSpeed's operators that are, missing: what building others needs}."""
    from deepspeed.git_version_info import installed_ops

    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()
    built = {path.stem for path in [*cache.glob("*/*.so"), *cache.glob("*/*/*.so")]}
    built |= {name for name, installed in installed_ops.items() if installed}
    missing = []
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        missing.append("a C++ compiler (apt-get install g++)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h (apt-get install python3-dev)")
    return {"built": sorted(built), "missing": missing}


def addresses() -> list[str]:
    """Return the addresses of this host, as DeepSpeed asks for them."""
    return _output(["hostname", "-I"]).split()


def _configs(settings: Settings) -> dict[str, str | None]:
    named = (settings.model_config, settings.deepspeed_config, settings.settings)
    return {path: _sha256(Path(path)) for path in named if path is not None}


def _code_files() -> list[Path]:
    return sorted(path for pattern in CODE for path in ROOT.glob(pattern))


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _output(words: list[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# -------------------------------------------------------------------------------------------------
# What all hosts do together


def token(run_dir: str, name: str, do: str) -> bool:
    """Write, see or remove a file of the run directory, or of its nearest parent that exists."""
    path = Path(run_dir).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    path = path / name
    if do == "write":
        path.write_text(name)
    if do == "remove":
        path.unlink(missing_ok=True)
    return path.exists() and path.read_text() == name


def all_reduce(
    ranks: int, first: int, world: int, address: str, port: int, seconds: float
) -> list[dict[str, Any]]:
    """Run this host's ranks of an all-reduce over all hosts; return what each of them says."""
    words = [sys.executable, "-m", "launch.all_reduce", "--world", str(world)]
    words += ["--address", address, "--port", str(port), "--seconds", str(seconds)]
    workers = [
        subprocess.Popen(
            [*words, "--rank", str(first + local), "--local_rank", str(local)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for local in range(ranks)
    ]  # fmt: skip
    deadline = time.monotonic() + seconds
    said: list[dict[str, Any]] = []
    for worker in workers:
        try:
            out, errors = worker.communicate(timeout=max(1.0, deadline - time.monotonic()))
            said.append(json.loads(out.splitlines()[-1]))
        except (ValueError, IndexError):
            said.append({"error": (errors.strip() or "it said nothing").splitlines()[-1]})
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
            said.append({"error": f"no end in {seconds:.0f} s"})
    return said


ANSWERS: dict[str, Any] = {
    "clock": time.time,
    "facts": facts,
    "token": token,
    "all_reduce": all_reduce,
}
