"""Two hosts on one machine: network namespaces with an sshd each, for `deepspeed --hostfile`.

Each host has its own network, process IDs and host name, so its ranks reach those of the other only
through a network link (a veth pair) and shared files. Every process of a host is in its pid
namespace: the kernel ends them all when the first process is killed, and no other process can be
affected. Needs root, iproute2, openssh-server and pdsh.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.launching import ROOT, environment, free_port

PROGRAMS = ("ip", "sshd", "ssh", "ssh-keygen", "pdsh", "unshare")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
ADDRESSES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
DEVICE = "eth0"
SECONDS = 60
ISOLATED = ("unshare", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child")


def missing() -> str:
    """Return why this machine cannot have two hosts, '' if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if absent:
        return f"needs {', '.join(absent)} (iproute2, openssh-server, pdsh, util-linux)"
    probe = _namespace("probe")
    made = _ip("netns", "add", probe, check=False).returncode == 0
    _ip("netns", "del", probe, check=False)
    return "" if made else "no network namespaces here"


@dataclass
class Hosts:
    """Two running hosts.

    Attributes:
        namespaces: {host name: its network namespace}.
        directory: has the hostfile, keys and logs; commands run in it.
    """

    namespaces: dict[str, str]
    directory: Path

    def start(
        self, log: Path, *arguments: object, timeout: float = 600, **more: str
    ) -> subprocess.Popen[bytes]:
        """Start `deepspeed --hostfile ... pretrain.py ...` on node1, with one rank on each host."""
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh_check"]
        command += ["--hostfile", str(self.directory / "hostfile"), "--num_nodes", "2"]
        command += ["--master_addr", "node1", "--master_port", str(free_port())]
        command += [str(ROOT / "pretrain.py"), *map(str, arguments)]
        return self.start_command(log, command, timeout=timeout, **more)

    def start_command(
        self, log: Path, command: list[str], timeout: float = 600, **more: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on node1, with the environment that ssh to both hosts needs."""
        variables = environment(**more, GLOO_SOCKET_IFNAME=DEVICE)
        for_ranks = ("OMP_NUM_THREADS", "WANDB_MODE", "HF_HUB_OFFLINE", "TORCH_EXTENSIONS_DIR")
        names = [*for_ranks, "GLOO_SOCKET_IFNAME", *more]
        variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), SEARCH_PATH])
        lines = [f"{name}={variables[name]}\n" for name in names if name in variables]
        (self.directory / ".deepspeed_env").write_text("".join(lines))
        key = f"-i {self.directory / 'key'} -F /dev/null"
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        alive = "-o ServerAliveInterval=5 -o ServerAliveCountMax=3"
        variables |= {
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS_APPEND": f"{key} {known} {alive}",
            "DS_ENV_FILE": str(self.directory / ".deepspeed_env"),
        }
        return subprocess.Popen(
            [*_inside(self.namespaces["node1"]), "timeout", "--kill-after=5", str(timeout),
             *ISOLATED, *command],
            env=variables, cwd=self.directory, stdout=open(log, "wb"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def on_node1(self, command: list[str]) -> list[str]:
        """Return a command that runs `command` on node1 over ssh, with the same environment."""
        names = ("PDSH_RCMD_TYPE", "PDSH_SSH_ARGS_APPEND", "DS_ENV_FILE", "PYTHONPATH", "PATH")
        exports = "".join(f"export {name}='${name}'; " for name in names)
        ssh = (
            f'ssh $PDSH_SSH_ARGS_APPEND node1 "{exports}cd {self.directory}; {shlex.join(command)}"'
        )
        return ["sh", "-c", ssh]

    def run(self, log: Path, *arguments: object, timeout: float = 240, **more: str) -> int:
        """Run `pretrain.py` on both hosts until it ends; return the launcher's exit code."""
        process = self.start(log, *arguments, timeout=timeout, **more)
        try:
            return process.wait(timeout + 30)
        finally:
            self.end(process)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a launcher if it is still running, and all its processes on the hosts."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
        for pid in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ranks(self) -> list[int]:
        """Return the Python processes in both namespaces: launchers, ranks, and their children."""
        ranks = []
        for namespace in self.namespaces.values():
            for pid in _pids(namespace):
                with contextlib.suppress(OSError):
                    if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        ranks.append(pid)
        return ranks

    def set_link(self, host: str, up: bool) -> None:
        """Connect or disconnect a host's network."""
        _ip("-n", self.namespaces[host], "link", "set", DEVICE, "up" if up else "down")


@contextlib.contextmanager
def two_hosts(directory: Path, setup: Mapping[str, str] | None = None) -> Iterator[Hosts]:
    """Create both hosts, and remove them in any case.

    Args:
        setup: {host name: shell command}, run as root before the host's sshd starts; what it mounts
            is visible on that host only.
    """
    hosts = Hosts({name: _namespace(name) for name in ADDRESSES}, directory)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        _make_network(hosts)
        _make_keys(directory)
        lines = [f"{name} slots=1\n" for name in ADDRESSES]
        (directory / "hostfile").write_text("".join(lines))
        setup = setup or {}
        servers += [_start_host(hosts, name, setup.get(name, "true")) for name in ADDRESSES]
        _wait_for_ssh(hosts)
        yield hosts
    finally:
        for server in servers:
            server.kill()
            server.wait(SECONDS)
        for namespace in hosts.namespaces.values():
            for pid in _pids(namespace, check=False):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _ip("netns", "del", namespace, check=False)
            shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # unless another namespace has files in it


def _namespace(name: str) -> str:
    return f"zerolm-{os.getpid()}-{name}"


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *arguments], env={**os.environ, "PATH": SEARCH_PATH}, capture_output=True, text=True,
        timeout=SECONDS, check=check,
    )  # fmt: skip


def _pids(namespace: str, check: bool = True) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace, check=check).stdout.split()]


def _inside(namespace: str) -> list[str]:
    ip = shutil.which("ip", path=SEARCH_PATH)
    assert ip is not None
    return [ip, "netns", "exec", namespace]


def _make_network(hosts: Hosts) -> None:
    first, second = hosts.namespaces.values()
    names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    for namespace in (first, second):
        etc = Path("/etc/netns", namespace)  # `ip netns exec` shows these as /etc/...
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (etc / "resolv.conf").write_text("")
        # Without it every connection would wait almost a minute for a name server.
        (etc / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
        _ip("netns", "add", namespace)
    veth = ["link", "add", DEVICE, "netns", first, "type", "veth"]
    _ip(*veth, "peer", "name", DEVICE, "netns", second)
    for namespace, address in zip((first, second), ADDRESSES.values(), strict=True):
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _ip("-n", namespace, "link", "set", device, "up")


def _make_keys(directory: Path) -> None:
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True, timeout=SECONDS)
    shutil.copyfile(directory / "key.pub", directory / "authorized_keys")


def _start_host(hosts: Hosts, name: str, setup: str) -> subprocess.Popen[bytes]:
    """Start a host's sshd, as a child of the first process of its pid namespace."""
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd", path=SEARCH_PATH)
    options = {
        "HostKey": hosts.directory / "host_key",
        "AuthorizedKeysFile": hosts.directory / "authorized_keys",
        "PidFile": "none", "UsePAM": "no", "UseDNS": "no", "StrictModes": "no",
        "ClientAliveInterval": 5, "ClientAliveCountMax": 3,
    }  # fmt: skip
    script = f"hostname {name}; ({setup}) || exit 1; {sshd} -D -f /dev/null"
    script += "".join(f" -o {key}={value}" for key, value in options.items())
    return subprocess.Popen(
        [*_inside(hosts.namespaces[name]), *ISOLATED, "sh", "-c", f"{script}; exit 1"],
        env={**os.environ, "PATH": SEARCH_PATH}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=open(hosts.directory / f"sshd-{name}.log", "wb"),
        start_new_session=True,
    )  # fmt: skip


def _wait_for_ssh(hosts: Hosts) -> None:
    known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    ssh = ["ssh", "-F", "/dev/null", "-i", str(hosts.directory / "key"), *known]
    for name in ADDRESSES:
        ssh_to_host = [*ssh, "-o", "ConnectTimeout=5", name, "true"]
        command = [*_inside(hosts.namespaces["node1"]), *ssh_to_host]
        deadline = time.monotonic() + SECONDS
        while True:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode == 0:
                break
            assert time.monotonic() < deadline, f"no ssh to {name}: {done.stderr}"
            time.sleep(0.2)
