"""Which checkpoints are kept; and none is lost, whatever fails while others are removed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, environment
from tests.zerolm.checkpoint.written_checkpoints import FILES, fill, names, write
from zerolm.checkpoint import directory as checkpoint_directory
from zerolm.checkpoint.directory import candidates, publish
from zerolm.checkpoint.rotation import Retention, delete_own, remove_unfinished, rotate
from zerolm.common.faults import POINTS
from zerolm.run_dir.files import checkpoint_name

PUBLISHER_POINTS = ("manifest", "rename", "pointer", "rotate", "rotated")
PUBLISHING = """
import json, sys
from pathlib import Path
from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.rotation import Retention, rotate
temporary, manifest = Path(sys.argv[1]), json.loads(sys.argv[2])
_, problems = rotate(publish(temporary, manifest), Retention(last=1))
print(*problems)
"""


def test_newest_checkpoint_is_found_and_older_ones_are_removed(tmp_path) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step, Retention(last=2))
    assert checkpoint_directory.newest(tmp_path).progress.step == 20
    assert names(tmp_path) == ["latest", "step-00000015", "step-00000020"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000020\n"
    assert checkpoint_directory.verify_files(checkpoint_directory.newest(tmp_path)) == []


def test_milestones_and_best_checkpoints_are_kept(tmp_path) -> None:
    for step in range(1, 13):
        policy = Retention(last=1, every_tokens=100, best=1)
        write(tmp_path, step, policy, ranked=["step-00000002"], tokens=30 * step)
    # The first at or after 100, 200 and 300 tokens are steps 4, 7 and 10.
    kept = [int(name[-2:]) for name in names(tmp_path) if name.startswith("step-")]
    assert kept == [2, 4, 7, 10, 12]


def test_a_damaged_checkpoint_is_left_and_later_ones_are_removed(tmp_path) -> None:
    for step in (5, 10, 15):
        write(tmp_path, step, Retention(last=9))
    (tmp_path / "checkpoints" / "step-00000005" / "MANIFEST.json").write_text("{")
    write(tmp_path, 20, Retention(last=1, every_tokens=10**9))
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000020"]


def test_the_best_of_the_checkpoints_are_kept_whatever_steps_are_evaluated(tmp_path) -> None:
    """The loss is lowest in step 25, which has no checkpoint; then come 30, 20 and 35."""
    losses = {step: abs(step - 25.1) for step in range(5, 65, 5)}
    for step in range(10, 70, 10):
        evaluated = [each for each in losses if each < step]  # its own evaluation comes later
        ranked = [checkpoint_name(each) for each in sorted(evaluated, key=losses.__getitem__)]
        write(tmp_path, step, Retention(last=1, best=2), ranked=ranked)
    assert names(tmp_path) == ["latest", "step-00000020", "step-00000030", "step-00000060"]


def test_checkpoints_are_removed_even_if_latest_cannot_be_written(tmp_path) -> None:
    write(tmp_path, 5)
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink()
    latest.mkdir()
    retired, (problem,) = rotate(publish(*fill(tmp_path, 10)), Retention(last=1))
    delete_own(retired, FILES)
    assert problem.startswith(f"{latest} cannot be written: ")
    assert names(tmp_path) == ["latest", "step-00000010"]


def test_a_checkpoint_that_cannot_be_removed_is_named_and_the_new_one_stays(tmp_path) -> None:
    old = write(tmp_path, 5)
    temporary, manifest = fill(tmp_path, 10)
    done = subprocess.run(
        [sys.executable, "-c", PUBLISHING, temporary, json.dumps(manifest)],
        env=environment(FAULT="checkpoint.rotate:0:10:eio"),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f"{old} cannot be removed: [Errno 5]" in done.stdout
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000010"]


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("checkpoint.")])
def test_kill_at_any_point_of_publishing_leaves_a_complete_checkpoint(tmp_path, point) -> None:
    write(tmp_path, 5)
    temporary, manifest = fill(tmp_path, 10)
    killed = subprocess.run(
        [sys.executable, "-c", PUBLISHING, temporary, json.dumps(manifest)],
        env=environment(FAULT=f"{point}:0:10:kill"), cwd=ROOT, timeout=60, check=False,
    )  # fmt: skip
    in_the_publisher = point.partition(".")[2] in PUBLISHER_POINTS
    assert killed.returncode == (-9 if in_the_publisher else 0)
    (found, *_), damaged = candidates(tmp_path)
    renamed = point.endswith(("pointer", "rotate", "rotated")) or not in_the_publisher
    assert found.progress.step == (10 if renamed else 5)
    assert not damaged and checkpoint_directory.verify_files(found) == []
    unfinished = tmp_path / "checkpoints" / ".tmp-step-00000015"
    assert remove_unfinished(unfinished.parent, unfinished) == []
    write(tmp_path, 15, Retention(last=1))
    assert names(tmp_path) == ["latest", "step-00000015"]


def test_a_file_named_like_an_unfinished_checkpoint_is_set_aside_if_its_name_is_needed(
    tmp_path,
) -> None:
    for step in (5, 10, 15):
        (tmp_path / f".tmp-step-{step:08d}").touch()
    assert remove_unfinished(tmp_path, tmp_path / ".tmp-step-00000010") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".tmp-step-00000005", ".tmp-step-00000015", "foreign-.tmp-step-00000010",
    ]  # fmt: skip


def test_only_the_name_that_is_needed_must_be_free(tmp_path, monkeypatch) -> None:
    needed, other = (tmp_path / f".tmp-step-{step:08d}" for step in (10, 5))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: (path / "lost").stat())
    other.mkdir()
    [problem] = remove_unfinished(tmp_path, needed)
    assert problem.startswith(f"{other} cannot be removed")
    needed.mkdir()
    with pytest.raises(FileNotFoundError):
        remove_unfinished(tmp_path, needed)


def test_what_cannot_be_deleted_is_named_unless_its_name_is_needed(tmp_path, monkeypatch) -> None:
    """Also one that is newer than the one that is needed."""
    newer = tmp_path / ".tmp-step-00000015"
    newer.mkdir()
    (newer / "model.pt").touch()
    monkeypatch.setattr(os, "unlink", lambda *_, **__: Path("/dev/null/x").stat())
    [problem] = remove_unfinished(tmp_path, tmp_path / ".tmp-step-00000010")
    assert problem.startswith(f"{newer} cannot be removed: [Errno 20]")
    with pytest.raises(NotADirectoryError):
        remove_unfinished(tmp_path, newer)
