"""The watchdog without training: which ranks it blames, and how it ends their processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.launching import ROOT, environment
from zerolm.common import processes
from zerolm.run_dir.files import RunFiles
from zerolm.watchdog import liveness, progress, watchdog
from zerolm.watchdog.heartbeats import Heartbeats, interval_seconds
from zerolm.watchdog.verdict import write_once

SECONDS = 60


def beat(rank: int, quiet: float, waiting: bool, entered: int):
    group = {"entered": entered, "finished": None, "started": None}
    return {
        "rank": rank, "host": "node", "quiet_seconds": quiet, "limit_seconds": 600.0,
        "waiting": waiting, "groups": {"0/0": group}, "calls": [],
    }  # fmt: skip


def test_a_verdict_is_written_completely_and_once(tmp_path) -> None:
    path = tmp_path / "verdict-1.json"
    assert write_once(path, {"event": "hang"}) and not write_once(path, {"event": "rank_lost"})
    assert json.loads(path.read_text()) == {"event": "hang"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.fixture
def heartbeats(tmp_path):
    files = RunFiles(tmp_path)
    files.ranks.mkdir()
    found = Heartbeats(tmp_path, 3, None, liveness.ProgressMonitor(600))
    found.token = "now"
    return found


def test_a_heartbeat_overwrites_the_last_one_in_place(heartbeats) -> None:
    path = heartbeats.files.heartbeat(3)
    path.write_text("{" + "x" * 5000)  # of an earlier launch, and longer
    heartbeats.write()
    inode, first = path.stat().st_ino, heartbeats.read(3)
    heartbeats.mark_ended("done")
    last = heartbeats.read(3)
    assert [first["state"], last["state"]] == ["running", "ended"]
    assert path.stat().st_ino == inode and [each.name for each in path.parent.iterdir()] == [
        path.name
    ], "no directory changes"
    assert json.loads(path.read_text())["reason"] == "done"
    path.unlink()
    heartbeats.write()
    assert heartbeats.read(3)["state"] == "ended"


def test_a_heartbeat_that_is_read_while_it_is_overwritten_is_read_again(
    heartbeats, monkeypatch
) -> None:
    heartbeats.write()
    path = heartbeats.files.heartbeat(3)
    complete = path.read_bytes()
    path.write_bytes(complete[:100] + b"0" * 50)
    monkeypatch.setattr(progress.time, "sleep", lambda seconds: path.write_bytes(complete))
    assert heartbeats.read(3)["token"] == "now"


def test_thousands_of_ranks_write_few_heartbeats_a_second() -> None:
    assert interval_seconds(2) == interval_seconds(64) == 2.0
    for world_size in (64, 512, 4096):
        seconds = interval_seconds(world_size)
        assert seconds <= 20 and (world_size / seconds <= 32 or seconds == 20)


def test_ranks_are_blamed_only_if_their_next_heartbeats_say_the_same(tmp_path, monkeypatch) -> None:
    dog = object.__new__(watchdog.Watchdog)  # without its thread
    dog.peers, dog._suspects, dog.rank = {1: {}, 2: {}}, {}, 0
    dog.heartbeats, ended, found = Mock(), [], {}
    dog._end_run = lambda blamed, event, reason: ended.append(sorted(blamed))
    dog.heartbeats.read = found.get
    dog.heartbeats.status = lambda: beat(0, 700, True, 5) | {
        "beats": 1, "monotonic": 0.0, "state": "running",
    }  # fmt: skip
    history = [  # quiet seconds, records and time of rank 1's heartbeats
        (700, 8, 1.0),  # hung
        (700, 8, 1.0),  # the same heartbeat again
        (20, 9, 2.0),  # it was only slow
        (700, 9, 3.0),
    ]
    for quiet, records, when in history:
        for rank, slow in ((1, quiet), (2, 700)):
            more = {"beats": records, "monotonic": when, "state": "running"}
            found[rank] = beat(rank, slow, rank == 2, 5 if rank == 2 else 4) | more
        dog._judge()
        assert ended == []
    found[1] = found[1] | {"monotonic": 4.0}
    dog._judge()
    assert ended == [[1]]


def test_a_phase_that_was_slow_before_may_be_slow_again(monkeypatch) -> None:
    current = progress.Progress()
    monkeypatch.setattr(liveness, "CURRENT", current)
    monitor = liveness.ProgressMonitor(600)
    assert monitor.limit_seconds() == 1800, "building, loading and compiling take long"
    current.longest_seconds, current.phase = {"optimizer": 20.0}, "optimizer"
    assert monitor.limit_seconds() == 600
    current.longest_seconds["optimizer"] = 400.0
    assert monitor.limit_seconds() == 2000
    current.recorded_at -= 50
    monitor._progress_at -= 50
    assert monitor.quiet_seconds() >= 50
    monitor._bytes = -(1 << 20)
    monitor.update()
    assert monitor.quiet_seconds() >= 50, "bytes are no progress in a step"
    current.phase, monitor._bytes = "checkpoint", -(1 << 20)
    monitor.update()
    assert monitor.quiet_seconds() < 1, "but they are in a checkpoint"


def test_what_the_watchdog_writes_is_no_progress(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(liveness, "CURRENT", progress.Progress())
    monitor = liveness.ProgressMonitor(600)
    monitor.update()
    monitor._progress_at = liveness.CURRENT.recorded_at = time.monotonic() - 50

    def write() -> None:
        (tmp_path / "file").write_bytes(bytes(1 << 20))

    write()  # a heartbeat with the last collectives
    monitor.update()
    assert monitor.quiet_seconds() >= 50
    thread = threading.Thread(target=write)  # a rank that writes a checkpoint
    thread.start()
    thread.join()
    monitor.update()
    assert monitor.quiet_seconds() < 1


RANK = """
import os, sys, threading, time
from pathlib import Path
from zerolm.distributed import collectives
from zerolm.watchdog import stacks, watchdog
from zerolm.watchdog.progress import record_progress

watchdog.POLL_SECONDS, watchdog.REQUEST_SECONDS, watchdog.EXIT_DELAY_SECONDS = 0.1, 0.3, 0.3
stacks.RESPONSE_SECONDS = 1.0

class Stop:
    reason = received = None
    def receive(self): pass

run_dir, world_size, timeout = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
act = sys.argv[4]
rank = int(os.environ["RANK"])
identities = run_dir / "met"
identities.mkdir(exist_ok=True)

def gather(value):  # a file a rank: the watchdog needs no torch
    import json
    (identities / f"{rank}.tmp").write_text(json.dumps(value))
    (identities / f"{rank}.tmp").rename(identities / f"{rank}.json")
    while len(list(identities.glob("*.json"))) < world_size: time.sleep(0.05)
    return [json.loads((identities / f"{other}.json").read_text()) for other in range(world_size)]

collectives.gather_objects, collectives.broadcast_object = gather, lambda value: "token"
stop = Stop()
stage = f"{rank + 1} of {world_size}" if "STAGES" in os.environ else ""
dog = watchdog.Watchdog(run_dir, rank, timeout, stop, stage)
dog.connect(world_size)
dog.heartbeats.seconds = 0.5
record_progress("data", 1); record_progress("optimizer", 1); record_progress("data", 2)
(run_dir / f"ready-{rank}").touch()
# What looks like torch's own code, to the watchdog, is a rank that waits in a collective.
exec(compile(act, "torch/distributed/x.py" if "# waits" in act else "act.py", "exec"))
print("reason", stop.reason, flush=True)
dog.close("done")
"""
AT_WORK = """
end = time.time() + 60
while time.time() < end: time.sleep(0.05); record_progress("optimizer", 2)
"""
WAITS = "time.sleep(60)  # waits"
HOLDS_THE_GIL = "import re; re.match('(a*)*b', 'a' * 60)"


class Ranks:
    """Processes with a watchdog each and no training."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.started = run_dir, []

    def start(
        self, *acts: str, timeout: float = 600, ranks: int = 0, first: int = 0, **more: str
    ) -> None:
        for rank, act in enumerate(acts, first):
            command = [sys.executable, "-c", RANK, str(self.run_dir), str(ranks or len(acts))]
            self.started.append(
                subprocess.Popen(
                    [*command, str(timeout), act], text=True, cwd=ROOT,
                    env=environment(RANK=str(rank), **more), stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        deadline = time.monotonic() + SECONDS
        while len(list(self.run_dir.glob("ready-*"))) < (ranks or len(acts)):
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.05)

    def outputs(self) -> str:
        return "".join(process.communicate(timeout=SECONDS)[0] for process in self.started)

    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").open()]

    def stacks(self, rank: int) -> str:
        return (self.run_dir / "ranks" / f"rank-{rank:05d}.stacks.txt").read_text()


@pytest.fixture
def ranks(tmp_path):
    processes_of_test = Ranks(tmp_path)
    yield processes_of_test
    for process in processes_of_test.started:
        process.kill()
        process.wait()


def test_a_killed_rank_is_named_with_its_signal(ranks) -> None:
    ranks.start(AT_WORK, AT_WORK)
    ranks.started[1].kill()
    output = ranks.outputs()
    assert "rank 1 on" in output and "ended: SIGKILL" in output, output
    (event,) = ranks.events()
    assert event["event"] == "rank_lost" and event["ended"] == "SIGKILL"
    assert event["ranks"][0]["pid"] == ranks.started[1].pid and ranks.started[0].returncode == 1


def test_the_pipeline_stage_of_a_killed_rank_is_named(ranks) -> None:
    ranks.start(AT_WORK, AT_WORK, STAGES="1")
    ranks.started[1].kill()
    output = ranks.outputs()
    assert f"(pid {ranks.started[1].pid}, device 0, stage 2 of 2) ended: SIGKILL" in output, output
    (event,) = ranks.events()
    assert [entry["stage"] for entry in event["ranks"]] == ["2 of 2"]


def test_a_rank_that_was_killed_for_memory_is_said_to_be(ranks) -> None:
    counts = "from zerolm.common import machine\nmachine.oom_kills = lambda: dog._oom_kills + 2\n"
    ranks.start(counts + AT_WORK, AT_WORK)
    ranks.started[1].kill()
    ranks.outputs()
    (event,) = ranks.events()
    killer = "the out-of-memory killer has killed 2 processes of this host since the start"
    assert event["ranks"][0]["reason"] == f"ended: SIGKILL; {killer}"


@pytest.mark.parametrize("host_failed", [True, False])
def test_a_rank_that_aborts_is_blamed_unless_ranks_of_another_host_have_ceased(
    ranks, host_failed
) -> None:
    """NCCL aborts a rank that has lost a peer."""
    fast = """
from zerolm.watchdog import silence
dog.heartbeats.seconds, silence.DIAGNOSIS_SECONDS, silence.FOLLOW_SECONDS = 0.3, 2.0, 0.5
for peer in dog.peers.values(): peer["machine"] = "b" if peer["rank"] == 2 else peer["machine"]
dog.heartbeats.machine = "b" if rank == 2 else dog.heartbeats.machine
"""
    ranks.start(fast + "os.abort()", fast + AT_WORK, fast + AT_WORK)
    time.sleep(0.0 if host_failed else 4.5)
    ranks.started[2].kill()
    output = ranks.outputs()
    (event,) = ranks.events()
    (blamed,) = event["ranks"]
    if host_failed:
        assert blamed["rank"] == 2 and "(the only rank on" in blamed["reason"], output
        assert "(rank 0 on" in blamed["reason"]
    else:
        assert (blamed["rank"], blamed["reason"]) == (0, "ended: SIGABRT")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("act", "shown"),
    [
        ("while True: pass", '"act.py", line 1 in <module>'),
        (HOLDS_THE_GIL, "re/__init__.py"),
    ],
    ids=["in Python", "holding the interpreter"],
)
def test_an_endless_loop_is_named_with_its_stacks(ranks, act, shown) -> None:
    ranks.start(WAITS, act, timeout=3)
    output = ranks.outputs()
    assert "watchdog: rank 1 on" in output
    (event,) = ranks.events()
    assert event["event"] == "hang" and [entry["rank"] for entry in event["ranks"]] == [1]
    assert shown in ranks.stacks(1), ranks.stacks(1)
    assert [process.returncode != 0 for process in ranks.started] == [True, True]


def test_a_stopped_rank_is_named_with_its_stacks_and_ended(ranks) -> None:
    ranks.start("watchdog.STOPPED_SECONDS = 2.0\n" + AT_WORK, WAITS)
    ranks.started[1].send_signal(signal.SIGSTOP)
    output = ranks.outputs()
    assert "is stopped (SIGSTOP)" in output
    assert "line 1 in <module>" in ranks.stacks(1), "woken to write them"
    assert ranks.started[1].returncode != 0


@pytest.mark.soak
def test_a_run_that_was_suspended_continues(ranks) -> None:
    ranks.start("time.sleep(16)", "time.sleep(16)", timeout=600)
    for process in ranks.started:
        process.send_signal(signal.SIGSTOP)
    time.sleep(13)
    for process in ranks.started:
        process.send_signal(signal.SIGCONT)
    assert ranks.outputs().count("reason None") == 2
    assert [process.returncode for process in ranks.started] == [0, 0]
    assert not list((ranks.run_dir / "ranks").glob("verdict*"))


def test_sigquit_writes_the_stacks_and_does_nothing_else(ranks) -> None:
    ranks.start("time.sleep(1)")
    ranks.started[0].send_signal(signal.SIGQUIT)
    assert "reason None" in ranks.outputs() and ranks.started[0].returncode == 0
    assert "in <module>" in ranks.stacks(0)


def test_a_file_can_request_a_stop(ranks) -> None:
    ranks.start("while stop.reason is None: time.sleep(0.1)")
    (ranks.run_dir / "ranks" / "stop-token").write_text("SIGTERM\n")
    assert "reason SIGTERM" in ranks.outputs()


def test_a_failing_heartbeat_does_not_end_the_run(ranks) -> None:
    """Ranks that cannot record their end exit only after both have closed their watchdogs."""
    sleep = """
import atexit
def wait_for_all():
    (run_dir / f"closed-{rank}").touch()
    while len(list(run_dir.glob("closed-*"))) < world_size: time.sleep(0.05)
atexit.register(wait_for_all)
time.sleep(2)
"""
    hide = "(run_dir / 'ranks').rename(run_dir / 'away')\n"
    ranks.start(hide + sleep, sleep, timeout=600)
    assert ranks.outputs().count("reason None") == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_whose_launcher_is_gone_end_the_run_and_name_their_host(ranks, lost) -> None:
    """Without it, the error of a collective on another host would be blamed on the network."""
    run_dir = ranks.run_dir
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {RANK!r}, {str(run_dir)!r}, "2", "600", {AT_WORK!r}])
time.sleep(60)
"""], env=environment(RANK=str(lost), ZEROLM_TEST=str(run_dir)), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    ranks.start(AT_WORK, ranks=2, first=1 - lost)
    launcher.kill()
    output = launcher.communicate(timeout=SECONDS)[0]  # ends when the rank has ended too
    assert "its launcher is gone" in output
    assert processes.marked_pids(f"ZEROLM_TEST={run_dir}") == []
    ranks.outputs()
    assert ranks.started[0].returncode == 1
    (event,) = ranks.events()
    assert event["event"] == "launcher_lost" and event["reason"] == "its launcher is gone"
    (blamed,) = event["ranks"]
    assert (blamed["rank"], blamed["pid"]) == (lost, event["pid"])
    assert event["host"] == blamed["host"]


def test_a_rank_saves_when_its_terminal_is_closed_and_the_launcher_is_gone(tmp_path) -> None:
    """The kernel sends SIGHUP to the launcher and to the ranks at once."""
    act = """
import signal
signal.signal(signal.SIGHUP, lambda number, frame: setattr(stop, "reason", "SIGHUP"))
(run_dir / "handles").touch()
while stop.reason is None: time.sleep(0.05)
time.sleep(4)
(run_dir / "saved").touch()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {RANK!r}, {str(tmp_path)!r}, "1", "600", {act!r}])
time.sleep(60)
"""], env=environment(RANK="0"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "handles").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGHUP)
    output = launcher.communicate(timeout=SECONDS)[0]  # ends when the rank has ended too
    assert launcher.returncode == -signal.SIGHUP
    assert (tmp_path / "saved").exists() and "reason SIGHUP" in output, output


def test_a_signal_reaches_only_the_intended_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={**os.environ, "ZEROLM_TEST": "this"},
    )
    time.sleep(0.3)
    look = processes.inspect_process(process.pid)
    assert look is not None and look.parent == os.getpid() and processes.alive(look)
    assert not processes.signal_marked(process.pid, signal.SIGTERM, "ZEROLM_TEST=that")
    earlier = processes.Process(process.pid, "S", os.getpid(), look.start_ticks - 1, 0)
    assert not processes.signal_process(earlier, signal.SIGKILL) and not processes.alive(earlier)
    assert process.poll() is None
    assert not processes.handles_signal(process.pid, signal.SIGQUIT)
    assert processes.signal_marked(process.pid, signal.SIGTERM, "ZEROLM_TEST=this")
    deadline = time.monotonic() + SECONDS
    while (now := processes.inspect_process(process.pid)) and now.state != "Z":
        assert time.monotonic() < deadline
    assert now is not None and processes.exit_reason(now.wait_status) == "SIGTERM"
    process.wait()
