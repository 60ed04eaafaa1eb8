"""Rollbacks on disk: the target, the skipped window, and the same result after any crash."""

import json
import shutil
from pathlib import Path

import pytest

from tests.manifests import WRITTEN
from zerolm.checkpoint import directory, rollback, rotation
from zerolm.checkpoint.directory import published_checkpoints, read
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress, manifest_digest
from zerolm.common.errors import ConfigError
from zerolm.optim.schedule import BatchSchedule
from zerolm.run_dir.records import read_rollbacks

BATCH = BatchSchedule(8)


def add_checkpoint(run_dir: Path, step: int, **more) -> Path:
    directory = run_dir / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    progress = vars(Progress(step=step, position=8 * step, tokens=256 * step, **more))
    manifest = {"format": FORMAT, "version": VERSION, "progress": progress, "files": [], **WRITTEN}
    manifest["digest"] = manifest_digest(manifest)
    (directory / "MANIFEST.json").write_text(json.dumps(manifest))
    (run_dir / "checkpoints" / "latest").write_text(directory.name + "\n")
    return directory


@pytest.fixture
def run_dir(tmp_path) -> Path:
    for step in (10, 20, 30):
        add_checkpoint(tmp_path, step)
    return tmp_path


def newest(run_dir: Path):
    return read(published_checkpoints(run_dir / "checkpoints")[-1])


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("first", "margin", "expected"),
    [(31, 0, 30), (31, 1, 20), (30, 0, 20), (30, 10, 10), (12, 50, 10), (10, 0, None)],
)
def test_target_is_older_than_the_spike_and_if_possible_by_the_margin(
    run_dir, first, margin, expected
) -> None:
    found = rollback.target(run_dir, first, margin)
    assert (found and found.progress.step) == expected


def test_target_is_never_a_checkpoint_with_a_damaged_manifest(run_dir) -> None:
    (run_dir / "checkpoints" / "step-00000020" / "MANIFEST.json").write_text("{")
    found = rollback.target(run_dir, 25, 0)
    assert found is not None and found.progress.step == 10
    newer = rollback.target(run_dir, 35, 0)
    assert newer is not None and newer.progress.step == 30


def test_skipped_window_is_from_the_margin_before_the_spike_to_the_last_batch(run_dir) -> None:
    now = Progress(step=33, position=8 * 33, spikes=3, skipped_steps=3)
    entry = rollback.plan(run_dir, now, BATCH, first_anomaly=31, margin=2, reason="x")
    assert entry is not None
    assert (entry["to_step"], entry["skipped_window"]) == (20, [8 * 28, 8 * 33])
    far = rollback.plan(run_dir, now, BATCH, first_anomaly=31, margin=500, reason="x")
    assert far is not None and far["skipped_window"] == [8 * 30, 8 * 33], "from the checkpoint on"
    assert rollback.plan(run_dir, now, BATCH, first_anomaly=5, margin=0, reason="x") is None


def test_second_window_has_sequence_numbers_after_the_first(run_dir) -> None:
    now = Progress(step=33, position=8 * 33, rollbacks=1, skipped_windows=[[100, 164]])
    entry = rollback.plan(run_dir, now, BATCH, first_anomaly=32, margin=0, reason="x")
    assert entry is not None
    assert entry["skipped_window"] == [8 * 31 + 64, 8 * 33 + 64] and entry["number"] == 2
    assert entry["skipped_windows"] == [[100, 164], [8 * 31 + 64, 8 * 33 + 64]]


def test_skipped_window_accounts_for_a_batch_ramp(run_dir) -> None:
    ramp = BatchSchedule(8, start_sequences=2, ramp_sequences=400)
    positions = [8 * 20]  # of that checkpoint
    for _ in range(20, 33):
        positions.append(positions[-1] + ramp(positions[-1]))
    now = Progress(step=33, position=positions[-1])
    entry = rollback.plan(run_dir, now, ramp, first_anomaly=31, margin=8, reason="x")
    assert entry is not None and entry["to_step"] == 20
    assert entry["skipped_window"] == [positions[2], positions[-1]]


@pytest.mark.parametrize("batch", [2, 16, 64])
def test_window_begins_at_the_checkpoint_if_the_batch_size_has_changed_since(
    run_dir, batch
) -> None:
    """The run resumed at step 30 with another batch; its spike is too close to that step."""
    now = Progress(step=33, position=8 * 30 + 3 * batch)
    schedule = BatchSchedule(batch)
    entry = rollback.plan(run_dir, now, schedule, first_anomaly=32, margin=5, reason="x")
    assert entry is not None
    assert (entry["to_step"], entry["skipped_window"]) == (20, [8 * 20, now.position])


def test_window_begins_where_the_run_continues_after_the_checkpoint(run_dir) -> None:
    """With sequences that are twice as long, positions since step 30 are half of what they were."""
    now, batch = Progress(step=33, position=4 * 30 + 3 * 8), BatchSchedule(8)
    entry = rollback.plan(
        run_dir, now, batch, 32, 0, "x", lambda found: found.progress.position // 2
    )
    assert entry is not None
    assert (entry["to_step"], entry["skipped_window"]) == (30, [4 * 30 + 8, now.position])


def recorded(run_dir: Path) -> None:
    now = Progress(step=33, position=8 * 33, spikes=3, skipped_steps=3)
    rollback.record(run_dir, rollback.plan(run_dir, now, BATCH, 29, 2, "x"))


AFTER = ["latest", "rolled-back-0001-step-00000030", "step-00000010", "step-00000020"]


def test_rolled_back_checkpoints_are_set_aside_and_never_resumed(run_dir) -> None:
    recorded(run_dir)
    rollback.apply_recorded(run_dir)
    assert names(run_dir) == AFTER
    assert (run_dir / "checkpoints" / "latest").read_text() == "step-00000020\n"
    found = newest(run_dir)
    progress = rollback.with_rollbacks(found.progress, read_rollbacks(run_dir))
    assert (progress.step, progress.rollbacks, progress.spikes) == (20, 1, 3)
    assert progress.skipped_windows == [[8 * 26, 8 * 33]]


@pytest.mark.parametrize("left", [10, 20, 30])
def test_latest_names_the_newest_checkpoint_that_a_rollback_leaves(run_dir, left) -> None:
    now = Progress(step=33, position=8 * 33)
    rollback.record(run_dir, rollback.plan(run_dir, now, BATCH, left + 1, 0, "x"))
    (run_dir / "checkpoints" / "latest").unlink()
    rollback.apply_recorded(run_dir)
    assert (run_dir / "checkpoints" / "latest").read_text() == f"step-{left:08d}\n"


def test_next_start_completes_a_rollback_that_crashed_at_any_point(run_dir, monkeypatch) -> None:
    add_checkpoint(run_dir, 32)
    recorded(run_dir)
    uninterrupted = run_dir.with_name(run_dir.name + "-uninterrupted")
    shutil.copytree(run_dir, uninterrupted)
    rollback.apply_recorded(uninterrupted)
    for crash_at in (1, 2, 3):
        copy = run_dir.with_name(f"{run_dir.name}-{crash_at}")
        shutil.copytree(run_dir, copy)
        calls = []

        def die(path, calls=calls, crash_at=crash_at):
            calls.append(path)
            if len(calls) == crash_at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(directory, "sync_directory", die)
            patched.setattr(rotation, "write_atomically", lambda path, write, die=die: die(path))
            with pytest.raises(KeyboardInterrupt):
                rollback.apply_recorded(copy)
        rollback.apply_recorded(copy)
        assert names(copy) == names(uninterrupted)
        assert (copy / "checkpoints" / "latest").read_text() == "step-00000020\n"


def test_checkpoints_from_after_a_rollback_are_kept(run_dir) -> None:
    recorded(run_dir)
    rollback.apply_recorded(run_dir)
    windows = [[8 * 26, 8 * 33]]
    add_checkpoint(run_dir, 30, rollbacks=1, skipped_windows=windows)
    rollback.apply_recorded(run_dir)
    assert names(run_dir) == sorted([*AFTER, "step-00000030"])
    found = newest(run_dir)
    assert found.progress.step == 30
    assert rollback.with_rollbacks(found.progress, read_rollbacks(run_dir)) == found.progress


def test_checkpoints_set_aside_by_an_earlier_rollback_are_removed(run_dir) -> None:
    recorded(run_dir)
    rollback.apply_recorded(run_dir)
    rollback.remove_older(run_dir, 1)
    assert names(run_dir) == AFTER
    rollback.remove_older(run_dir, 2)
    assert names(run_dir) == ["latest", "step-00000010", "step-00000020"]


def test_error_names_a_damaged_rollbacks_file(run_dir) -> None:
    (run_dir / "rollbacks.json").write_text("[")
    with pytest.raises(ConfigError, match=r"rollbacks\.json"):
        rollback.apply_recorded(run_dir)


def test_progress_takes_over_each_later_rollback_and_keeps_the_rest(run_dir) -> None:
    def entry(number: int, windows: list[list[int]]) -> dict:
        return {"number": number, "skipped_steps": 10 * number, "spikes": 100 * number,
                "skipped_windows": windows}  # fmt: skip

    history = {"losses": [2.0, 1.0], "anomalies": [7, 8], "cooldown_left": 3}
    progress = Progress(
        step=10, position=80, tokens=2560, rollbacks=1, skipped_windows=[[0, 8]], history=history
    )
    entries = [entry(1, [[500, 508]]), entry(2, [[0, 8], [100, 108]]), entry(3, [[104, 116]])]
    found = rollback.with_rollbacks(progress, entries)
    assert (found.rollbacks, found.skipped_steps, found.spikes) == (3, 30, 300)
    assert found.skipped_windows == [[0, 8], [100, 116]], "the first is in the checkpoint already"
    assert found.history == {**history, "anomalies": []}
    assert (found.step, found.position, found.tokens) == (10, 80, 2560)
    assert rollback.with_rollbacks(progress, entries[:1]) == progress
