"""Hosts made of namespaces: own network, processes, name, /tmp, /dev/shm and sshd; shared files.

Everything runs on this machine and stays there: the hosts are connected to each other only. All
processes of a host end with it, and all hosts end with the process that has made them. Needs root
and the packages of `PACKAGES`.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.cluster import slurm
from zerolm.common.process_tree import end_with_parent

PACKAGES = "openssh-server pdsh openmpi-bin slurmctld slurmd slurm-client munge iproute2 iptables"
PROGRAMS = (
    "unshare", "nsenter", "ip", "iptables", "tc", "sshd", "ssh", "ssh-keygen", "pdsh", "mpirun",
    "munged", "slurmctld", "slurmd", "sbatch", "srun",
)  # fmt: skip
HOST_SCRIPT = Path(__file__).parent / "host.sh"
START_SECONDS = 20.0
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")


def missing() -> str:
    """Return why there can be no cluster here; an empty text if there can."""
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    if os.getuid() != 0:
        return "a cluster of namespaces needs root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not found: apt-get install {PACKAGES}"
    if not Path("/etc/slurm").is_dir():
        return "/etc/slurm is missing, which the packages make"
    script = (
        "ip link add br0 type bridge && ip link add probe0 type veth && mount -t tmpfs tmpfs /mnt"
    )
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "sh", "-c", script], capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    return f"namespaces do not work here: {probe.stderr.strip()}" if probe.returncode else ""


class Cluster:
    """A number of hosts named node1, node2, ... and a network between them.

    Args:
        directory: for keys, configuration and what the hosts share; not yet existing.
        visible: directories below /tmp that all hosts see, beside this one and the project.
    """

    def __init__(self, directory: Path, num_hosts: int, visible: Sequence[Path] = ()):
        self.directory, self.visible = directory, [directory, ROOT, *visible]
        self.names = [f"node{number}" for number in range(1, num_hosts + 1)]
        self.addresses = {name: f"10.77.0.{10 + i}" for i, name in enumerate(self.names)}
        self._processes: dict[str, subprocess.Popen] = {}
        self._first: dict[str, int] = {}  # {host: its first process}

    def __enter__(self) -> "Cluster":
        try:
            self._write_files()
            self._switch = _start(["unshare", "--net", "sleep", "infinity"])
            _wait_for_namespace(self._switch.pid)
            self._network("ip", "link", "add", "br0", "type", "bridge")
            self._network("ip", "link", "set", "br0", "up")
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in (*self._processes.values(), *([self._switch] if self._switch else [])):
            process.kill()
            process.wait()

    _switch: subprocess.Popen | None = None

    # ---- Hosts

    def boot(self, name: str) -> None:
        """Start a host, for the first time or after `power_off`."""
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        with open(self.directory / f"{name}.log", "ab") as log:
            process = _start(
                [
                    "unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc",
                    "bash", str(HOST_SCRIPT), name, self.addresses[name], *map(str, self.visible),
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        self._processes[name] = process
        self._first[name] = _wait_for(lambda: _child(process.pid), f"{name} to start")
        _wait_for_namespace(self._first[name])
        peer = str(self._first[name])
        link = ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", peer]
        self._network(*link)
        number = self.names.index(name) + 1  # the same after a restart: others remember it
        address = f"02:00:00:00:00:{number:02x}"
        own = ["nsenter", "-t", peer, "-n", "ip", "link", "set", "eth0", "address", address]
        subprocess.run(own, check=True, timeout=30)
        self._network("ip", "link", "set", name, "master", "br0", "up")
        _wait_for(ready.exists, f"{name}: {self.directory / f'{name}.log'}")

    def inside(self, name: str, command: Sequence[object]) -> list[str]:
        """Return the command line that runs a command on a host, in the directory of the caller."""
        namespaces = ("-m", "-u", "-i", "-n", "-p")
        first = str(self._first[name])
        return ["nsenter", "-t", first, *namespaces, f"--wd={ROOT}", "--", *map(str, command)]

    def start(
        self,
        name: str,
        command: Sequence[object],
        more: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen:
        """Start a command on a host; it ends with the host."""
        return _start(self.inside(name, command), env=self.environment(**more or {}), **options)

    def run(
        self, name: str, *command: object, timeout: float = 60.0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host."""
        return subprocess.run(
            self.inside(name, command), env=self.environment(**more), capture_output=True,
            text=True, errors="replace", timeout=timeout, check=False,
        )  # fmt: skip

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a user who has logged in to a host."""
        kept = ("HOME", "LANG", "TORCH_EXTENSIONS_DIR", "OMP_NUM_THREADS")
        values = {name: os.environ[name] for name in kept if name in os.environ}
        path = f"{ROOT}/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "USER": "root"}
        return {**values, "PATH": path, **offline, "PYTHONUNBUFFERED": "1", **more}

    def pids(self, name: str, *words: str) -> list[int]:
        """Return the processes of a host whose command line has all of these words."""
        own = _namespace(self._first[name], "pid")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if _namespace(int(path.name), "pid") == own and set(words) <= set(line):
                    found.append(int(path.name))
        return found

    def hostfile(self, slots: int = 1, names: Sequence[str] = ()) -> Path:
        path = self.directory / "hostfile"
        lines = (f"{name} slots={slots}\n" for name in names or self.names)
        path.write_text("".join(lines))
        return path

    # ---- Faults

    def power_off(self, name: str) -> None:
        """End all processes of a host at once; nobody is told."""
        self._network("ip", "link", "set", name, "down")
        self._processes[name].kill()
        self._processes[name].wait()
        subprocess.run(self._in_switch("ip", "link", "delete", name), capture_output=True)

    def cut(self, name: str) -> None:
        """Take the cable of a host away."""
        self._network("ip", "link", "set", name, "down")

    def connect(self, name: str) -> None:
        """Put it back."""
        self._network("ip", "link", "set", name, "up")

    def slow(self, name: str, mbit: float) -> None:
        """Limit what a host sends and receives; 0: not any more."""
        if not mbit:
            self._network("tc", "qdisc", "del", "dev", name, "root")
            self.run(name, "tc", "qdisc", "del", "dev", "eth0", "root")
            return
        rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms"]
        self._network("tc", "qdisc", "add", "dev", name, "root", "tbf", *rate)
        done = self.run(name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        assert done.returncode == 0, done.stderr

    def drop_port(self, name: str, port: int) -> None:
        """Drop what comes to a port of a host, as a firewall does."""
        rule = ["-p", "tcp", "--dport", str(port), "-j", "DROP"]
        done = self.run(name, "iptables", "-A", "INPUT", *rule)
        assert done.returncode == 0, done.stderr

    def refuse_ssh(self, name: str) -> None:
        """End the ssh server of a host."""
        done = self.run(name, "sh", "-c", "kill $(cat /run/sshd.pid)")
        assert done.returncode == 0, done.stderr

    def accept_ssh(self, name: str) -> None:
        """Start it again."""
        options = ["-o", f"ListenAddress={self.addresses[name]}", "-o", "PidFile=/run/sshd.pid"]
        done = self.run(name, "/usr/sbin/sshd", *options)
        assert done.returncode == 0, done.stderr

    # ---- Inside

    def _network(self, *command: str) -> None:
        done = subprocess.run(self._in_switch(*command), capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def _in_switch(self, *command: str) -> list[str]:
        assert self._switch is not None
        return ["nsenter", "-t", str(self._switch.pid), "-n", "--", *command]

    def _write_files(self) -> None:
        ssh = self.directory / "ssh"
        ssh.mkdir(parents=True)
        self.directory.chmod(0o755)
        lines = ["127.0.0.1 localhost", *(f"{at} {name}" for name, at in self.addresses.items())]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")
        for name in ("ssh_host_ed25519_key", "user"):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / name)]
            subprocess.run(key, check=True, timeout=30)
        slurm.write_config(self.directory / "slurm", self.addresses)
        public = (ssh / "ssh_host_ed25519_key.pub").read_text()
        known = (f"{name},{at} {public}" for name, at in self.addresses.items())
        (ssh / "known_hosts").write_text("".join(known))
        shutil.copy(ssh / "user.pub", ssh / "authorized_keys")
        for path in ssh.iterdir():
            path.chmod(0o600)
        (ssh / "ssh_config").write_text(
            "Host *\nIdentityFile /etc/ssh/user\nUserKnownHostsFile /etc/ssh/known_hosts\n"
            "GlobalKnownHostsFile none\nStrictHostKeyChecking yes\nIdentitiesOnly yes\n"
        )
        (ssh / "sshd_config").write_text(
            "HostKey /etc/ssh/ssh_host_ed25519_key\nAuthorizedKeysFile /etc/ssh/authorized_keys\n"
            "PasswordAuthentication no\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
            "MaxStartups 100\nUseDNS no\n"
        )


def _start(
    command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen:
    """Start a process that the kernel kills when this one ends."""
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent,
        start_new_session=True, **options,
    )  # fmt: skip


def _child(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _namespace(pid: int, kind: str = "net") -> str:
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def _wait_for_namespace(pid: int) -> None:
    own = _namespace(os.getpid())
    _wait_for(lambda: _namespace(pid) != own, "a network of its own")


def _wait_for(condition: Any, what: str) -> Any:
    deadline = time.monotonic() + START_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return result
