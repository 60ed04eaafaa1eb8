"""The doctor on hosts: no red line without a fault, and one with a fix that works for each fault.

The faults are real: a mount, a rule of the firewall, a process or a link of one host.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.hosts import Cluster, missing
from tests.launching import LLAMA, ROOT, write_json, write_shards

SECONDS = 240.0
PORT = 29500

pytestmark = pytest.mark.skipif(bool(reason := missing()), reason=reason or "there is a cluster")


class Fault(NamedTuple):
    """A fault of one host, and how the doctor must report it.

    Attributes:
        make: shell command, run on `host`.
        mend: shell command, run on `host`: what the printed fix means here.
        check: name of the check.
        parts: what the red line must say beside the host's name.
        blamed: the host that the line names; None: `host`.
        flags: of the doctor.
    """

    host: str
    make: str
    mend: str
    check: str
    parts: tuple[str, ...]
    blamed: str | None = None
    flags: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster") / "hosts", 3) as made:
        yield made


@pytest.fixture(scope="module")
def inputs(cluster) -> Path:
    directory = cluster.directory / "inputs"
    directory.mkdir()
    write_shards(directory / "data", 40)
    write_json(directory / "model.json", LLAMA)
    (directory / "run").mkdir()
    return directory


@pytest.fixture
def doctor(cluster, inputs) -> Callable[..., tuple[int, list[str]]]:
    flags = ["--deepspeed_config", ROOT / "ds_configs/zero2.json", "--data", inputs / "data"]
    flags += ["--model_config", inputs / "model.json", "--run_dir", inputs / "run"]

    def run(*more: object, names: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        """Run the doctor on node1 over all hosts; return its exit code and its lines."""
        hostfile = cluster.hostfile(names=names)
        command = [sys.executable, "-m", "launch", "doctor", "--hostfile", hostfile, *more]
        done = cluster.run("node1", *command, "--", *flags, timeout=SECONDS)
        print(done.stdout, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout.splitlines()

    return run


def red_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if " RED " in line]


def faults(cluster: Cluster, inputs: Path) -> dict[str, Fault]:
    """Return all faults, by name."""
    scratch = cluster.directory / "faults"
    scratch.mkdir(exist_ok=True)
    old = f"\nVersion: {distribution('transformers').version}\n"
    (scratch / "METADATA").write_text(METADATA.read_text().replace(old, "\nVersion: 5.0.1\n", 1))
    shard = inputs / "data" / "shard-00000.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (scratch / "shard").write_bytes(damaged)
    listener = f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(600)"
    listen = f"{sys.executable} -c {shlex.quote(listener)} >/dev/null 2>&1 & echo $! >/tmp/pid"
    rate = "rate 20mbit burst 64kb latency 400ms"
    accept = "iptables -D INPUT"
    drop = f"-p tcp --dport {PORT} -j DROP"
    drop_all = f"-i eth0 -p tcp --syn -m multiport ! --dports 22,{PORT} -j DROP"
    known = "/etc/ssh/known_hosts"
    node1, node2 = cluster.addresses["node1"], cluster.addresses["node2"]
    return {
        "no ssh server": Fault(
            "node2", "kill $(cat /run/sshd.pid)",
            f"/usr/sbin/sshd -o ListenAddress={node2} -o PidFile=/run/sshd.pid", "reachable",
            ("Connection refused", "start its ssh server")),
        "a refused key": Fault(
            "node2", "mount --bind /dev/null /etc/ssh/authorized_keys",
            "umount /etc/ssh/authorized_keys", "reachable",
            ("Permission denied", "ssh-copy-id node2")),
        "an unknown host key": Fault(
            "node1", f"grep -v node2 {known} > /tmp/known; mount --bind /tmp/known {known}",
            f"ssh-keyscan node2 >> {known} 2>/dev/null", "reachable",
            ("Host key verification failed", "ssh-keyscan node2"), "node2"),
        "no route": Fault(
            "node2", "ip link set eth0 down", "ip link set eth0 up", "reachable",
            ("exit code 255", "start it, and open its ssh port"), "node2"),
        "the run's port is blocked": Fault(
            "node1", f"iptables -A INPUT {drop}", f"{accept} {drop}", "port",
            (f"cannot reach node1 at {node1} port {PORT}", "open the port"),
            "node2, node3"),
        "all other ports are blocked": Fault(
            "node2", f"iptables -A INPUT {drop_all}", f"{accept} {drop_all}", "all-reduce",
            ("cannot reach node2 (timed out)", "open all ports between the hosts"), "node1, node3"),
        "a slow host": Fault(
            "node3", f"tc qdisc add dev eth0 root tbf {rate}", "tc qdisc del dev eth0 root",
            "network", ("/s per device to its fastest peer; the others reach", "ethtool")),
        "the run's port is in use": Fault(
            "node1", listen, "kill $(cat /tmp/pid)", "port",
            (f"port {PORT}: in use by process", "--master_port")),
        "another version": Fault(
            "node2", f"mount --bind {scratch / 'METADATA'} {METADATA}", f"umount {METADATA}",
            "versions", ("transformers 5.0.1", "install transformers")),
        "a damaged shard": Fault(
            "node2", f"mount --bind {scratch / 'shard'} {shard}", f"umount {shard}", "data",
            ("shard-00000.bin: contents differ", "zerolm data verify")),
        "a directory of its own": Fault(
            "node2", f"mount -t tmpfs none {inputs / 'run'}", f"umount {inputs / 'run'}", "run_dir",
            ("a file written by node1 is not visible there", "all hosts share")),
        "a full disk": Fault(
            "node1", f"mount -t tmpfs -o size=64k none {inputs / 'run'}",
            f"umount {inputs / 'run'}", "disk", ("64 KiB free", "--run_dir")),
        "too many slots": Fault(
            "node2", "true", "true", "devices", ("the hostfile has slots=100", "write slots=")),
    }  # fmt: skip


METADATA = next(
    Path(str(distribution("transformers").locate_file(file)))
    for file in distribution("transformers").files or []
    if file.name == "METADATA" and ".dist-info" in str(file)
)


def make(cluster: Cluster, fault: Fault, command: str) -> None:
    done = cluster.run(fault.host, "sh", "-c", command)
    assert done.returncode == 0, done.stderr


def red_line(lines: list[str], fault: Fault) -> str:
    """Return the only red line of the fault's check and host, which has a fix."""
    host = fault.blamed or fault.host
    found = [
        line for line in red_lines(lines)
        if line.startswith(f"{fault.check} ") and host in line.split(" RED ")[0]
        and all(part in line for part in fault.parts)
    ]  # fmt: skip
    assert len(found) == 1 and "Fix: " in found[0], "\n".join(lines)
    return found[0]


def test_hosts_without_faults_are_ready_and_faults_of_one_start_are_all_named(
    cluster, inputs, doctor
):
    code, lines = doctor("--num_nodes", 2)
    assert code == 0 and "2 host(s) answer" in lines[0]  # those that the launcher would start on
    file = inputs / "hosts.json"
    code, lines = doctor("--deep", "--write", file)
    assert code == 0 and lines[-2] == "all hosts are ready"
    assert lines[-1].endswith(f"zerolm plan --search --measured {file}")
    measured = json.loads(file.read_text())
    assert (measured["hardware"], measured["devices"], measured["devices_per_node"]) == (
        "cpu",
        3,
        1,
    )
    assert any(f"--inter_node {measured['inter_node']:.3g} " in line for line in lines)
    deep = write_json(inputs / "deep.json", {**LLAMA, "num_hidden_layers": 4})
    plan = ["plan", "--measured", file, "--model_config", deep, "--search"]
    done = cluster.run("node1", sys.executable, "-m", "launch", *plan, timeout=SECONDS)
    gigabits = measured["inter_node"] * 8 / 1e9
    assert "3 stages" in done.stdout and f"this plan has {gigabits:.3g}" in done.stdout
    assert "3 host(s) answer" in lines[0]
    assert any("3 ranks, correct; 16 MiB: " in line for line in lines)
    assert any("zerolm plan --inter_node" in line and " ok " in line for line in lines)
    assert any("shared" in line for line in lines if line.startswith("run_dir"))
    assert not list((inputs / "run").iterdir()), "nothing is left behind"

    together = ["the run's port is blocked", "another version", "a damaged shard"]
    together += ["a directory of its own"]
    all_faults = faults(cluster, inputs)
    for name in together:
        make(cluster, all_faults[name], all_faults[name].make)
    cluster.cut("node3")
    try:
        code, lines = doctor("--num_nodes", 4)
    finally:
        cluster.connect("node3")
        for name in together:
            make(cluster, all_faults[name], all_faults[name].mend)
    assert code == 2 and len(red_lines(lines)) == len(together) + 2
    down = all_faults["no route"]._replace(host="node3", blamed="node3")
    blocked = all_faults[together[0]]._replace(blamed="node2")  # node3 is not asked
    for fault in (down, blocked, *(all_faults[name] for name in together[1:])):
        red_line(lines, fault)
    assert any("the run needs 4 nodes" in line and "provides 3" in line for line in lines)


@pytest.mark.soak
def test_each_fault_is_named_and_its_fix_works(cluster, inputs, doctor):
    """The fix is carried out, and the next fault's doctor would find what it has left."""
    rows = []
    for name, fault in faults(cluster, inputs).items():
        make(cluster, fault, fault.make)
        hostfile = {"too many slots": ("node1", "node2 slots=100 #", "node3")}.get(name, ())
        start = time.monotonic()
        code, lines = doctor(names=hostfile)
        seconds = time.monotonic() - start
        make(cluster, fault, fault.mend)
        assert code == 2
        red = red_line(lines, fault)
        rows.append(f"| {name}, {fault.host} | {' '.join(red.split())} | {seconds:.0f} |")
    print("\n".join(["| fault | the doctor's red line | seconds |", "|---|---|---|", *rows]))
    code, lines = doctor()
    assert code == 0 and lines[-1] == "all hosts are ready"
