"""Uploads and restores, with stores on this machine's disk."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, environment
from tests.zerolm.upload.published import contents, events, publish
from zerolm.checkpoint.directory import newest, verify_files
from zerolm.checkpoint.manifest import manifest_digest
from zerolm.common.errors import CheckpointError, reason
from zerolm.common.store import StoreError, call_within
from zerolm.run_dir.files import MANIFEST
from zerolm.upload import uploader
from zerolm.upload.process import Uploads
from zerolm.upload.restore import if_lost, restore
from zerolm.upload.rules import url_problem
from zerolm.upload.run_store import Store


@pytest.fixture
def store(tmp_path) -> str:
    return f"file://{tmp_path}/store/first"


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "store" / "first"


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def whole(place: Path) -> list[str]:
    return sorted(path.parent.name for path in place.glob(f"*/{MANIFEST}"))


def test_a_restored_run_is_identical_to_the_uploaded_one(run_dir, store, tmp_path) -> None:
    for step in (5, 10):
        publish(run_dir, step)
    (run_dir / "rollbacks.json").write_text("{}")
    logs = ["metrics-rolled-back-0001.jsonl", "samples.jsonl", "hellaswag.json", "rank0.log"]
    for file in logs:
        (run_dir / file).write_text('{"step": 5}\n')
    assert uploader.upload(run_dir, store, keep=0) == ["step-00000010", "step-00000005"]
    assert not list((run_dir / "uploads").glob("step-*")), "no link and no note is left"
    again = tmp_path / "again"
    found = restore(store, again)
    assert found is not None and found.progress.step == 10 and verify_files(found) == []
    assert contents(found.directory) == contents(run_dir / "checkpoints" / "step-00000010")
    for file in ("run.json", "metrics.jsonl", "rollbacks.json", *logs):
        assert (again / file).read_bytes() == (run_dir / file).read_bytes()
    (event,) = events(again, "restored")
    assert event["checkpoint"] == "step-00000010" and event["url"] == store
    older = restore(store, tmp_path / "older", step=5)
    assert older is not None and older.progress.step == 5
    with pytest.raises(CheckpointError, match=r"no complete step-00000007; it has step-00000005, "):
        restore(store, tmp_path / "none", step=7)


def test_the_stall_guard_ends_with_the_upload(run_dir, store) -> None:
    publish(run_dir, 5)
    before = set(threading.enumerate())
    uploader.upload(run_dir, store, keep=0)
    deadline = time.monotonic() + 30
    while left := {
        thread.name for thread in set(threading.enumerate()) - before if "_watch" in thread.name
    }:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_files_in_the_store_are_not_sent_again(run_dir, store, monkeypatch) -> None:
    publish(run_dir, 5)
    assert uploader.upload(run_dir, store, keep=0) == ["step-00000005"]
    assert uploader.upload(run_dir, store, keep=0) == []
    publish(run_dir, 10)
    sent = []
    send = Store.send

    def send_one(self, source, name, sha256=None):
        if "model" not in name and "record" not in name:
            raise StoreError("the network is gone")
        sent.append(name)
        return send(self, source, name, sha256)

    monkeypatch.setattr(Store, "send", send_one)
    with pytest.raises(StoreError):
        uploader.upload(run_dir, store, keep=0)
    assert "step-00000010/model.pt" in sent and whole(Path(store[7:])) == ["step-00000005"]
    monkeypatch.setattr(Store, "send", lambda *words: sent.append(words[2]) or send(*words))
    sent.clear()
    assert uploader.upload(run_dir, store, keep=0) == ["step-00000010"]
    assert "step-00000010/optimizer.pt" in sent and "step-00000010/model.pt" not in sent
    (event,) = events(run_dir, "upload_failed")
    assert event["step"] == 10 and event["error"] == "the network is gone"


def test_a_checkpoint_may_be_rotated_away_while_it_is_sent(run_dir, store, monkeypatch) -> None:
    directory = publish(run_dir, 5)
    expected = contents(directory)
    send = Store.send

    def rotate_then_send(*words):
        shutil.rmtree(directory, ignore_errors=True)
        return send(*words)

    monkeypatch.setattr(Store, "send", rotate_then_send)
    uploader.upload(run_dir, store, keep=0)
    assert not directory.exists()
    stored = contents(Path(store[7:]) / "step-00000005")
    assert {name: stored[name] for name in expected} == expected


def test_a_partial_upload_that_cannot_be_completed_is_removed(
    run_dir, store, place, monkeypatch
) -> None:
    directory = publish(run_dir, 5)

    def fail(*words):
        raise StoreError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", fail)
        with pytest.raises(StoreError):
            uploader.upload(run_dir, store, keep=0)
    assert (place / "step-00000005").is_dir() and whole(place) == []
    shutil.rmtree(directory)
    publish(run_dir, 10)
    uploader.upload(run_dir, store, keep=0)
    assert [path.name for path in place.iterdir()] == ["step-00000010"]


def test_the_store_keeps_the_newest_checkpoints(run_dir, store, place) -> None:
    for step in (5, 10, 15):
        publish(run_dir, step)
        uploader.upload(run_dir, store, keep=2)
    assert whole(place) == ["step-00000010", "step-00000015"]
    assert sorted(path.name for path in place.iterdir()) == whole(place)


def test_after_a_rollback_the_later_checkpoint_counts_not_the_higher_step(
    run_dir, store, tmp_path
) -> None:
    publish(run_dir, 10)
    publish(run_dir, 20)
    uploader.upload(run_dir, store, keep=0)
    for name in ("step-00000010", "step-00000020"):
        shutil.rmtree(run_dir / "checkpoints" / name)
    expected = contents(publish(run_dir, 10, rollbacks=1))
    uploader.upload(run_dir, store, keep=0)
    found = restore(store, tmp_path / "again")
    assert found is not None and contents(found.directory) == expected
    publish(run_dir, 15, rollbacks=1)
    uploader.upload(run_dir, store, keep=2)
    assert whole(Path(store[7:])) == ["step-00000010", "step-00000015"]


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "manifest", "checksums"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_restored(
    run_dir, store, place, tmp_path, harm
) -> None:
    publish(run_dir, 5)
    publish(run_dir, 10)
    uploader.upload(run_dir, store, keep=0)
    victim = place / "step-00000010" / "optimizer.pt"
    if harm == "flip":
        content = bytearray(victim.read_bytes())
        content[500] ^= 1
        victim.write_bytes(content)
    elif harm == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif harm == "delete":
        victim.unlink()
    else:
        name = MANIFEST if harm == "manifest" else "record/CHECKSUMS.json"
        victim = place / "step-00000010" / name
        victim.write_text("{")
    said: list[str] = []
    again = tmp_path / "again"
    found = restore(store, again, log=said.append)
    assert found is not None and found.progress.step == 5 and verify_files(found) == []
    assert f"{store}/step-00000010/{victim.relative_to(place / 'step-00000010')}" in said[0]
    assert harm not in ("flip", "truncate") or "the manifest says" in said[0]
    assert [path.name for path in (again / "checkpoints").glob("*")].count("step-00000010") == 0
    assert not list((again / "checkpoints").glob(".tmp-*"))
    assert len(events(again, "checkpoint_damaged")) == 1


def test_a_store_with_only_damaged_checkpoints_is_refused(run_dir, store, place, tmp_path) -> None:
    publish(run_dir, 5)
    uploader.upload(run_dir, store, keep=0)
    (place / "step-00000005" / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"contains no undamaged checkpoint"):
        restore(store, tmp_path / "again")
    assert newest(tmp_path / "again") is None


def test_a_manifest_cannot_write_outside_of_the_run(run_dir, store, place, tmp_path) -> None:
    publish(run_dir, 5)
    uploader.upload(run_dir, store, keep=0)
    path = place / "step-00000005" / MANIFEST
    manifest = json.loads(path.read_text().replace("model.pt", "../../../../outside"))
    path.write_text(json.dumps({**manifest, "digest": manifest_digest(manifest)}))
    with pytest.raises(CheckpointError, match="must be a path inside the directory"):
        restore(store, tmp_path / "again")


def test_a_checkpoint_damaged_on_disk_is_not_sent_and_the_others_are(run_dir, store, place) -> None:
    publish(run_dir, 5)
    victim = publish(run_dir, 10) / "model.pt"
    victim.write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"model.pt: SHA-256 \w+, but the manifest says"):
        uploader.upload(run_dir, store, keep=0)
    assert whole(place) == ["step-00000005"]
    assert events(run_dir, "upload_failed")[0]["step"] == 10


def test_a_file_missing_on_disk_is_named_and_the_upload_ends(run_dir, store, place) -> None:
    publish(run_dir, 5)
    (publish(run_dir, 10) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000010 is damaged: .*model.pt"):
        uploader.upload(run_dir, store, keep=0)
    assert whole(place) == ["step-00000005"]


def test_a_checkpoint_is_sent_without_a_record_if_there_is_none_yet(run_dir, store, place) -> None:
    publish(run_dir, 5)
    for file in ("run.json", "metrics.jsonl"):
        (run_dir / file).unlink()
    uploader.upload(run_dir, store, keep=0)
    assert whole(place) == ["step-00000005"]


def test_a_lost_run_is_restored_once_and_starts_at_step_0_if_its_store_is_empty(
    run_dir, store
) -> None:
    assert if_lost(run_dir, store) is None and if_lost(run_dir, "off") is None
    publish(run_dir, 5)
    uploader.upload(run_dir, store, keep=0)
    assert if_lost(run_dir, store) is None, "there is a checkpoint"
    shutil.rmtree(run_dir / "checkpoints")
    found = if_lost(run_dir, store)
    assert found is not None and found.progress.step == 5


def test_a_full_disk_is_reported_before_anything_is_fetched(
    run_dir, store, tmp_path, monkeypatch
) -> None:
    publish(run_dir, 5)
    uploader.upload(run_dir, store, keep=0)
    usage = shutil._ntuple_diskusage(10, 9, 1)
    monkeypatch.setattr("zerolm.upload.restore.shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        CheckpointError, match=r"needs 0.00 GB, but the file system has only 0.00 GB free"
    ):
        restore(store, tmp_path / "again")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("runs/first", "is not a URL"),
        ("s3://", "is not a URL"),
        ("s3://key:secret@bucket/first", "contains credentials"),
        ("s3://bucket/first?token=1", "contains credentials or a query"),
        ("s4://bucket/first", "not supported by fsspec"),
        ("adl://container/first", "needs a package that is not installed"),
        ("file:///backup/first", None),
    ],
)
def test_urls_are_checked_without_a_network(url, problem) -> None:
    found = url_problem(url)
    assert (found is None) if problem is None else (problem in (found or ""))


def test_secrets_of_the_environment_are_not_shown() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "abcdefghij", "HOME": "/somewhere", "X_TOKEN": "short"}
    error = OSError("denied for\nabcdefghij in /somewhere, short")
    assert (
        reason(error, environment=environment)
        == "OSError: denied for (hidden) in /somewhere, short"
    )


def test_a_call_that_hangs_is_abandoned() -> None:
    with pytest.raises(StoreError, match="no answer within 0 s"):
        call_within(0.05, lambda: time.sleep(5))
    assert call_within(5, lambda: 7) == 7


def test_a_run_starts_an_uploader_and_waits_a_bounded_time(run_dir, store, place, capfd) -> None:
    uploads = Uploads(run_dir, store, keep=0, active=True)
    publish(run_dir, 5)
    uploads.tick()
    publish(run_dir, 10)
    uploads.finish(60)
    assert whole(place) == ["step-00000005", "step-00000010"]
    assert "upload: step-00000010 to file://" in capfd.readouterr().out
    publish(run_dir, 15)
    uploads.finish(0.0)
    assert "not sent to file://" in capfd.readouterr().out
    (event,) = events(run_dir, "upload_unfinished")
    assert event["checkpoints"] == ["step-00000015"]


def test_the_uploader_ends_with_its_run(run_dir, store) -> None:
    publish(run_dir, 5)
    words = [sys.executable, "-m", "zerolm", "upload", str(run_dir), store, "--of_process", "1"]
    slow = environment(FAULT="upload.file:*:*:sleep=3600")
    done = subprocess.run(words, cwd=ROOT, env=slow, timeout=300, capture_output=True, text=True)
    assert done.returncode == 1


def test_a_killed_upload_leaves_no_complete_checkpoint_and_is_resumed(
    run_dir, store, place
) -> None:
    publish(run_dir, 5)
    words = [sys.executable, "-m", "zerolm", "upload", str(run_dir), store]
    for point in ("upload.file", "upload.marker"):
        killed = subprocess.run(
            words, cwd=ROOT, env=environment(FAULT=f"{point}:*:*:kill"), timeout=60
        )
        assert killed.returncode == -9 and whole(place) == []
    done = subprocess.run(
        words, cwd=ROOT, env=environment(), timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0 and "0.0 MB" in done.stdout
    assert whole(place) == ["step-00000005"]
    assert events(run_dir, "upload")[0]["bytes"] < 1000, "the checkpoint's files were there already"
    again = subprocess.run(
        words, cwd=ROOT, env=environment(), timeout=60, capture_output=True, text=True
    )
    assert "already contains every checkpoint" in again.stdout
    assert json.loads((place / "step-00000005" / MANIFEST).read_text())["progress"]["step"] == 5
