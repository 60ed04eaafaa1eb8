"""Uploads to a real HTTP server: a local S3 (moto), behind a proxy that makes requests fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.endpoints import (
    BUCKET,
    NO_S3,
    SECRET,
    FaultyProxy,
    s3_environment,
    s3_server,
    unresponsive_port,
)
from tests.launching import ROOT, environment, run_module
from tests.zerolm.upload.published import contents, events, publish
from zerolm.checkpoint.directory import read, verify_files

pytestmark = pytest.mark.skipif(bool(NO_S3), reason=NO_S3)
SIZE = 3_000_000


@pytest.fixture(scope="module")
def s3_port():
    with s3_server() as port:
        yield port


def zerolm(*words: object, port: int, **more: str) -> subprocess.CompletedProcess[str]:
    return run_module("zerolm", *words, timeout=420, **s3_environment(port), **more)


def marked(port: int, prefix: str) -> list[str]:
    """List the steps with a manifest, as botocore sees the bucket."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
        aws_access_key_id="test", aws_secret_access_key="test",
    )  # fmt: skip
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return [item["Key"].split("/")[-2] for item in listed if item["Key"].endswith("MANIFEST.json")]


def test_a_run_is_uploaded_to_s3_and_restored_despite_failing_requests(tmp_path, s3_port) -> None:
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/failing"
    run_dir.mkdir()
    publish(run_dir, 5, SIZE)
    newest = publish(run_dir, 10, 40_000_000)  # several pieces
    with FaultyProxy(s3_port) as proxy:
        proxy.fail_every = 6
        done = zerolm("upload", run_dir, url, "--keep", 1, port=proxy.port)
        assert done.returncode == 0, done.stdout + done.stderr
        assert marked(s3_port, "failing") == ["step-00000010"]
        puts = [path for method, path in proxy.requests if method == "PUT"]
        assert puts[-1].startswith(f"/{BUCKET}/failing/step-00000010/MANIFEST.json"), "last"
        assert len(proxy.requests) >= 12, "two requests have failed"
        back = zerolm("restore", url, tmp_path / "again", port=proxy.port)
    assert back.returncode == 0, back.stdout + back.stderr
    found = tmp_path / "again" / "checkpoints" / newest.name
    assert contents(found) == contents(newest) and verify_files(read(found)) == []
    assert (tmp_path / "again" / "metrics.jsonl").read_text().count("\n") == 2
    written = b"".join([*contents(run_dir).values(), *contents(tmp_path / "again").values()])
    output = done.stdout + done.stderr + back.stdout + back.stderr
    assert SECRET.encode() not in written and SECRET not in output


def test_an_upload_killed_within_a_file_is_resumed(tmp_path, s3_port) -> None:
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/killed"
    run_dir.mkdir()
    publish(run_dir, 5, SIZE)
    with FaultyProxy(s3_port) as proxy:
        proxy.bytes_per_second = SIZE
        words = [sys.executable, "-m", "zerolm", "upload", str(run_dir), url]
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(**s3_environment(proxy.port)),
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not any("model.pt" in path for _, path in proxy.requests):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        assert marked(s3_port, "killed") == []
        proxy.bytes_per_second = None
        nothing = zerolm("restore", url, tmp_path / "none", port=proxy.port)
        assert nothing.returncode == 2 and "contains no complete checkpoint" in nothing.stderr
        assert not (tmp_path / "none").exists()
        done = zerolm("upload", run_dir, url, port=proxy.port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert marked(s3_port, "killed") == ["step-00000005"]
    assert len(events(run_dir, "upload")) == 1


@pytest.mark.soak
def test_a_store_that_fails_or_hangs_is_an_event_within_bounded_time(tmp_path) -> None:
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/broken"
    run_dir.mkdir()
    publish(run_dir, 5)
    with FaultyProxy() as proxy:
        proxy.status = 500
        failed = zerolm("upload", run_dir, url, port=proxy.port)
        assert failed.returncode == 1 and "Traceback" not in failed.stdout + failed.stderr
        lost = zerolm("restore", url, tmp_path / "again", port=proxy.port)
        assert lost.returncode == 2 and "would start at step 0" in lost.stderr
    (event,) = events(run_dir, "upload_failed")
    assert "(3 attempts)" in event["error"] and SECRET not in event["error"]
    assert not list((tmp_path / "again").glob("checkpoints/step-*"))


@pytest.mark.soak
def test_a_store_that_never_answers_is_given_up(tmp_path) -> None:
    run_dir, url = tmp_path / "run", f"s3://{BUCKET}/deaf"
    run_dir.mkdir()
    publish(run_dir, 5)
    with unresponsive_port() as port:
        failed = zerolm("upload", run_dir, url, port=port)
        assert failed.returncode == 1
    assert "imeout" in events(run_dir, "upload_failed")[0]["error"]


def test_wrong_credentials_and_a_missing_bucket_are_reported_at_once(tmp_path, s3_port) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    publish(run_dir, 5)
    failed = zerolm("upload", run_dir, "s3://no-such-bucket/first", port=s3_port)
    assert failed.returncode == 1 and "no-such-bucket" in failed.stdout
    with FaultyProxy() as proxy:
        proxy.status = 403
        denied = zerolm("upload", run_dir, f"s3://{BUCKET}/first", port=proxy.port)
    assert denied.returncode == 1 and "PermissionError" in denied.stdout
    assert not any("attempts" in event["error"] for event in events(run_dir, "upload_failed"))
    assert json.loads((run_dir / "run.json").read_text()) == {"settings": {"seed": 5}}
    assert Path(run_dir / "checkpoints" / "step-00000005").is_dir()
