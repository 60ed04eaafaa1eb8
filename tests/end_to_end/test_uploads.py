"""A run with an object store: a lost disk, and endpoints that hang or answer 500."""

import shutil
import statistics
import time
from pathlib import Path

import pytest

from tests.end_to_end import run_digest
from tests.end_to_end.killed_runs import wait_for_step
from tests.end_to_end.recipe import profile, recipe
from tests.endpoints import (
    BUCKET,
    NO_S3,
    SECRET,
    FaultyProxy,
    WandbServer,
    s3_environment,
    s3_server,
)
from tests.launching import events, kill_session, rows, run_ranks, start

pytestmark = pytest.mark.skipif(bool(NO_S3), reason=NO_S3)
STEPS, SAVE = 60, 10


def run_flags(llama, corpus, run_dir: Path, json_file: Path, *more: object) -> list[object]:
    arguments = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    return [*arguments, "--checkpoint_interval", SAVE, "--checkpoint_keep", 2, *more]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, llama, corpus):
    base = tmp_path_factory.mktemp("uninterrupted")
    arguments = run_flags(llama, corpus, base / "run", profile(base / "ds.json", 2, False))
    (base / "ledger").mkdir()
    done = run_ranks(2, *arguments, "--wandb", "off", ZEROLM_LEDGER=str(base / "ledger"))
    assert done.returncode == 0, done.stdout[-4000:]
    return base


@pytest.mark.soak
def test_a_run_whose_disk_is_lost_resumes_from_the_store_bit_for_bit(
    tmp_path, llama, corpus, uninterrupted
) -> None:
    run_dir, ledger = tmp_path / "run", tmp_path / "ledger"
    ledger.mkdir()
    more = ["--upload_to", f"s3://{BUCKET}/first", "--upload_keep", 2, "--wandb", "off"]
    arguments = run_flags(llama, corpus, run_dir, profile(tmp_path / "ds.json", 2, False), *more)
    with s3_server() as port, FaultyProxy(port) as proxy:
        proxy.fail_every = 10
        environment = {**s3_environment(proxy.port), "ZEROLM_LEDGER": str(ledger)}
        slow = {
            **environment,
            "FAULT": "step.begin:*:*:sleep=0.3",
        }  # or the run would end before the kill
        process = start(2, tmp_path / "log", *arguments, **slow)
        try:
            wait_for_step(run_dir, 1, seconds=120)
            deadline = time.monotonic() + 60
            while not events(run_dir, "upload"):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
        finally:
            kill_session(process.pid)
            process.wait(timeout=30)
        assert not events(run_dir, "done"), "the run must be killed before its end"
        shutil.rmtree(run_dir)
        done = run_ranks(2, *arguments, **environment)
        assert done.returncode == 0, done.stdout[-4000:]
    (restored,) = events(run_dir, "restored")
    assert restored["step"] >= SAVE and f"resume: {run_dir}" in done.stdout
    ours = run_digest.digest(run_dir, ledger)
    assert not run_digest.differences(
        ours, run_digest.digest(uninterrupted / "run", uninterrupted / "ledger")
    )
    assert len(events(run_dir, "upload")) >= 1 and not events(run_dir, "upload_unfinished")
    output = done.stdout + (tmp_path / "log").read_text()
    assert SECRET not in output
    for path in run_dir.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_an_unreadable_store_is_refused_instead_of_starting_at_step_zero(
    tmp_path, llama, corpus
) -> None:
    more = ["--upload_to", f"s3://{BUCKET}/first", "--wandb", "off"]
    json_file = profile(tmp_path / "ds.json", 2, False)
    arguments = run_flags(llama, corpus, tmp_path / "run", json_file, *more)
    with FaultyProxy() as proxy:
        proxy.status = 500
        refused = run_ranks(1, *arguments, **s3_environment(proxy.port))
    assert refused.returncode == 2, refused.stdout[-4000:]
    assert "cannot be read" in refused.stdout and "restart at step 0" in refused.stdout
    assert "Traceback" not in refused.stdout and SECRET not in refused.stdout
    assert not (tmp_path / "run").exists(), "nothing was written"


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["hang", "500"])
def test_endpoints_that_hang_or_answer_500_do_not_affect_training(
    tmp_path, llama, corpus, uninterrupted, mode
) -> None:
    run_dir = tmp_path / "run"
    more = ["--upload_to", f"s3://{BUCKET}/{mode}", "--upload_wait", "5s", "--wandb", "online"]
    arguments = run_flags(llama, corpus, run_dir, profile(tmp_path / "ds.json", 2, False), *more)
    with s3_server() as port, FaultyProxy(port) as proxy, WandbServer() as wandb:
        environment = {**s3_environment(proxy.port), **wandb.environment()}
        process = start(2, tmp_path / "log", *arguments, **environment)
        try:
            wait_for_step(run_dir, 1, seconds=180)
            wandb.mode, proxy.hangs = mode, mode == "hang"
            proxy.status = None if mode == "hang" else 500
            while not events(run_dir, "done"):
                assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.1)
            ended = time.monotonic()
            assert process.wait(timeout=180) == 0, (tmp_path / "log").read_text()[-4000:]
            print(f"{mode}: ended {time.monotonic() - ended:.1f} s after the last step")
        finally:
            kill_session(process.pid)
    print(
        f"{mode}: {step_seconds(run_dir)} s per step, {step_seconds(uninterrupted / 'run')} without"
    )
    assert not run_digest.differences(
        run_digest.digest(run_dir), {**run_digest.digest(uninterrupted / "run"), "ledger": {}}
    )
    (unfinished,) = events(run_dir, "upload_unfinished")
    assert f"step-{STEPS:08d}" in unfinished["checkpoints"]
    assert events(run_dir, "tracker_failed")[0]["tracker"] == "wandb"


def step_seconds(run_dir: Path) -> float:
    """Return the median step time without the first step, which compiles and warms up."""
    return statistics.median(list(rows(run_dir, "throughput/step_seconds").values())[1:])
