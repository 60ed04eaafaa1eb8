"""Fork ranks from one process that has imported torch, DeepSpeed and transformers.

Importing them takes most of a short run. A pytest process starts the server once, with the
environment in which it imports. For each launch the server forks a starter, the leader of a new
session, which forks the ranks and waits for them as DeepSpeed's node launcher does. A rank has its
own arguments, environment, output, working directory and modules of this project: it forgets those
with which the server forks as `zerolm.train.node_launcher` does.

Starter and ranks are killed when their parent ends, and the server ends with its pytest process.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests import ROOT
from zerolm.common.forked import end_with, touched
from zerolm.engine.operators import COMMUNICATION, OPTIMIZER, load_built

MODULES = (
    "torch", "deepspeed", "deepspeed.runtime.zero.muon.original_muon", "transformers",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
    "torch._dynamo", "torch.utils.cpp_extension", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer", "orjson", "xxhash",
)  # fmt: skip
# Variables that are read when they are used, by this project or by what the server does not import,
# and those that libraries set in the pytest process. A launch with another value of any other
# variable has a server of its own.
READ_LATE = (
    "AWS_", "CROSS_", "FAULT", "HF_XET_", "KMP_", "LOCAL_", "MASTER_", "PYTEST_", "PYTORCH_NVML_",
    "RANK", "RAYON_", "TERM", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_", "WANDB_",
    "WORLD_SIZE", "ZEROLM_",
)  # fmt: skip
OWN = ("tests", "zerolm")
MOST_SERVERS = 3
MESSAGE_BYTES = 1 << 20


# ---- In the pytest process

_servers: dict[tuple, "ForkServer"] = {}


class ForkServer:
    """A server process, and the channel for requests to it."""

    def __init__(self, environment: Mapping[str, str]):
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.fork_server", str(other.fileno())], cwd=ROOT,
                env=environment, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


def server_for(environment: Mapping[str, str]) -> ForkServer:
    """Return the server that has imported in this environment; start it if there is none."""
    key = tuple(sorted(item for item in environment.items() if not item[0].startswith(READ_LATE)))
    if not _servers:
        atexit.register(lambda: [server.close() for server in _servers.values()])
    server = _servers.pop(key, None)
    if server is None or server.process.poll() is not None:
        while len(_servers) >= MOST_SERVERS:
            _servers.pop(next(iter(_servers))).close()  # that was used longest ago
        server = ForkServer(environment)
    _servers[key] = server
    return server


class ForkedRanks:
    """The ranks of one launch."""

    def __init__(
        self,
        script: Path | str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: Sequence[tuple[IO, IO]],
        sibling_seconds: float,
    ):
        """Start a rank for each pair of files, which get its output and its errors.

        Args:
            script: an absolute path, or the name of a module.
            arguments: `{rank}` in them is replaced by the number of the rank.
            environment: without the variables that number the ranks.
            sibling_seconds: time for the other ranks to end by themselves after one has failed.
        """
        self._status, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "script": str(script), "arguments": arguments, "directory": str(Path.cwd()),
            "environment": dict(environment), "sibling_seconds": sibling_seconds,
        }  # fmt: skip
        descriptors = [other.fileno(), *(each.fileno() for pair in outputs for each in pair)]
        server = server_for(environment)
        with other:
            socket.send_fds(server.channel, [json.dumps(request).encode()], descriptors)
        self.session = self._receive()
        assert self.session, "the server of tests/fork_server.py has ended: see its messages above"

    def _receive(self) -> Any:
        message = self._status.recv(MESSAGE_BYTES)
        return json.loads(message) if message else None

    def codes(self, timeout: float) -> list[tuple[int, int]] | None:
        """Wait for (rank, exit code) in the order in which they ended; None on a timeout."""
        if not select.select([self._status], [], [], max(0.0, timeout))[0]:
            return None
        codes = self._receive()
        self._status.close()
        return codes if codes is not None else [(0, -signal.SIGKILL)]  # the starter was killed


# ---- In the server


def collect(number: int, frame: object) -> None:
    """Collect the starters that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(channel: socket.socket) -> dict | None:
    """Fork for each request; return the launch in a rank, None in the server when it ends."""
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, MESSAGE_BYTES, 64)
        if not message:
            return None
        server = os.getpid()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            end_with(server)
            return start_ranks(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def start_ranks(launch: dict, status: int, *outputs: int) -> dict:
    """Fork the ranks and report their exit codes; return, in a rank only, what it shall run."""
    os.setsid()
    starter = os.getpid()
    os.write(status, json.dumps(starter).encode())
    ranks: dict[int, int] = {}
    for rank, (output, errors) in enumerate(zip(outputs[::2], outputs[1::2], strict=True)):
        if (pid := os.fork()) == 0:
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for descriptor in (status, *outputs):
                os.close(descriptor)
            end_with(starter)
            return {**launch, "rank": rank}
        ranks[pid] = rank
    for descriptor in outputs:
        os.close(descriptor)
    os.write(status, json.dumps(wait(ranks, launch["sibling_seconds"])).encode())
    os._exit(0)


def wait(ranks: dict[int, int], sibling_seconds: float) -> list[tuple[int, int]]:
    """Return each rank with its exit code, in the order in which they ended.

    After one has failed, the others have `sibling_seconds` to end by themselves.
    """
    ended: list[tuple[int, int]] = []
    running, deadline = dict(ranks), float("inf")
    while running:
        for pid in list(running):
            found, state = os.waitpid(pid, os.WNOHANG)
            if found:
                ended.append((running.pop(pid), os.waitstatus_to_exitcode(state)))
                if ended[-1][1]:
                    deadline = min(deadline, time.monotonic() + sibling_seconds)
            elif time.monotonic() >= deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return ended


# ---- In a rank


def run(launch: dict, set_by_imports: dict[str, str]) -> NoReturn:
    """Run the script or module of a launch as a new Python process would."""
    rank, script = str(launch["rank"]), launch["script"]
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    atexit.register(gc.unfreeze)  # else triton 3.9 prints what was frozen as leaked at exit
    os.environ.clear()
    os.environ.update(launch["environment"] | set_by_imports)
    if "WORLD_SIZE" in os.environ:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
    os.chdir(launch["directory"])
    sys.argv = [script, *(word.replace("{rank}", rank) for word in launch["arguments"])]
    if Path(script).is_absolute():
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        sys.path.insert(0, launch["directory"])
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    sys.exit(0)


def main(descriptor: str) -> None:
    channel = socket.socket(fileno=int(descriptor))
    sys.path.remove(str(ROOT))  # each rank has its own
    before = dict(os.environ)
    for name in MODULES:
        importlib.import_module(name)
    load_built((COMMUNICATION, OPTIMIZER), os.environ)
    set_by_imports = {key: text for key, text in os.environ.items() if before.get(key) != text}
    assert not touched(), touched()
    gc.collect()
    gc.freeze()  # so that ranks share the memory of these modules
    signal.signal(signal.SIGCHLD, collect)
    launch = serve(channel)
    if launch is None:
        os._exit(0)
    run(launch, set_by_imports)


if __name__ == "__main__":
    main(sys.argv[1])
