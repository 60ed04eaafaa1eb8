"""The supervisor's decisions, on launches that end as they are told (fake_pretrain.py)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.command_words import option, run_directory_of, with_option
from tests.launching import ROOT
from zerolm import processes, reporting
from zerolm.errors import ConfigError

SECONDS = 60


class Place:
    """A run directory, a fake pretrain.py, and a mark by which the test finds its processes."""

    def __init__(self, directory: Path):
        self.directory, self.run_dir = directory, directory / "run"
        self.script = shutil.copy(ROOT / "tests/launch/fake_pretrain.py", directory / "pretrain.py")
        self.mark = f"ZEROLM_TEST={directory}"

    def start(self, plan: str, *flags: str, launcher=(), **more: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "launch", "supervise", "--backoff", "0.1s", *flags, "--"]
        words += [sys.executable, self.script, *launcher, "--run_dir", str(self.run_dir)]
        variables = {"PLAN": plan, "ZEROLM_TEST": str(self.directory), **more}
        return subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def supervise(self, plan: str, *flags: str, launcher=(), **more: str) -> tuple[int, str]:
        process = self.start(plan, *flags, launcher=launcher, **more)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def num_starts(self) -> int:
        return len((self.run_dir / "starts").read_text().split())

    def wait_for_start(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not (self.run_dir / "starts").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)  # for its child

    def left(self) -> list[int]:
        return processes.marked(self.mark)


@pytest.fixture
def place(tmp_path):
    found = Place(tmp_path)
    yield found
    for pid in found.left():
        processes.send(pid, signal.SIGKILL, found.mark)


@pytest.mark.parametrize(
    ("plan", "code", "num_starts", "said"),
    [
        ("crash crash advance done", 0, 4, "rank 3 on node7 (pid 9) ended: SIGKILL, in step 7"),
        ("silent done", 0, 2, "the run has not said that it is done"),
        ("stopped", 75, 1, "stopped on request"),
        ("gave_up", 76, 1, "gave up"),
        ("crash refuse", 2, 2, "refused"),
    ],
)
def test_the_exit_code_is_that_of_the_run(place, plan, code, num_starts, said) -> None:
    found, output = place.supervise(plan)
    assert found == code and place.num_starts() == num_starts and said in output, output


def test_three_failures_of_one_step_end_in_a_diagnosis(place) -> None:
    code, output = place.supervise("advance crash")
    assert code == 1 and place.num_starts() == 4
    for expected in (
        "the run has failed 3 times in step 7", "rank 3 on node7",
        "sequences of that step: 48 to 55",
        "RuntimeError: out of something", "the newest checkpoint is of step 10", "try:",
    ):  # fmt: skip
        assert expected in output, output
    events = [json.loads(line) for line in (place.run_dir / "events.jsonl").open()]
    names = [event["event"] for event in events if "attempt" in event]
    assert names == [*["attempt_failed"] * 3, "supervisor_stopped"]


def test_restarts_are_counted_from_the_newest_checkpoint_on(place) -> None:
    flags = ["--max_restarts", "2", "--same_step_limit", "99"]
    code, output = place.supervise("crash crash advance crash crash crash done", *flags)
    assert code == 1 and place.num_starts() == 5
    assert "2 restarts without a newer checkpoint" in output


def test_a_refusal_leaves_nothing_behind(place) -> None:
    script = Path(place.script)
    script.write_text("import sys\nsys.exit(2)\n")
    code, _ = place.supervise("refuse")
    assert code == 2 and not place.run_dir.exists()


def test_orphans_of_the_run_are_ended_and_nobody_elses(place) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    others = [  # the same words; the same user; even another supervisor's
        subprocess.Popen(words),
        subprocess.Popen(words, env={**os.environ, "ZEROLM_SUPERVISOR": "0123456789abcdef-1"}),
    ]
    try:
        script = (
            "import launch.attempt, sys; launch.attempt.LEFT_OVER_SECONDS = 1.0;"
            "import launch.__main__; sys.exit(launch.__main__.main(sys.argv[1:]))"
        )
        run = [sys.executable, place.script, "--run_dir", str(place.run_dir)]
        variables = {"PLAN": "orphan done", "ZEROLM_TEST": str(place.directory)}
        done = subprocess.run(
            [sys.executable, "-c", script, "supervise", "--backoff", "0.1s", "--", *run],
            cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "ended what it left behind: 1 processes" in done.stderr
        assert place.left() == []
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_second_ctrl_c_ends_everything_at_once(place) -> None:
    # Without a rank that could save, the first one does; so there is a heartbeat of one.
    process = place.start("sleep")
    place.wait_for_start()
    sleeper = next(pid for pid in place.left() if pid != process.pid)
    look = processes.look(sleeper)
    (place.run_dir / "ranks").mkdir()
    mark = (place.run_dir / "starts").read_text().strip()
    heartbeat = {
        "rank": 0, "host": "here", "machine": processes.machine(), "pid": sleeper, "token": "1",
        "start_ticks": look.start_ticks, "supervisor": mark, "step": 3, "phase": "step",
        "sequences": None, "state": "running", "launcher_pid": 1, "limit_seconds": 0,
    }  # fmt: skip
    (place.run_dir / "ranks" / "rank-00000.json").write_text(json.dumps(heartbeat))
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None, "it waits for the ranks"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and "ended everything at once" in output
    assert place.left() == []


def test_a_request_to_stop_before_any_rank_is_there_ends_the_launch(place) -> None:
    process = place.start("sleep")
    place.wait_for_start()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, output
    assert place.left() == []


def test_a_second_supervisor_of_a_directory_is_refused(place) -> None:
    process = place.start("sleep")
    place.wait_for_start()
    code, output = place.supervise("done")
    assert code == 2 and "another supervisor has it now" in output and str(process.pid) in output
    assert place.num_starts() == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)


def tool(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_slurm_job_goes_back_to_the_queue_when_it_is_not_done(place) -> None:
    tools = place.directory / "tools"
    tools.mkdir()
    tool(tools, "scontrol", f'echo "$@" >> {tools}/called')
    slurm = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    assert place.supervise("stopped done", **slurm)[0] == 75
    assert not (tools / "called").exists(), "only when asked to"
    assert place.supervise("stopped done", "--requeue", **slurm)[0] == 0
    assert not (tools / "called").exists(), "it is done"
    (place.run_dir / "starts").unlink()
    assert place.supervise("stopped", "--requeue", **slurm)[0] == 75
    assert (tools / "called").read_text() == "requeue 4711\n"


def test_a_host_that_fails_its_check_is_left_out(place) -> None:
    tools = place.directory / "tools"
    tools.mkdir()
    # The fake ssh's last words are the host and the command.
    tool(
        tools,
        "ssh",
        'for w; do h=$p; p=$w; done; [ "$h" != node2 ] || { echo no GPU >&2; exit 7; }',
    )
    hostfile = place.directory / "hosts"
    hostfile.write_text("node1 slots=2\nnode2 slots=2\nnode3 slots=2\n")
    launcher = ["--hostfile", str(hostfile), "--num_nodes", "2", "--master_addr", "node2"]
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    script = Path(place.script)
    words = [*launcher, str(script)]

    def supervise(*flags: str) -> tuple[int, str]:
        command = [sys.executable, "-c", f"exec(open({str(script)!r}).read())", *words]
        run = [sys.executable, "-m", "launch", "supervise", *flags, "--", *command]
        done = subprocess.run(
            [*run, "--run_dir", str(place.run_dir)], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "PLAN": "done", "ZEROLM_TEST": "1", **path}, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, output = supervise()
    assert code == 0 and "node2 is left out: exit code 7: no GPU" in output, output
    assert "hosts: node1, node3" in output and "--num_nodes 2 --master_addr node1" in output
    assert (place.run_dir / "hosts").read_text() == "node1 slots=2\nnode3 slots=2\n"
    words[3] = "3"
    code, output = supervise()
    assert code == 2 and "2 of 3 hosts pass the check, the run needs 3" in output
    code, output = supervise("--min_hosts", "2")
    assert code == 0 and "--num_nodes 2" in output


def test_the_run_directory_is_read_from_the_command(tmp_path) -> None:
    settings = tmp_path / "run.json"
    settings.write_text(json.dumps({"settings": {"run_dir": "runs/b"}}))
    assert run_directory_of(["deepspeed", "pretrain.py", "--run-dir=runs/a"]) == Path("runs/a")
    assert run_directory_of(["x/pretrain.py", "--settings", str(settings)]) == Path("runs/b")
    for wrong in (["deepspeed", "train.py"], ["deepspeed", "pretrain.py", "--seed", "1"]):
        with pytest.raises(ConfigError):
            run_directory_of(wrong)


def test_only_the_launchers_own_options_are_read_and_replaced() -> None:
    command = ["deepspeed", "--hostfile=h", "--num_nodes", "2", "pretrain.py", "--num_nodes", "9"]
    assert option(command, "--hostfile") == "h" and option(command, "--include") is None
    assert with_option(command, "--num_nodes", "1")[3] == "1"
    assert with_option(command, "--num_nodes", "1")[-1] == "9"
    assert with_option(command, "--hostfile", "g")[1] == "--hostfile=g"


def test_a_page_that_hangs_delays_no_restart_and_no_end(place) -> None:
    place.run_dir.mkdir()
    (place.run_dir / "run.json").write_text(json.dumps({"settings": {"report_interval": 180}}))
    os.mkfifo(place.run_dir / "metrics-rolled-back-0001.jsonl")  # its reader waits forever
    began = time.monotonic()
    code, output = place.supervise("crash crash done")
    assert (code, place.num_starts()) == (0, 3), output
    assert time.monotonic() - began < reporting.FINISH_SECONDS
    assert not place.left(), "the page's process neither"
