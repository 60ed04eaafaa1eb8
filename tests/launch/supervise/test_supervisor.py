"""The processes of a supervised run: stopped, waited for or killed, and no others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.supervise.fake_run import SECONDS, fake_slurm
from tests.launching import ROOT
from tests.zerolm.report.run_directories import heartbeat
from zerolm.common import processes
from zerolm.tracking import report_process


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
    slurm, called = fake_slurm(fake_run.directory, "echo RUNNING 0 None")
    assert fake_run.supervise("stopped done", **slurm)[0] == 75
    assert not called.exists(), "only with --requeue"
    assert fake_run.supervise("stopped done", "--requeue", **slurm)[0] == 0
    assert not called.exists(), "it is done"
    (fake_run.run_dir / "starts").unlink()
    code, output = fake_run.supervise("stopped", "--requeue", **slurm)
    assert code == 75 and "supervise: job 4711 is requeued\n" in output
    assert called.read_text() == "requeue 4711\n"


def test_a_report_that_hangs_delays_neither_a_restart_nor_the_end(fake_run) -> None:
    fake_run.run_dir.mkdir()
    (fake_run.run_dir / "run.json").write_text(json.dumps({"settings": {"report_interval": 180}}))
    os.mkfifo(fake_run.run_dir / "metrics-rolled-back-0001.jsonl")  # its reader waits forever
    reports = fake_run.run_dir / "metrics-rolled-back-0001.jsonl"
    start = time.monotonic()
    code, output = fake_run.supervise("crash crash done")
    assert (code, fake_run.num_starts()) == (0, 3), output
    hung = time.monotonic()
    reports.unlink()
    (fake_run.run_dir / "starts").unlink()
    assert fake_run.supervise("crash crash done")[0] == 0
    without = time.monotonic() - hung
    assert hung - start < without + report_process.FINISH_SECONDS
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
