"""The supervisor's decisions, with a fake pretrain.py whose launches end as the test plans."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.supervise.outcome import Outcome
from launch.supervise.restarts import Policy, Restarts
from tests.launching import ROOT, write_json, write_shards
from tests.zerolm.report.run_directories import heartbeat
from zerolm.checkpoint import memory
from zerolm.common import processes
from zerolm.tracking import report_process

SECONDS = 60


class FakeRun:
    """A run directory, a fake pretrain.py, and a mark by which the test finds its processes."""

    def __init__(self, directory: Path):
        self.directory, self.run_dir = directory, directory / "run"
        self.script = shutil.copy(
            ROOT / "tests/launch/supervise/fake_pretrain.py", directory / "pretrain.py"
        )
        self.mark = f"ZEROLM_TEST={directory}"

    def start(self, plan: str, *flags: str, launcher=(), **more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "launch", "supervise", "--backoff", "0.02s", *flags, "--"]
        command += [sys.executable, self.script, *launcher, "--run_dir", str(self.run_dir)]
        variables = {"PLAN": plan, "ZEROLM_TEST": str(self.directory), **more}
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, text=True,
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
        time.sleep(0.3)  # until it has started its child

    def processes(self) -> list[int]:
        return processes.marked_pids(self.mark)


@pytest.fixture
def fake_run(tmp_path):
    run = FakeRun(tmp_path)
    yield run
    for pid in run.processes():
        processes.signal_marked(pid, signal.SIGKILL, run.mark)


@pytest.mark.parametrize(
    ("plan", "code", "num_starts", "message"),
    [
        ("crash crash advance done", 0, 4, "rank 3 on node7 (pid 9) ended: SIGKILL, in step 7"),
        ("silent done", 0, 2, "the run logged no `done` event"),
        ("stopped", 75, 1, "stopped on request"),
        ("gave_up", 76, 1, "gave up"),
        ("refuse", 2, 1, "refused"),
        ("crash refuse refuse refuse done", 0, 5, "refused, nothing was written. data: gone"),
        ("crash changed changed changed done", 2, 4, "refused 3 times, since values have changed"),
        ("crash changed changed early changed done", 0, 6, "settings.seed: 1 -> 2"),
        ("early early early done", 1, 3, "the run has failed 3 times before its first step"),
        ("crash early early early done", 0, 5, "failed before its first step"),
        ("early advance early advance early crash done", 0, 7, "attempt 6 failed"),
    ],
)
def test_the_exit_code_is_that_of_the_run(fake_run, plan, code, num_starts, message) -> None:
    actual, output = fake_run.supervise(plan)
    assert actual == code and fake_run.num_starts() == num_starts and message in output, output


def test_a_shard_whose_truncation_killed_a_rank_is_named(fake_run) -> None:
    shards = write_shards(fake_run.directory / "shards", 20)
    fake_run.run_dir.mkdir()
    record = {"settings": {"data": [f"{shards}=1.0"], "val_data": []}}
    write_json(fake_run.run_dir / "run.json", record)
    os.truncate(shards / "shard-00000.bin", 100)
    code, output = fake_run.supervise("sigbus done")
    assert code == 0 and "a rank ended with SIGBUS" in output
    assert f"{shards / 'shard-00000.bin'}: 100 bytes, the manifest says " in output
    assert "/dev/shm" not in output


def test_a_sigbus_without_a_truncated_shard_names_shared_memory(fake_run) -> None:
    code, output = fake_run.supervise("sigbus done")
    assert code == 0 and "no shard is shorter than its manifest says; /dev/shm" in output


def test_three_failures_of_one_step_end_in_a_diagnosis(fake_run) -> None:
    fake_run.run_dir.mkdir()
    copies = memory.create_directory(fake_run.run_dir, memory.create_token(fake_run.run_dir))
    code, output = fake_run.supervise("advance crash")
    assert code == 1 and fake_run.num_starts() == 4
    assert not copies.exists(), "of the states in memory, for a run that will not resume"
    for expected in (
        "the run has failed 3 times in step 7", "rank 3 on node7",
        "sequences of that step: 48 to 55",
        "RuntimeError: out of something", "the newest checkpoint is of step 10", "try:",
    ):  # fmt: skip
        assert expected in output, output
    events = [json.loads(line) for line in (fake_run.run_dir / "events.jsonl").open()]
    names = [event["event"] for event in events if "attempt" in event]
    assert names == [*["attempt_failed"] * 3, "supervisor_stopped"]


def test_restarts_are_counted_since_the_newest_checkpoint(fake_run) -> None:
    flags = ["--max_restarts", "2", "--same_step_limit", "99"]
    code, output = fake_run.supervise("crash crash advance crash crash crash done", *flags)
    assert code == 1 and fake_run.num_starts() == 5
    assert "2 restarts without a newer checkpoint" in output


def test_a_newer_copy_in_memory_is_progress(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "shm")
    restarts = Restarts(Policy(max_restarts=1, same_step_limit=99), tmp_path)
    copies = memory.create_directory(tmp_path, memory.create_token(tmp_path))
    for step in (3, 6, 9):
        directory = copies / f"step-{step:08d}"
        directory.mkdir()
        (directory / "MANIFEST-00000.json").write_text("{}")
        assert restarts.add_failure(Outcome(1, step=step + 1)) is None
        assert restarts.pause_seconds() == 0.0
        restarts.count += 1
    assert restarts.shown_checkpoint() == "there is no checkpoint"
    (copies / "step-00000012").mkdir()  # of which no rank has its part
    diagnosis = restarts.add_failure(Outcome(1, step=10))
    assert diagnosis is not None and "1 restarts without a newer checkpoint" in diagnosis


def test_a_run_whose_files_were_changed_ends_with_the_refusal_as_the_reason(tmp_path) -> None:
    restarts = Restarts(Policy(max_restarts=1), tmp_path)
    assert restarts.add_failure(Outcome(1, step=3)) is None
    restarts.count += 1
    assert "refused: correct what is named above" in restarts.add_failure(Outcome(2))


def test_a_restart_reads_the_files_of_the_first_start(fake_run) -> None:
    settings, model = fake_run.directory / "settings.json", fake_run.directory / "model.json"
    settings.write_text('{"seed": 1}')
    model.write_text('{"model_type": "llama"}')
    given = ["--settings", str(settings), "--model_config", str(model)]
    code, output = fake_run.supervise("edit done", launcher=given)
    copies = fake_run.run_dir / "configs"
    added = f"--model_config {copies}/model_config.json --settings {copies}/settings.json"
    assert code == 0 and f"start 1: done {' '.join(given)}" in output, output
    assert added in output and output.count("has changed, or cannot be read") == 2
    assert (copies / "settings.json").read_text() == '{"seed": 1}'
    assert model.name not in [path.name for path in fake_run.directory.iterdir()]


def test_a_refusal_leaves_nothing_behind(fake_run) -> None:
    script = Path(fake_run.script)
    script.write_text("import sys\nsys.exit(2)\n")
    code, _ = fake_run.supervise("refuse")
    assert code == 2 and not fake_run.run_dir.exists()


def test_orphans_of_the_run_are_killed_and_no_other_process(fake_run) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    others = [  # the same command of the same user, also of another supervisor
        subprocess.Popen(command),
        subprocess.Popen(command, env={**os.environ, "ZEROLM_SUPERVISOR": "0123456789abcdef-1"}),
    ]
    try:
        script = (
            "import launch.supervise.attempt, sys\n"
            "launch.supervise.attempt.ORPHAN_SECONDS = 1.0\n"
            "import launch.__main__; sys.exit(launch.__main__.main(sys.argv[1:]))"
        )
        run = [sys.executable, fake_run.script, "--run_dir", str(fake_run.run_dir)]
        variables = {"PLAN": "orphan done", "ZEROLM_TEST": str(fake_run.directory)}
        done = subprocess.run(
            [sys.executable, "-c", script, "supervise", "--backoff", "0.02s", "--", *run],
            cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "killed 1 orphaned process(es)" in done.stderr
        assert fake_run.processes() == []
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_second_ctrl_c_kills_the_run_at_once(fake_run) -> None:
    # Without a rank that could save, the first signal would: so fake the heartbeat of one.
    process = fake_run.start("sleep")
    fake_run.wait_for_start()
    sleeper = next(pid for pid in fake_run.processes() if pid != process.pid)
    process_now = processes.inspect_process(sleeper)
    (fake_run.run_dir / "ranks").mkdir()
    mark = (fake_run.run_dir / "starts").read_text().strip()
    beat = heartbeat(
        0, machine=processes.machine_id(), pid=sleeper, token="1", step=3, limit_seconds=0,
        start_ticks=process_now.start_ticks, supervisor=mark,
    )  # fmt: skip
    (fake_run.run_dir / "ranks" / "rank-00000.json").write_text(json.dumps(beat))
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert process.poll() is None, "it must wait for the ranks"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and "killed all processes of the run" in output
    assert fake_run.processes() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_before_any_rank_has_started_ends_the_launch(fake_run, number) -> None:
    process = fake_run.start("sleep")
    fake_run.wait_for_start()
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, output
    assert fake_run.processes() == []


def test_a_supervisor_that_is_ended_by_sigquit_takes_the_launcher_with_it(fake_run) -> None:
    process = fake_run.start("sleep")
    fake_run.wait_for_start()
    process.send_signal(signal.SIGQUIT)
    assert process.wait(timeout=SECONDS) == -signal.SIGQUIT
    deadline = time.monotonic() + SECONDS
    while len(fake_run.processes()) > 1:  # what is left is what the launcher had started
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, _ = fake_run.supervise("sleep done")
    assert code == 0, "the lock of the directory must have been released"


def test_a_second_supervisor_of_a_directory_is_refused(fake_run) -> None:
    process = fake_run.start("sleep")
    fake_run.wait_for_start()
    code, output = fake_run.supervise("done")
    assert code == 2 and "another supervisor is using it" in output and str(process.pid) in output
    assert fake_run.num_starts() == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)


def write_program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_supervisor_waits_for_the_ranks_of_one_that_was_killed(fake_run) -> None:
    """A rank that saves after its supervisor was killed, and the end of an older run."""
    (fake_run.run_dir / "ranks").mkdir(parents=True)
    for rank, mark in enumerate(("killed-1", "ended-1", None)):
        beat = heartbeat(rank, supervisor=mark)
        (fake_run.run_dir / "ranks" / f"rank-{rank:05d}.json").write_text(json.dumps(beat))
    marks = {"ZEROLM_SUPERVISOR": "killed-1", "ZEROLM_TEST": str(fake_run.directory)}
    command = [sys.executable, "-c", "import time; time.sleep(2); print(time.time())"]
    saving = subprocess.Popen(
        command, env={**os.environ, **marks}, stdout=subprocess.PIPE, text=True
    )
    with saving:
        code, output = fake_run.supervise("done")
        assert saving.stdout is not None
        ended = float(saving.stdout.read())
    waiting = f"waiting for the processes of an earlier supervisor to end: [{saving.pid}]"
    assert code == 0 and output.count(waiting) == 1, output
    assert (fake_run.run_dir / "starts").stat().st_mtime > ended


def test_a_slurm_job_is_requeued_if_the_run_is_not_done(fake_run) -> None:
    tools = fake_run.directory / "tools"
    tools.mkdir()
    write_program(tools, "scontrol", f'echo "$@" >> {tools}/called')
    slurm = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    assert fake_run.supervise("stopped done", **slurm)[0] == 75
    assert not (tools / "called").exists(), "only with --requeue"
    assert fake_run.supervise("stopped done", "--requeue", **slurm)[0] == 0
    assert not (tools / "called").exists(), "it is done"
    (fake_run.run_dir / "starts").unlink()
    assert fake_run.supervise("stopped", "--requeue", **slurm)[0] == 75
    assert (tools / "called").read_text() == "requeue 4711\n"


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
    assert code == 2 and "2 of 3 hosts pass the check, the run needs 3" in output
    code, output = supervise("--min_hosts", "2")
    assert code == 0 and "--num_nodes 2" in output
    # node1 corrupts values: it stays while there is no other host, and is left out once there is.
    launch[3] = "2"
    code, output = supervise("--backoff", "0.02s", plan="done done corrupt done")
    assert code == 0 and "node1 computed or stored wrong values, but there is no spare" in output
    hostfile.write_text("node1 slots=2\nnode3 slots=2\nnode4 slots=2\n")
    (fake_run.run_dir / "starts").unlink()
    code, output = supervise("--backoff", "0.02s", plan="corrupt done")
    assert code == 0 and "step 7: a bit flipped" in output and "hosts: node3, node4" in output


def test_a_report_that_hangs_delays_neither_a_restart_nor_the_end(fake_run) -> None:
    fake_run.run_dir.mkdir()
    (fake_run.run_dir / "run.json").write_text(json.dumps({"settings": {"report_interval": 180}}))
    os.mkfifo(fake_run.run_dir / "metrics-rolled-back-0001.jsonl")  # its reader waits forever
    start = time.monotonic()
    code, output = fake_run.supervise("crash crash done")
    assert (code, fake_run.num_starts()) == (0, 3), output
    assert time.monotonic() - start < report_process.FINISH_SECONDS
    assert not fake_run.processes(), "the report's process must have ended, too"


def test_the_supervisor_survives_whatever_it_finds_in_the_run_directory(fake_run) -> None:
    """Copies of checkpoints, odd events and heartbeats, and a log that cannot be written."""
    checkpoints, ranks = fake_run.run_dir / "checkpoints", fake_run.run_dir / "ranks"
    for path in (checkpoints / "step-00000099.bak", checkpoints / "step-x", ranks):
        path.mkdir(parents=True)
        (path / "MANIFEST.json").write_text("{}")
    (checkpoints / "step-00000098").symlink_to(checkpoints / "step-00000099.bak")
    (ranks / "rank-00000.json").write_text('{"rank": [], "step": "x"}')
    code, output = fake_run.supervise("odd crash done")
    assert (code, fake_run.num_starts()) == (0, 3), output
    (fake_run.run_dir / "starts").unlink()
    (fake_run.run_dir / "events.jsonl").unlink()
    (fake_run.run_dir / "events.jsonl").mkdir()  # as unwritable as on a failing disk
    code, output = fake_run.supervise("silent silent silent")
    assert (code, fake_run.num_starts()) == (1, 3), output
    assert "cannot log the event attempt_failed: IsADirectoryError" in output
    assert "Traceback" not in output and "there is no checkpoint" in output
