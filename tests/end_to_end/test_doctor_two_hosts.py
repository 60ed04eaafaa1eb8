"""The doctor on two hosts: no red line without a fault, and one with its fix for each fault.

The faults are real: a mount, a listening process or a network link of one host only.
"""

import os
import shlex
import subprocess
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.end_to_end.two_hosts import Hosts, missing, two_hosts
from tests.launching import ROOT, free_port, write_shards

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SECONDS = 240


def doctor(hosts: Hosts, run: list[str], *flags: object) -> tuple[int, list[str]]:
    """Run the doctor on node1 over both hosts; return its exit code and the lines of its table."""
    log = hosts.directory / "doctor.log"
    command = [sys.executable, "-m", "launch", "doctor", "--hostfile", hosts.directory / "hostfile"]
    process = hosts.start_command(log, [*map(str, [*command, *flags]), "--", *run], timeout=SECONDS)
    try:
        code = process.wait(SECONDS + 30)
    finally:
        hosts.end(process)
    print(log.read_text())
    return code, log.read_text().splitlines()


def assert_red_line(lines: list[str], check: str, host: str, *parts: str) -> None:
    """Assert that exactly one red line is about this check of this host, with all of `parts`."""
    found = [
        line for line in lines
        if line.startswith(f"{check} ") and host in line.split("RED")[0] and " RED " in line
        and all(part in line for part in parts)
    ]  # fmt: skip
    assert len(found) == 1, "\n".join(lines)
    assert "Fix: " in found[0] and "Traceback" not in "\n".join(lines)


def fake_version(directory: Path, package: str, version: str) -> str:
    """Return a shell command that changes the visible version of an installed package."""
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
    """Return a shell command that changes one byte of a shard."""
    target = corpus / "shard-00000.bin"
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    (directory / "shard").write_bytes(content)
    return f"mount --bind {directory / 'shard'} {target}"


def stale_lock(directory: Path) -> str:
    """Return a shell command that mounts an extensions directory with a stale lock."""
    lock = directory / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    os.utime(lock, (time.time() - 3600,) * 2)
    return f"mount --bind {directory / 'extensions'} {os.environ['TORCH_EXTENSIONS_DIR']}"


def listener(port: int) -> str:
    """Return a shell command that leaves a process listening on a port."""
    code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(3600)"
    return f"{sys.executable} -c {shlex.quote(code)} >/dev/null 2>&1 &"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def run(tmp_path, llama, corpus, run_dir) -> list[str]:
    """Return the flags of a run with a corpus of its own, which a fault may replace."""
    flags = ["--deepspeed_config", ROOT / "ds_configs/zero2.json", "--model_config", llama]
    own = write_shards(tmp_path / "own", 40)
    return [*map(str, [*flags, "--data", own, "--data", corpus, "--run_dir", run_dir])]


def test_hosts_without_faults_have_no_red_line_until_one_is_down(tmp_path, run, run_dir) -> None:
    with two_hosts(tmp_path) as hosts:
        code, lines = doctor(hosts, run, "--num_nodes", 2, "--deep")
        assert code == 0 and lines[-1] == "all hosts are ready", lines
        assert "2 host(s) answer" in lines[0]
        (sums,) = [line for line in lines if line.startswith("all-reduce")]
        assert "2 ranks, 16 MiB: correct" in sums
        assert any("shared" in line for line in lines if line.startswith("run_dir"))
        assert not list(run_dir.iterdir())  # nothing is left behind

        hosts.set_link("node2", up=False)
        code, lines = doctor(hosts, run, "--num_nodes", 3, "--timeout", "60s")
        assert code == 2
        assert_red_line(
            lines, "reachable", "node2", "exit code 255", "ssh -o BatchMode=yes node2 true"
        )
        assert_red_line(lines, "hosts", "all", "the run needs 3 nodes", "gives 2")


def test_each_fault_is_named_with_its_host_and_its_fix(tmp_path, run, run_dir) -> None:
    own, port = Path(run[run.index("--data") + 1]), free_port()
    faults = [
        fake_version(tmp_path, "transformers", "5.0.1"),
        damaged_shard(tmp_path, own),
        f"mount -t tmpfs -o size=64k none {run_dir}",
        stale_lock(tmp_path),
    ]
    with two_hosts(tmp_path, {"node1": listener(port), "node2": " && ".join(faults)}) as hosts:
        (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=100\n")
        code, lines = doctor(hosts, run, "--master_port", port)
        assert code == 2
        assert_red_line(lines, "versions", "node2", "transformers 5.0.1", "install transformers")
        assert_red_line(
            lines, "data", "node2", f"{own}: shard-00000.bin: contents differ", "data_prep verify"
        )
        assert_red_line(lines, "disk", "node2", "64 KiB free", "checkpoint(s) need", "--run_dir")
        assert_red_line(lines, "run_dir", "node2", "does not see what node1 writes")
        assert_red_line(lines, "build locks", "node2", "cpu_adam/lock", "rm ")
        assert_red_line(lines, "port", "node1", f"port {port}: in use by process", "--master_port")
        assert_red_line(lines, "devices", "node2", "the hostfile has slots=100", "slots=")
        assert any(line.startswith("all-reduce") and "correct" in line for line in lines)


def test_a_secret_that_ssh_would_show_is_named_without_its_value(tmp_path) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nWANDB_API_KEY=secret-value\n")
    done = subprocess.run(
        [sys.executable, "-m", "launch", "doctor"], cwd=tmp_path, capture_output=True, text=True,
        timeout=SECONDS, env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2 and "secret-value" not in done.stdout + done.stderr
    assert f"{tmp_path / '.deepspeed_env'}: WANDB_API_KEY: would be visible on" in done.stdout
