"""How the supervisor judges a launch: a real process, with heartbeats that the test writes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.supervise import attempt as attempt_module
from launch.supervise.attempt import Attempt
from launch.supervise.outcome import classify
from tests.zerolm.report.run_directories import heartbeat
from zerolm.common import processes
from zerolm.common.errors import EXIT_BUG, EXIT_REFUSED

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def attempt(tmp_path):
    (tmp_path / "ranks").mkdir()
    started = Attempt(SLEEP, f"test-{os.getpid()}", tmp_path)
    yield started
    started.kill()
    started.finish()


def write_heartbeat(attempt: Attempt, pid: int = 0, **values: object) -> Path:
    """Write the heartbeat of a rank with a process, or else with that of the launch."""
    process = processes.inspect_process(pid or attempt.process.pid)
    of_launch = {"machine": attempt.machine, "supervisor": attempt.mark.partition("=")[2]}
    beat = heartbeat(
        0, pid=process.pid, start_ticks=process.start_ticks, token="1", step=3, limit_seconds=0.2,
        **{**of_launch, **values},
    )  # fmt: skip
    path = attempt.files.heartbeat(0)
    path.write_text(json.dumps(beat))
    return path


@pytest.mark.parametrize("jump_seconds", [86400.0, -86400.0])
def test_a_jump_of_the_clock_neither_ends_a_healthy_launch_nor_hides_a_silent_one(
    attempt, monkeypatch, jump_seconds
) -> None:
    monkeypatch.setattr(attempt_module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(attempt_module, "STACKS_SECONDS", 0.0)
    now = time.time
    path = write_heartbeat(attempt)
    assert attempt.running()
    monkeypatch.setattr(time, "time", lambda: now() + jump_seconds)
    assert attempt.running(), attempt.kill_reason
    os.utime(path, (now() + jump_seconds,) * 2)  # the next heartbeat has the new time
    assert attempt.running(), attempt.kill_reason
    deadline = time.monotonic() + 300
    while attempt.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "heartbeat is older than its limit" in str(attempt.kill_reason)


@pytest.mark.parametrize("ended", ["SIGKILL", None])
def test_launchers_do_not_wait_for_trackers_once_it_is_known_why_all_ranks_have_ended(
    attempt, ended
) -> None:
    with subprocess.Popen(SLEEP) as rank:
        write_heartbeat(attempt, pid=rank.pid)
        assert attempt.running()
        lost = {"event": "rank_lost", "step": 3, "ended": ended, "ranks": []}
        attempt.files.events.write_text(
            json.dumps({**lost, "time": "2026-11-23T13:35:54+0000"}) + "\n"
        )
        rank.kill()
    deadline = time.monotonic() + (3 if ended is None else 300)
    while attempt.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert attempt.running() == (ended is None) and attempt.kill_reason is None


@pytest.mark.parametrize("saves", [True, False])
def test_a_launcher_that_outlives_its_ranks_is_killed_and_one_whose_ranks_save_is_not(
    tmp_path, monkeypatch, saves
) -> None:
    """`deepspeed` has ended; its node launcher is stopped, so that it never ends by itself."""
    monkeypatch.setattr(attempt_module, "ORPHAN_SECONDS", 0.5)
    (tmp_path / "ranks").mkdir()
    command = [sys.executable, "-c", ""]
    started = Attempt(command, f"test-{os.getpid()}-{saves}", tmp_path)
    name, _, value = started.mark.partition("=")
    with subprocess.Popen(SLEEP, env={**os.environ, name: value}) as launcher:
        os.kill(launcher.pid, signal.SIGSTOP)
        seconds = 2 if saves else 0.1
        rank = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
        with subprocess.Popen(rank, env={**os.environ, name: value}) as process:
            write_heartbeat(started, pid=process.pid, launcher_pid=launcher.pid)
            reaper = threading.Thread(target=process.wait)
            reaper.start()
            assert started.finish().exit_code == 1
            assert process.wait() == 0, "the rank was killed"
        assert launcher.wait() == -signal.SIGKILL


@pytest.mark.parametrize("is_told", [True, False])
def test_an_attempt_ends_when_ranks_of_other_hosts_have_said_why(
    tmp_path, monkeypatch, is_told
) -> None:
    """pdsh ends at once with a launcher that was killed, and ranks a few seconds later."""
    (tmp_path / "ranks").mkdir()
    started = Attempt([sys.executable, "-c", ""], f"test-{os.getpid()}", tmp_path)
    started.process.wait()
    monkeypatch.setattr(attempt_module, "interval_seconds", lambda world_size: 0.4)
    beats = 0

    def beat_and_tell(seconds: float) -> None:
        nonlocal beats
        beats += 1
        if beats < 10:
            write_heartbeat(started, pid=os.getpid(), machine="another", monotonic=float(beats))
        elif beats == 10 and is_told:
            rank = {"rank": 3, "host": "node2", "pid": 7, "reason": "its launcher is gone"}
            lost = {"event": "launcher_lost", "step": 3, "host": "node2", "ranks": [rank]}
            started.files.events.write_text(
                json.dumps({**lost, "time": "2026-11-27T13:35:54+0000"}) + "\n"
            )
        sleep(seconds)

    sleep = time.sleep
    write_heartbeat(started, pid=os.getpid(), machine="another")
    monkeypatch.setattr(attempt_module.time, "sleep", beat_and_tell)
    (reason,) = started.finish().reasons
    assert ("node2" in reason) == is_told and beats >= 10, "its heartbeats have ceased"


def test_ranks_without_the_mark_are_killed_here_and_by_a_command_on_other_hosts(
    tmp_path, monkeypatch
) -> None:
    """DeepSpeed's ssh does not carry the mark; a stopped rank would hold its port and its GPU."""
    monkeypatch.setattr(attempt_module, "REASON_SECONDS", 0.1)
    (tmp_path / "ranks").mkdir()
    started = Attempt(SLEEP, f"test-{os.getpid()}", tmp_path)
    for machine, ticks, dies in ((started.machine, 0, True), ("boot ns", 0, False),
                                 (processes.machine_id() + "x", 1, False),
                                 (processes.machine_id() + "x", 0, True)):  # fmt: skip
        rank = subprocess.Popen(SLEEP)
        try:
            os.kill(rank.pid, signal.SIGSTOP)
            here = processes.inspect_process(rank.pid)
            path = write_heartbeat(started, pid=rank.pid, machine=machine, supervisor=None)
            beat = json.loads(path.read_text())
            beat |= {"host": "node2.cluster", "start_ticks": here.start_ticks + ticks}
            path.write_text(json.dumps(beat))
            if machine == started.machine:
                assert rank.pid in started.kill()
                assert started.left_on_other_hosts() == {}
            else:
                (command,) = started.left_on_other_hosts().values()
                done = subprocess.run(["sh", "-c", command + "true"], timeout=10)
                assert done.returncode == 0
            assert (rank.poll() is not None or _is_ended(rank.pid)) == dies, machine
        finally:
            rank.kill()
            rank.wait()
    started.finish()


def _is_ended(pid: int) -> bool:
    time.sleep(0.2)
    return processes.inspect_process(pid).state in "ZX"


def test_a_start_ends_soon_if_a_rank_of_another_host_has_before_they_met(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(attempt_module, "MEET_SECONDS", 0.5)
    (tmp_path / "ranks").mkdir()
    line = "node2: [ERROR] [launch.py:259] [...] exits with return code = 1"
    act = f"import time; print({line!r}, flush=True); time.sleep(60)"
    started = Attempt([sys.executable, "-c", act], f"test-{os.getpid()}", tmp_path)
    deadline = time.monotonic() + 300
    while started.running() and time.monotonic() < deadline:
        time.sleep(0.05)
    reason = "a rank on node2 ended with exit code 1 before the ranks had connected, and the others"
    assert str(started.kill_reason).startswith(reason)
    assert started.finish().reasons[0] == started.kill_reason


@pytest.mark.parametrize("text", ["[]", "{}", '{"rank": []}', '{"rank": 0, "supervisor": null}'])
def test_an_odd_heartbeat_file_ends_no_launch(attempt, text) -> None:
    attempt.files.heartbeat(7).write_text(text)
    assert attempt.running() and attempt.process.poll() is None
    assert isinstance(attempt.request_stop(15), bool)


def test_a_failure_is_in_the_last_step_that_any_rank_has_reported() -> None:
    beats = [{"step": 8, "sequences": None}, {"step": 9, "sequences": [72, 8]}]

    def step(events=(), last_logged=None) -> int | None:
        return classify(-9, events, beats, [], None, [], last_logged).step

    assert step() == 9
    assert step(last_logged=8) == 9
    assert step(last_logged=11) == 12, "step 11 was complete, whatever the last heartbeat says"
    lost = {"event": "rank_lost", "step": 10, "ended": "SIGKILL", "ranks": []}
    assert step([lost]) == 10 and step([lost], 11) == 12
    assert classify(-9, [], [], [], None, [], last_logged=11).step is None, "of an earlier launch"


def test_the_code_of_a_lost_rank_is_that_of_its_own_host() -> None:
    """pdsh writes the name of the host before the lines of its launcher."""
    lost = {
        "rank": 1, "host": "node2.cluster", "pid": 470, "reason": "has been silent for 8 s",
        "step": 52, "sequences": None, "stacks": None,
    }  # fmt: skip
    event = {"event": "rank_lost", "step": 62, "ended": None, "ranks": [lost]}
    output = [
        "node2: [ERROR] [launch.py:259:sigkill_handler] [...] exits with return code = -9",
        "node1: [ERROR] [launch.py:259:sigkill_handler] [...] exits with return code = 1",
    ]
    (reason,) = classify(1, [event], [], output, None, []).reasons
    assert reason == (
        "rank 1 on node2.cluster (pid 470) has been silent for 8 s (the launcher reported "
        "SIGKILL), in step 62"
    )
    (reason,) = classify(1, [event], [], output[1:], None, []).reasons
    assert "launcher" not in reason, "that of node2 reported nothing"
    of_stage = {**event, "ranks": [{**lost, "stage": "2 of 2"}]}
    (reason,) = classify(1, [of_stage], [], [], None, []).reasons
    assert reason.startswith("rank 1 on node2.cluster (pid 470, stage 2 of 2) has been silent")


@pytest.mark.parametrize("lines", [
    ["node1: [launch.py:259] [...] exits with return code = -6",
     "node2: [launch.py:259] [...] exits with return code = -9"],
    ["srun: error: node1: task 0: Aborted (core dumped)", "srun: error: node2: task 1: Killed"],
])  # fmt: skip
def test_of_ranks_that_all_ended_the_one_that_lost_no_peer_is_named_first(lines) -> None:
    """NCCL aborts every rank that has lost one, often before any of them can say so."""
    for output in (lines, lines[::-1]):
        (reason,) = classify(1, [], [], output, None, []).reasons
        assert reason == "a rank on node2 ended with SIGKILL, another on node1 ended with SIGABRT"
    exited = "srun: error: node2: tasks 8-15: Exited with exit code 3"
    assert classify(1, [], [], [exited], None, []).reasons == [
        "a rank on node2 ended with exit code 3"
    ]


def test_a_killed_runner_is_blamed_and_not_the_ranks_that_saved() -> None:
    """The node launcher still reports the exit code of the ranks, which have stopped."""
    events = [{"event": "stopped", "step": 380, "reason": "deepspeed has ended"}]
    output = ["[ERROR] [launch.py:259:sigkill_handler] [...] exits with return code = 75"]
    outcome = classify(-9, events, [], output, None, [])
    assert outcome.exit_code == 1
    (reason,) = outcome.reasons
    assert reason == "the launcher ended with SIGKILL, but the ranks were alive and saved"


def test_a_refusal_under_slurm_is_one_although_srun_returns_that_it_ended_a_task() -> None:
    output = [
        "pretrain.py: refused, nothing was written.",
        "shards/web: no such directory. (--data) (on node1, node2)",
        "[ERROR] [launch.py:259:sigkill_handler] ['python'] exits with return code = 2",
        "srun: error: node1: task 0: Exited with exit code 2",
        "srun: error: node2: task 1: Terminated",
    ]
    outcome = classify(143, [], [], output, None, [])
    assert outcome.exit_code == EXIT_REFUSED and "no such directory" in outcome.reasons[0]
    assert classify(143, [], [], output[2:], None, []).exit_code == EXIT_BUG
