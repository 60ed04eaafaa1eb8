"""A run under the supervisor: after kills, stops and hangs it equals an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end import run_digest
from tests.end_to_end.recipe import profile, recipe
from tests.launching import run_module, run_ranks
from tests.supervised import Supervised
from zerolm.common import processes

STEPS, SAVE = 60, 6
REPORT_SECONDS = 30
# So that a signal does not arrive after the end, nor the end before a lost launcher is noticed.
SLOW = "step.begin:*:*:sleep=0.15"
PARTS = [
    "deepspeed", "node launcher", "imports", "checks", "connection", "model", "states",
    "first step",
]  # fmt: skip


@pytest.fixture(scope="module")
def ds_json(tmp_path_factory) -> Path:
    return profile(tmp_path_factory.mktemp("profile") / "ds.json", 2, bf16=False)


def run_flags(llama: Path, corpus: Path, run_dir: Path, ds_json: Path) -> list[object]:
    arguments = recipe(llama, corpus, run_dir, ds_json, STEPS, micro=2)
    return [*arguments, "--checkpoint_interval", SAVE, "--wandb", "off"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, llama, corpus, ds_json) -> dict:
    base = tmp_path_factory.mktemp("uninterrupted")
    (base / "ledger").mkdir()
    arguments = run_flags(llama, corpus, base / "run", ds_json)
    done = run_ranks(2, *arguments, ZEROLM_LEDGER=str(base / "ledger"))
    assert done.returncode == 0, done.stdout[-4000:]
    digest = run_digest.digest(base / "run", base / "ledger")
    assert list(digest["losses"]) == list(digest["ledger"]) == list(range(1, STEPS + 1))
    return digest


@pytest.fixture
def setup(tmp_path, llama, corpus, ds_json):
    """Return (run directory, flags of the run, environment variables)."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "once").mkdir()
    run_dir = tmp_path / "run"
    variables = {"ZEROLM_LEDGER": str(tmp_path / "ledger"), "FAULT_ONCE": str(tmp_path / "once")}
    return run_dir, run_flags(llama, corpus, run_dir, ds_json), variables


def names_of(events: list[dict]) -> list[str]:
    return [event["event"] for event in events]


def differences(run_dir: Path, uninterrupted: dict) -> list[str]:
    return run_digest.differences(
        run_digest.digest(run_dir, run_dir.parent / "ledger"), uninterrupted
    )


@pytest.mark.parametrize(
    "lost", ["rank", pytest.param("rank, then launcher", marks=pytest.mark.soak)]
)
def test_killed_processes_are_reported_and_the_run_resumes_exactly(
    setup, uninterrupted, lost
) -> None:
    run_dir, arguments, variables = setup
    victim = random.randrange(2)
    # The save of step 12 waits for that of step 6, from which the run can then resume.
    step = random.randrange(2 * SAVE + 1, STEPS - 40)
    around = (f"step.begin:*:{each}:sleep=0.15" for each in range(2 * SAVE, step + 7))
    variables |= {"FAULT": SLOW if "launcher" in lost else ",".join(around), "FAULT_ONCE": ""}
    started = time.monotonic()
    with Supervised(run_dir, arguments, **variables) as run:
        run.wait_for_step(step)
        first_step_seconds = time.monotonic() - started
        pid = run.heartbeats()[victim]["pid"]
        run.send(pid, signal.SIGKILL)
        report = f"rank {victim} on {os.uname().nodename} (pid {pid})"
        run.wait_for("not reported", lambda: report in run.output(), REPORT_SECONDS)
        run.wait_for("not resumed", lambda: "resume" in names_of(run.events()), 120)
        if "launcher" in lost:
            run.wait_for_step(step + 12)
            launcher = run.heartbeats()[0]["launcher_pid"]
            run.send(launcher, signal.SIGKILL)  # `deepspeed` itself then exits with 0
        assert run.wait(180) == 0, run.output()[-6000:]
        output = run.output()
        assert processes.marked_pids(run.mark) == []
    event = next(event for event in run.events() if event["event"] == "rank_lost")
    assert event["ranks"][0]["rank"] == victim and abs(event["step"] - step) <= 6, (step, event)
    line = next(line for line in output.splitlines() if line.startswith("supervise:   rank"))
    assert report in line and "SIGKILL" in line and f"in step {event['step']}" in line
    failures = 1
    if "launcher" in lost:
        failures = 2
        # Either the ranks notice first that their own launcher is gone, or that `deepspeed` is.
        assert "the node launcher on" in output or "the ranks were alive and saved" in output
    assert names_of(run.events()).count("attempt_failed") == failures
    assert differences(run_dir, uninterrupted) == [], f"rank {victim} killed at step {step}"
    starts = [event for event in run.events() if event["event"] == "startup"]
    assert [list(start["parts"]) for start in starts] == [PARTS] * (1 + failures)
    for start in starts:
        assert start["seconds"] == pytest.approx(sum(start["parts"].values()))
        assert all(seconds >= 0 for seconds in start["parts"].values())
    assert starts[0]["seconds"] < first_step_seconds
    assert "lost_seconds" not in starts[0]
    assert all(start["lost_seconds"] > start["parts"]["imports"] for start in starts[1:])
    first, again = (sum(start["parts"][name] for name in PARTS[:3]) for start in starts[:2])
    assert again < first / 2  # forked from the imports of the first
    recovered = [event for event in run.events() if event["event"] == "recovered"]
    assert recovered[0]["step"] >= event["step"] and len(recovered) == failures
    for event in recovered:
        assert list(event["parts"]) == ["noticed", "ended", "pause", *PARTS, "repeated steps"]
        assert event["seconds"] == pytest.approx(sum(event["parts"].values()))
        assert 0 <= event["repeated_steps"] <= 2 * SAVE


@pytest.mark.soak
def test_a_request_to_stop_saves_once_and_the_run_resumes_exactly(setup, uninterrupted) -> None:
    run_dir, arguments, variables = setup
    newest, slowly = 0, {**variables, "FAULT": SLOW, "FAULT_ONCE": ""}
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGUSR2, "SIGUSR2")):
        with Supervised(run_dir, arguments, **slowly) as run:
            run.wait_for_step(newest + 4)
            run.signal_supervisor(number)
            assert run.wait(120) == 75, run.output()[-4000:]
            assert processes.marked_pids(run.mark) == []
        last = run.events()[-1]
        assert last["event"] == "stopped" and last["reason"] == name
        newest = saved(run_dir, last["step"])
    # The same without a supervisor, with a time limit.
    limited = run_ranks(2, *arguments, "--stop_after", "1s", **variables)
    assert limited.returncode == 75, limited.stdout[-4000:]
    assert "stopped on request (--stop_after)" in limited.stdout
    newest = saved(run_dir, newest + 1)

    # A second Ctrl-C during the save, while another job of the same user runs.
    other_job = [sys.executable, "-c", "import time; time.sleep(600)", *map(str, arguments)]
    other = subprocess.Popen(
        other_job, env={**os.environ, "ZEROLM_SUPERVISOR": "0123456789abcdef-1"}
    )
    slow = {**variables, "FAULT": "checkpoint.write:*:*:sleep=60", "FAULT_ONCE": ""}
    try:
        with Supervised(run_dir, [*arguments, "--checkpoint_interval", 1000], **slow) as run:
            run.wait_for_step(newest + 3)
            run.signal_supervisor(signal.SIGINT)
            run.wait_for("no save", lambda: "FAULT checkpoint.write" in run.output(), 60)
            run.signal_supervisor(signal.SIGINT)
            assert run.wait(30) == 130, run.output()[-4000:]
            assert processes.marked_pids(run.mark) == []
        assert other.poll() is None, "processes of another job must not be killed"
    finally:
        other.kill()
        other.wait()
    verified = run_module("zerolm", "verify-checkpoint", run_dir)
    assert verified.returncode == 0 and f"step-{newest:08d}" in verified.stdout, verified.stderr

    done = run_ranks(2, *arguments, **variables)
    assert done.returncode == 0, done.stdout[-4000:]
    assert differences(run_dir, uninterrupted) == []


@pytest.mark.soak
def test_a_closed_terminal_loses_no_step_whichever_process_gets_the_signal(
    setup, uninterrupted
) -> None:
    run_dir, arguments, variables = setup
    slowly = {**variables, "FAULT": SLOW, "FAULT_ONCE": ""}
    with Supervised(run_dir, arguments, **slowly) as run:
        run.wait_for_step(4)
        run.signal_supervisor(signal.SIGHUP)
        assert run.wait(120) == 75, run.output()[-4000:]
        last = run.events()[-1]
        assert (last["event"], last["reason"]) == ("stopped", "SIGHUP")
        newest = saved(run_dir, last["step"])
    with Supervised(run_dir, arguments, **slowly) as run:
        run.wait_for_step(newest + 4)
        run.signal_supervisor(signal.SIGQUIT)  # which ends it
        assert run.wait(60) == -signal.SIGQUIT
        deadline = time.monotonic() + 120
        while processes.marked_pids(run.mark):
            assert time.monotonic() < deadline, run.output()[-4000:]
            time.sleep(0.1)
        newest = saved(run_dir, newest + 4)  # by the ranks, which have noticed
    with Supervised(run_dir, arguments, **slowly) as run:
        run.wait_for_step(newest + 4)
        run.send(run.heartbeats()[0]["launcher_pid"], signal.SIGHUP)
        assert run.wait(240) == 0, run.output()[-6000:]
        assert names_of(run.events()).count("attempt_failed") == 1
    assert differences(run_dir, uninterrupted) == []


def saved(run_dir: Path, at_least: int) -> int:
    """Return the step of the checkpoint that the pointer names."""
    pointer = (run_dir / "checkpoints" / "latest").read_text().strip()
    step = int(pointer.rpartition("-")[2])
    assert step >= at_least and (run_dir / "checkpoints" / pointer / "MANIFEST.json").exists()
    return step


@pytest.mark.soak
def test_a_hang_is_reported_with_stacks_and_ended(setup, uninterrupted) -> None:
    run_dir, arguments, variables = setup
    faults = "step.begin:1:15:hang,step.begin:0:30:stop"
    arguments = [*arguments, "--hang_timeout", "10s", "--num_workers", 1]
    with Supervised(run_dir, arguments, FAULT=faults, **variables) as run:
        run.wait_for("no hang", lambda: "hang" in names_of(run.events()), 180)
        loop = next(event for event in run.events() if event["event"] == "hang")
        assert loop["step"] == 15 and loop["ranks"][0]["rank"] == 1, loop
        assert loop["ranks"][0]["sequences"] == [14 * 8, 8]
        assert "faults.py" in loop["ranks"][0]["doing"]
        assert "waiting for it in" in loop["ranks"][0]["reason"]
        records = run_dir / "ranks"
        run.wait_for("no record", lambda: list(records.glob("flight-recorder-*-0")), 30)
        run.wait_for("no second", lambda: names_of(run.events()).count("hang") == 2, 180)
        stopped = [event for event in run.events() if event["event"] == "hang"][1]
        assert stopped["ranks"][0]["rank"] == 0 and "SIGSTOP" in stopped["ranks"][0]["reason"]
        # Then a loader worker dies.
        run.wait_for("not resumed", lambda: names_of(run.events()).count("resume") == 2, 120)
        run.wait_for_step(31)
        rank = run.heartbeats()[1]["pid"]
        (worker,) = [child.pid for child in processes.children(rank)]
        run.send(worker, signal.SIGKILL)
        assert run.wait(180) == 0, run.output()[-6000:]
        output = run.output()
    lost = [event for event in run.events() if event["event"] == "rank_lost"]
    assert len(lost) == 1 and f"DataLoader worker (pid {worker})" in lost[0]["ended"], lost
    for rank, frame in ((0, "pretrain.py"), (1, "faults.py"), (1, "dataloader.py")):
        stacks = (run_dir / "ranks" / f"rank-{rank:05d}.stacks.txt").read_text()
        assert frame in stacks, f"rank {rank}: {stacks[-3000:]}"
    assert "faults.py" in output, "the stacks must be printed, too"
    assert differences(run_dir, uninterrupted) == []


@pytest.mark.soak
def test_the_same_crash_three_times_ends_in_a_diagnosis(setup) -> None:
    run_dir, arguments, _ = setup
    with Supervised(run_dir, arguments, FAULT="step.end:1:14:kill") as run:
        code = run.wait(240)
    output = run.output()
    assert code == 1 and "the run has failed 3 times in step 14" in output, output[-4000:]
    assert "sequences of that step: 104 to 111" in output
    assert "SIGKILL" in output and "the newest checkpoint is from step" in output
    assert names_of(run.events()).count("start") + names_of(run.events()).count("resume") == 3


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first_seed", [0, 5, 10, 15])
def test_a_rank_killed_anywhere_is_reported_and_the_run_resumes_exactly(
    tmp_path_factory, llama, corpus, ds_json, uninterrupted, first_seed
) -> None:
    for seed in range(first_seed, first_seed + 5):
        generator = random.Random(seed)
        base = tmp_path_factory.mktemp(f"seed-{seed}")
        for name in ("ledger", "once"):
            (base / name).mkdir()
        victim, step = generator.randrange(2), generator.randrange(1, STEPS)
        point = generator.choice(("step.begin", "step.backward", "step.end"))
        variables = {
            "FAULT": f"{point}:{victim}:{step}:kill", "FAULT_ONCE": str(base / "once"),
            "ZEROLM_LEDGER": str(base / "ledger"),
        }  # fmt: skip
        with Supervised(
            base / "run", run_flags(llama, corpus, base / "run", ds_json), **variables
        ) as run:
            run.wait_for("no fault", lambda run=run: "FAULT" in run.output(), 180)
            killed_at = time.monotonic()
            run.wait_for(
                "not reported",
                lambda run=run, victim=victim: f"watchdog: rank {victim} on" in run.output(),
                REPORT_SECONDS,
            )
            seconds = time.monotonic() - killed_at
            assert run.wait(180) == 0, run.output()[-6000:]
        assert differences(base / "run", uninterrupted) == [], variables["FAULT"]
        print(
            f"seed {seed}: {variables['FAULT']}: reported after {seconds:.1f} s, bits equal",
            flush=True,
        )
