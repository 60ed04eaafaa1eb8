"""Hosts that fail their check, or compute wrong values, are left out."""

import os
import subprocess
import sys
from pathlib import Path

from launch.command.hosts import Host
from launch.supervise.hosts import HostCheck, host_problem
from tests.launch.supervise.fake_run import SECONDS, write_program
from tests.launching import ROOT


def test_a_host_that_fails_its_check_is_left_out(fake_run) -> None:
    tools = fake_run.directory / "tools"
    tools.mkdir()
    # The last two arguments of ssh are the host and the command.
    write_program(
        tools,
        "ssh",
        'for w; do h=$p; p=$w; done; [ "$h" != node2 ] || { echo no GPU >&2; exit 7; }',
    )
    hostfile = fake_run.directory / "hosts"
    hostfile.write_text("node1 slots=2\nnode2 slots=2\nnode3 slots=2\n")
    launcher = ["--hostfile", str(hostfile), "--num_nodes", "2", "--master_addr", "node2"]
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    script = Path(fake_run.script)
    launch = [*launcher, str(script)]

    def supervise(*flags: str, plan: str = "done") -> tuple[int, str]:
        command = [sys.executable, "-c", f"exec(open({str(script)!r}).read())", *launch]
        run = [sys.executable, "-m", "launch", "supervise", *flags, "--", *command]
        done = subprocess.run(
            [*run, "--run_dir", str(fake_run.run_dir)], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PLAN": plan, "ZEROLM_TEST": "1", **path}, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, output = supervise()
    assert code == 0 and "node2 is left out: exit code 7: no GPU" in output, output
    assert "hosts: node1, node3" in output and "--num_nodes 2 --master_addr node1" in output
    assert (fake_run.run_dir / "hosts").read_text() == "node1 slots=2\nnode3 slots=2\n"
    launch[3] = "3"
    code, output = supervise()
    assert code == 2 and "2 of 3 hosts pass the check, but the run needs 3" in output
    code, output = supervise("--min_hosts", "2")
    assert code == 0 and "--num_nodes 2" in output
    # node1 corrupts values: it stays while there is no other host, and is left out once there is.
    launch[3] = "2"
    code, output = supervise("--backoff", "0.02s", plan="done done corrupt done")
    assert (
        code == 0 and "node1: it computed or stored wrong values, but there is no spare" in output
    )
    hostfile.write_text("node1 slots=2\nnode3 slots=2\nnode4 slots=2\n")
    (fake_run.run_dir / "starts").unlink()
    code, output = supervise("--backoff", "0.02s", plan="corrupt done")
    assert code == 0 and "step 7: a bit flipped" in output and "hosts: node3, node4" in output
    # node1 is slow: it stays, unless it is to be left out.
    for flags, used in (((), "node1, node3"), (("--leave_out_slow_hosts",), "node3, node4")):
        (fake_run.run_dir / "starts").unlink()
        code, output = supervise("--backoff", "0.02s", *flags, plan="slow done")
        assert code == 0 and output.rindex(f"hosts: {used}") > output.index("restart"), output


def test_a_check_that_is_slow_the_first_time_passes_the_second(tmp_path) -> None:
    """Imports from a network file system."""
    seen = tmp_path / "seen"
    host = Host("localhost", "slots=1")
    slow = HostCheck(f"test -f {seen} || {{ touch {seen}; sleep 30; }}", 1.0)
    assert host_problem(host, slow) is None
    problem = host_problem(host, HostCheck("sleep 30", 0.2))
    assert problem is not None and problem.startswith("`sleep 30` took longer than 0.2 s, twice.")
    assert "--host_check_timeout" in problem
