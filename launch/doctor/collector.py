"""The doctor's process on each host: answers requests about that host, one JSON line per request.

It is started over ssh with the same directory, interpreter and environment as a rank. The only file
it writes is the one that shows whether the hosts share the run directory.
"""

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from launch.command.hosts import VISIBLE_DEVICES
from zerolm.common import machine
from zerolm.common.errors import ConfigError
from zerolm.common.files import sha256_file
from zerolm.common.provenance import git_commit, versions
from zerolm.common.shipped import ROOT, find_config, module_command
from zerolm.config.settings import Settings
from zerolm.data.sources import open_sources
from zerolm.distributed.device import local_device
from zerolm.ds_config import host as ds_host
from zerolm.ds_config.profile import Profile
from zerolm.engine.operators import installed
from zerolm.model.model import Model
from zerolm.parts.parse import parse_settings
from zerolm.preflight import host
from zerolm.shards.reader import Source, verify
from zerolm.shards.table import column

MARK = "@zerolm "  # prefix of each answer, since a login shell may print other lines
CODE_PATTERNS = ("pretrain.py", "zerolm/**/*.py", "launch/**/*.py")
SAMPLE_BLOCKS, SAMPLE_BLOCK_BYTES = 64, 1 << 20
BUSY_SHARE = 0.05  # a device is busy if more than this share of its memory is in use
COMMAND_SECONDS = 20.0
CONNECT_SECONDS = 5.0
_LISTENERS: list[socket.socket] = []


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer the request on each line of `requests`; report an exception as an `error` answer."""
    machine.keep_operators(os.environ)  # use the same operator directory as the ranks
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"answer": ANSWERS[request.pop("ask")](**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(MARK + json.dumps(answer) + "\n")
        answers.flush()


# -------------------------------------------------------------------------------------------------
# Facts about this host


def facts(flags: list[str], deep: bool, port: int) -> dict[str, Any]:
    """Return the facts that the doctor compares.

    Their key `problems` lists the problems found while collecting them.

    Args:
        flags: flags of pretrain.py; if empty, only facts that do not depend on a run are collected.
        deep: whether to read all shards completely and verify their checksums.
        port: port on which rank 0 would listen.
    """
    settings, problems = parse_settings(flags)
    found_devices = devices(problems)
    problems += build_problems(settings, found_devices["kind"])
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "commit": git_commit(ROOT),
        "code": {str(path.relative_to(ROOT)): _sha256(path) for path in _code_files()},
        "configs": _configs(settings),
        "data": data(settings, deep),
        "devices": found_devices,
        "disk": disk(settings),
        "shared_memory": host.shared_memory(),
        "port": host.port_problem(port),
        "operators": operators(),
        "addresses": addresses(),
        "free_port": machine.free_port(),
        "problems": problems,
    }


def devices(problems: list[str]) -> dict[str, Any]:
    """Return {kind, name, count, ranks, busy: one line per device that another process is using}.

    `ranks` is what DeepSpeed's launcher starts without flags: on CPUs, one per NUMA node. It counts
    without CUDA_VISIBLE_DEVICES, and sets that for each rank.
    """
    import deepspeed.accelerator  # even without a GPU, to check that the import succeeds

    visible = os.environ.pop(VISIBLE_DEVICES, None)
    ranks = deepspeed.accelerator.get_accelerator().device_count()
    os.environ.update({} if visible is None else {VISIBLE_DEVICES: visible})
    device = local_device({**os.environ, "LOCAL_RANK": "0"}, problems)
    if not device.is_gpu:
        count, busy = len(os.sched_getaffinity(0)), list[str]()
    else:
        count, busy = ranks, _busy_devices()
    found = {"kind": device.kind, "name": device.name, "count": count}
    return found | {"ranks": ranks, "busy": busy}


def _busy_devices() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader"]
    visible = os.environ.get(VISIBLE_DEVICES)
    busy = []
    for line in _output(query + ([f"--id={visible}"] if visible else [])).splitlines():
        with contextlib.suppress(ValueError):
            index, used, total = line.replace("MiB", "").split(",")
            if int(used) > BUSY_SHARE * int(total):
                busy.append(f"device {index}: {int(used)} of {int(total)} MiB are in use")
    return busy


def data(settings: Settings, deep: bool) -> dict[str, Any]:
    """Return {problems, sources: {directory: {fingerprint, shards, bytes, seconds}}}.

    `shards` are the checksums of a sample of the data, `bytes` is the sample's size, and `seconds`
    is the time spent reading it. Reads bypass the page cache, so `seconds` measures the storage.
    """
    problems: list[str] = []
    opened = open_sources(settings, problems)
    found: dict[str, Any] = {"problems": problems, "sources": {}}
    for source in [*opened.training, *opened.validation]:
        if wrong := source.files.size_problems():
            problems += wrong
            continue
        shards, size, seconds = read_sample(source)
        entry = {"fingerprint": source.fingerprint, "shards": shards, "bytes": size}
        found["sources"][str(source.directory)] = {**entry, "seconds": seconds}
        if deep:
            try:
                verify(source.directory)
            except ConfigError as error:
                problems += error.problems
    return found


def read_sample(source: Source) -> tuple[dict[str, str], int, float]:
    """Return ({shard: checksum of its sampled blocks}, bytes read, seconds spent reading).

    The blocks are evenly spaced; the first block of each shard is always included.
    """
    shards, checksums = source.shards, {}
    total = int(column(shards, "size_bytes").sum())
    step = max(SAMPLE_BLOCK_BYTES, total // SAMPLE_BLOCKS)
    size, seconds = 0, 0.0
    for shard in shards:
        digest, position = hashlib.sha256(), 0
        if not source.is_remote:
            with open(source.directory / shard["file"], "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while position < shard["size_bytes"]:
            end = min(position + SAMPLE_BLOCK_BYTES, shard["size_bytes"])
            start = time.perf_counter()
            block = source.files.read_bytes(shard["file"], position, end)
            seconds += time.perf_counter() - start
            digest.update(block)
            size += len(block)
            position += step
        checksums[shard["file"]] = digest.hexdigest()[:16]
    return checksums, size, seconds


def disk(settings: Settings) -> dict[str, Any]:
    """Return facts about the disk of the run directory; {} if no run directory is given.

    `problem` says why the directory is not writable, `free` is the free space in bytes, and
    `checkpoints` is the number of checkpoints that must fit.
    """
    if settings.run_dir is None:
        return {}
    free, checkpoints = host.checkpoint_room(settings.run_dir, 1, settings.checkpoint_keep)
    return {
        "problem": machine.write_problem(settings.run_dir),
        "free": free,
        "checkpoints": checkpoints,
    }


def operators() -> dict[str, Any]:
    """Return {built: DeepSpeed operators already compiled, missing: missing build tools}."""
    built = {path.stem for path in machine.built_operators(os.environ)} | installed()
    return {"built": sorted(built), "missing": machine.missing_compilers("cpu")}


def build_problems(settings: Settings, device_kind: str) -> list[str]:
    """Return the problems that preflight would find with the configs and compilers on this host."""
    problems = []
    try:
        if settings.model_config is not None:
            Model.load(settings.model_config)
    except ConfigError as error:
        problems += error.problems
    if settings.compile and (why := machine.compile_problem(device_kind)):
        problems.append(f"{settings.where('compile')}: true, but {why}. Install it, or remove it.")
    if settings.deepspeed_config is None:
        return problems
    try:
        profile = Profile.read(settings.deepspeed_config)
    except ConfigError as error:
        return [*problems, *error.problems]
    profile = ds_host.with_nvme_path(profile, settings, problems)
    problems += ds_host.nvme_problems(profile)
    return problems + ds_host.kernel_problems(profile, device_kind)


def addresses() -> list[str]:
    """Return this host's addresses in the order of `hostname -I`; DeepSpeed uses the first."""
    return _output(["hostname", "-I"]).split()


def _configs(settings: Settings) -> dict[str, str | None]:
    paths = (settings.model_config, settings.deepspeed_config, settings.settings)
    return {path: _sha256(find_config(path)) for path in paths if path is not None}


def _code_files() -> list[Path]:
    return sorted(path for pattern in CODE_PATTERNS for path in ROOT.glob(pattern))


def _sha256(path: Path) -> str | None:
    try:
        return sha256_file(path)
    except OSError:
        return None


def _output(command: list[str]) -> str:
    """Return the standard output of a command, or "" if it fails."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


# -------------------------------------------------------------------------------------------------
# Checks that involve all hosts


def token(run_dir: str, name: str, do: str) -> bool:
    """Write or remove a file in the run directory, and return whether it exists afterwards.

    If the run directory does not exist, its nearest existing parent is used. Any other value of
    `do` than "write" and "remove" only checks for the file.
    """
    path = Path(run_dir).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    path = path / name
    if do == "write":
        path.write_text(name)
    if do == "remove":
        path.unlink(missing_ok=True)
    return path.exists() and path.read_text() == name


def listen(port: int, stop: bool = False) -> int:
    """Listen on a port until the next call, and return the port.

    Args:
        port: port to listen on; 0 selects a free port.
        stop: stop listening instead.
    """
    while _LISTENERS:
        _LISTENERS.pop().close()
    if not stop:
        _LISTENERS.append(socket.create_server(("", port), backlog=1024))
        port = _LISTENERS[0].getsockname()[1]
    return port


def connect(places: list[tuple[str, int]]) -> list[str]:
    """Connect to each (address, port); return an error message, or "" for success, for each."""

    def problem(place: tuple[str, int]) -> str:
        try:
            socket.create_connection(place, CONNECT_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(max(1, len(places))) as pool:
        return list(pool.map(problem, map(tuple, places)))


def network(
    hosts: list[int], number: int, address: str, port: int, seconds: float
) -> list[dict[str, Any]]:
    """Run `network_rank` for each rank of this host; return each rank's result or {error: message}.

    Args:
        hosts: number of ranks on each host.
        number: index of this host in `hosts`.
        address, port: where rank 0 listens.
        seconds: time limit.
    """
    command = module_command(
        "launch.doctor.network_rank", "--address", address, "--port", port,
        "--hosts", ",".join(map(str, hosts)), "--seconds", seconds,
    )  # fmt: skip
    first, ranks = sum(hosts[:number]), hosts[number]
    workers = [
        subprocess.Popen(
            [*command, "--rank", str(first + local), "--local_rank", str(local)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for local in range(ranks)
    ]  # fmt: skip
    deadline = time.monotonic() + seconds
    results: list[dict[str, Any]] = []
    for worker in workers:
        try:
            out, errors = worker.communicate(timeout=max(1.0, deadline - time.monotonic()))
            results.append(json.loads(out.splitlines()[-1]))
        except (ValueError, IndexError):
            results.append({"error": (errors.strip() or "no output").splitlines()[-1]})
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.communicate()
            results.append({"error": f"not finished after {seconds:.0f} s"})
    return results


ANSWERS: dict[str, Any] = {
    "clock": time.time,
    "facts": facts,
    "token": token,
    "listen": listen,
    "connect": connect,
    "network": network,
}
