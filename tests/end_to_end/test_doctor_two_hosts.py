"""The doctor over two hosts: green when they are well, and each planted fault named with its fix.

The faults are real: what is mounted, listens or is cut on one host is not so on the other.
"""

import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest
from two_hosts import Hosts, missing, two_hosts

from tests.launching import ROOT, free_port, write_shards

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SECONDS = 240


def doctor(hosts: Hosts, run: list[str], *words: object) -> tuple[int, list[str]]:
    """Run the doctor on node1 over both hosts; return its exit code and the lines of its table."""
    log = hosts.directory / "doctor.log"
    command = [sys.executable, "-m", "launch", "doctor", "--hostfile", hosts.directory / "hostfile"]
    process = hosts.start_command(log, [*map(str, [*command, *words]), "--", *run], timeout=SECONDS)
    try:
        code = process.wait(SECONDS + 30)
    finally:
        hosts.end(process)
    print(log.read_text())
    return code, log.read_text().splitlines()


def the_line(lines: list[str], check: str, host: str, *parts: str) -> None:
    """Assert that exactly one red line is about this check of this host, and says all this."""
    found = [
        line for line in lines
        if line.startswith(f"{check} ") and host in line.split("RED")[0] and " RED " in line
        and all(part in line for part in parts)
    ]  # fmt: skip
    assert len(found) == 1, "\n".join(lines)
    assert "Fix: " in found[0] and "Traceback" not in "\n".join(lines)


def fake_version(directory: Path, package: str, version: str) -> str:
    """Return a command that shows another version of an installed package."""
    (real,) = [
        file for file in distribution(package).files or []
        if file.name == "METADATA" and ".dist-info" in str(file)
    ]  # fmt: skip
    target = Path(str(distribution(package).locate_file(real)))
    fake = directory / "METADATA"
    old = distribution(package).version
    fake.write_text(target.read_text().replace(f"\nVersion: {old}\n", f"\nVersion: {version}\n", 1))
    return f"mount --bind {fake} {target}"


def damaged_shard(directory: Path, corpus: Path) -> str:
    """Return a command that shows a shard of the same size with one other byte."""
    target = corpus / "shard-00000.bin"
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    (directory / "shard").write_bytes(content)
    return f"mount --bind {directory / 'shard'} {target}"


def stale_lock(directory: Path) -> str:
    """Return a command that shows an extensions directory with the lock of a killed build."""
    lock = directory / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    os.utime(lock, (time.time() - 3600,) * 2)
    return f"mount --bind {directory / 'extensions'} {os.environ['TORCH_EXTENSIONS_DIR']}"


def listener(port: int) -> str:
    """Return a command that leaves a process listening on a port."""
    code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(3600)"
    return f"{sys.executable} -c {shlex.quote(code)} >/dev/null 2>&1 &"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def run(tmp_path, llama, corpus, run_dir) -> list[str]:
    """The flags of a run with a corpus of its own, which a fault may cover."""
    words = ["--deepspeed_config", ROOT / "ds_configs/zero2.json", "--model_config", llama]
    own = write_shards(tmp_path / "own", 40)
    return [*map(str, [*words, "--data", own, "--data", corpus, "--run_dir", run_dir])]


def test_hosts_that_are_well_are_green_until_one_is_down(tmp_path, run, run_dir) -> None:
    with two_hosts(tmp_path) as hosts:
        code, lines = doctor(hosts, run, "--num_nodes", 2, "--deep")
        assert code == 0 and lines[-1] == "all hosts are well", lines
        assert "2 host(s) answer" in lines[0]
        (sums,) = [line for line in lines if line.startswith("all-reduce")]
        assert "2 ranks, 16 MiB: correct" in sums
        assert any("shared" in line for line in lines if line.startswith("run_dir"))
        assert not list(run_dir.iterdir())  # nothing stays behind

        hosts.set_link("node2", up=False)
        code, lines = doctor(hosts, run, "--num_nodes", 3, "--timeout", "60s")
        assert code == 2
        the_line(lines, "reachable", "node2", "exit code 255", "ssh -o BatchMode=yes node2 true")
        the_line(lines, "hosts", "all", "3 nodes were asked for", "gives 2")


def test_each_planted_fault_is_named_with_its_host_and_its_fix(tmp_path, run, run_dir) -> None:
    own, port = Path(run[run.index("--data") + 1]), free_port()
    planted = [
        fake_version(tmp_path, "transformers", "5.0.1"),
        damaged_shard(tmp_path, own),
        f"mount -t tmpfs -o size=64k none {run_dir}",
        stale_lock(tmp_path),
    ]
    with two_hosts(tmp_path, {"node1": listener(port), "node2": " && ".join(planted)}) as hosts:
        (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=100\n")
        code, lines = doctor(hosts, run, "--master_port", port)
        assert code == 2
        the_line(lines, "versions", "node2", "transformers 5.0.1", "install transformers")
        the_line(lines, "data", "node2", f"{own}: shard-00000.bin: other bytes", "data_prep verify")
        the_line(lines, "disk", "node2", "64 KiB free", "checkpoint(s) need", "--run_dir")
        the_line(lines, "run_dir", "node2", "does not see what node1 writes")
        the_line(lines, "build locks", "node2", "cpu_adam/lock", "rm ")
        the_line(lines, "port", "node1", f"port {port}: in use by process", "--master_port")
        the_line(lines, "devices", "node2", "its slots are 100", "slots=")
        assert any(line.startswith("all-reduce") and "correct" in line for line in lines)


def test_a_secret_that_ssh_would_show_is_named_and_its_value_is_not(tmp_path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nWANDB_API_KEY=secret-value\n")
    done = subprocess.run(
        [sys.executable, "-m", "launch", "doctor"], cwd=tmp_path, capture_output=True, text=True,
        timeout=SECONDS, env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2 and "secret-value" not in done.stdout + done.stderr
    assert f"{tmp_path / '.deepspeed_env'}: WANDB_API_KEY would stand on" in done.stdout
