import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from tests.launching import ROOT, environment
from tests.manifests import WRITTEN
from zerolm.checkpoint import directory as checkpoint_directory
from zerolm.checkpoint import rollback
from zerolm.checkpoint.checksums import RANGE_BYTES
from zerolm.checkpoint.directory import candidates, locate, locate_several, publish
from zerolm.checkpoint.manifest import (
    FORMAT,
    VERSION,
    Progress,
    SavedProgress,
    files_problem,
    manifest_digest,
)
from zerolm.checkpoint.rotation import Retention, delete_own, remove_unfinished, rotate
from zerolm.common import run_files
from zerolm.common.errors import CheckpointError
from zerolm.common.faults import POINTS
from zerolm.common.files import sha256_file
from zerolm.common.run_files import MANIFEST, checkpoint_name
from zerolm.ds_config import topology
from zerolm.ds_config.profile import Profile

FILES = ("model.pt", "optimizer.pt")
PUBLISHER_POINTS = ("manifest", "rename", "pointer", "rotate", "rotated")
ADAMW = Profile.parse({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}})


def fill(run_dir: Path, step: int, tokens: int = 0) -> tuple[Path, dict]:
    """Write a temporary directory with two files; return it and its manifest."""
    temporary = run_dir / "checkpoints" / f".tmp-{checkpoint_name(step)}"
    temporary.mkdir(parents=True)
    files = []
    for name in FILES:
        (temporary / name).write_bytes(content := f"{name} of {step}".encode())
        files.append({"file": name, "size_bytes": len(content)})
    files[0]["sha256"] = sha256_file(temporary / FILES[0])  # as earlier releases did
    files[1] |= {"xxh3_128": xxhash.xxh3_128_hexdigest(content), "rank": 1}
    return temporary, {
        "format": FORMAT,
        "version": VERSION,
        **WRITTEN,
        "world_size": 2,
        "zero_stage": 2,
        "optimizer": topology.optimizer_kind(ADAMW),
        "progress": vars(Progress(step=step, position=8 * step, tokens=tokens)),
        "files": files,
    }


def write(run_dir: Path, step: int, retention: Retention | None = None, **more) -> Path:
    """Publish a checkpoint as the writer does."""
    final = publish(*fill(run_dir, step, more.pop("tokens", 0)))
    retired, _ = rotate(final, retention or Retention(last=99), **more)
    delete_own(retired, FILES)
    return final


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


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


PUBLISHING = """
import json, sys
from pathlib import Path
from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.rotation import Retention, rotate
temporary, manifest = Path(sys.argv[1]), json.loads(sys.argv[2])
_, problems = rotate(publish(temporary, manifest), Retention(last=1))
print(*problems)
"""


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


def test_what_is_set_aside_again_gets_the_next_number(tmp_path) -> None:
    for _ in range(3):
        (tmp_path / "x").mkdir()
        checkpoint_directory.set_aside(tmp_path / "x", "damaged-")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-x",
        "damaged-x-2",
        "damaged-x-3",
    ]


def test_directory_without_a_manifest_is_ignored(tmp_path) -> None:
    write(tmp_path, 5)
    unfinished = write(tmp_path, 10)
    (unfinished / MANIFEST).unlink()
    assert checkpoint_directory.newest(tmp_path).progress.step == 5


def test_a_checkpoint_has_the_files_of_its_manifest_and_of_its_lists(tmp_path) -> None:
    found = checkpoint_directory.read(write(tmp_path, 5))
    assert (found.num_files, found.size_bytes) == (2, sum(len(f"{name} of 5") for name in FILES))
    lists = [{"num_files": 5, "files_bytes": 100}, {"num_files": 1, "files_bytes": 20}]
    more = checkpoint_directory.Checkpoint(tmp_path, {**found.manifest, "lists": lists})
    assert (more.num_files, more.size_bytes) == (8, found.size_bytes + 120)


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_three_versions_of_a_manifest_are_read(tmp_path, version) -> None:
    temporary, manifest = fill(tmp_path, 5)
    assert manifest["version"] == 3, "earlier releases read a checkpoint without lists"
    final = publish(temporary, {**manifest, "version": version})
    if version in (2, 3, 4):
        assert checkpoint_directory.read(final).progress.step == 5
    else:
        with pytest.raises(CheckpointError, match=f"version {version}, but this release reads"):
            checkpoint_directory.read(final)


def test_a_new_run_has_made_no_progress() -> None:
    assert not any(vars(Progress()).values())
    assert SavedProgress().read() == Progress()


def test_new_run_has_no_checkpoint(tmp_path) -> None:
    assert checkpoint_directory.newest(tmp_path) is None
    assert candidates(tmp_path) == ([], {})
    fill(tmp_path, 5)  # killed in its first save
    assert candidates(tmp_path) == ([], {})


def test_a_checkpoint_is_named_by_its_run_a_step_or_its_directory(tmp_path) -> None:
    directories = {step: write(tmp_path, step) for step in (5, 10)}
    assert locate(tmp_path).directory == directories[10]
    assert locate(f"{tmp_path}@5").directory == directories[5]
    assert locate(f"{tmp_path}@step-00000005").directory == directories[5]
    assert locate(directories[5]).directory == directories[5]
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7.*steps: 5, 10"):
        locate(f"{tmp_path}@7")
    at = tmp_path / "run@3"  # a directory that has such a name is not RUN@STEP
    assert locate(write(at, 8).parent.parent).progress.step == 8
    with pytest.raises(CheckpointError, match="no such directory"):
        locate(tmp_path / "absent")


def test_several_checkpoints_are_named_by_steps_and_ranges(tmp_path) -> None:
    directories = {step: write(tmp_path, step) for step in (5, 10, 15)}

    def steps(reference) -> list[int]:
        return [one.progress.step for one in locate_several(str(reference))]

    assert steps(tmp_path) == [5, 10, 15] and steps(directories[10]) == [10]
    assert steps(f"{tmp_path}@15,step-00000005") == [5, 15]
    assert steps(f"{tmp_path}@6:10") == [10] and steps(f"{tmp_path}@5:5") == [5]
    assert steps(f"{tmp_path}@:10") == [5, 10] and steps(f"{tmp_path}@10:") == [10, 15]
    at = tmp_path / "run@3"  # a directory that has such a name is not RUN@STEP
    assert steps(write(at, 8).parent.parent) == [8]
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        steps(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        steps(f"{tmp_path}@5,11:14")


@pytest.mark.parametrize(
    ("size", "ranges"), [(0, 1), (1, 1), (RANGE_BYTES, 1), (RANGE_BYTES + 1, 2)]
)
def test_a_file_has_a_checksum_for_each_range(size, ranges) -> None:
    for number in (1, 2, 3):
        entry = {"file": "model.pt", "size_bytes": size, "xxh3_128": "0" * 32 * number}
        assert (files_problem([entry]) is None) is (number == ranges)


def test_run_with_lost_checkpoints_is_refused(tmp_path) -> None:
    directory = write(tmp_path, 5)
    (directory / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint is left .*step-00000005"):
        candidates(tmp_path)
    shutil.rmtree(directory)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint is left \(latest\)"):
        candidates(tmp_path)


@pytest.mark.parametrize(
    "pointer", [None, "", "step-00000099\n"], ids=["absent", "empty", "dangling"]
)
def test_checkpoints_are_found_whatever_the_pointer_says(tmp_path, pointer) -> None:
    path = write(tmp_path, 5).parent / "latest"
    path.unlink()
    if pointer is not None:
        path.write_text(pointer)
    assert candidates(tmp_path)[0][0].progress.step == 5


def test_any_flipped_bit_of_a_manifest_is_detected(tmp_path) -> None:
    write(tmp_path, 5)
    path = write(tmp_path, 10) / MANIFEST
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        if chr(content[place]).isspace():
            continue  # whitespace of JSON has no meaning
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(flipped)
        found, damaged = candidates(tmp_path)
        assert [each.progress.step for each in found] == [5], flipped[place - 20 : place + 20]
        assert str(path) in damaged[path.parent]


def test_each_kind_of_damage_is_reported(tmp_path) -> None:
    directory = write(tmp_path, 5)
    found = checkpoint_directory.read(directory)
    flipped = bytearray((directory / "model.pt").read_bytes())
    flipped[0] ^= 1
    (directory / "model.pt").write_bytes(flipped)
    (directory / "optimizer.pt").write_bytes(b"short")
    (directory / "unlisted.pt").write_bytes(b"not in the manifest")
    problems = "\n".join(checkpoint_directory.verify_files(found))
    assert "model.pt: SHA-256" in problems and found.manifest["files"][0]["sha256"] in problems
    assert "optimizer.pt: 5 bytes, the manifest says 17" in problems
    assert "unlisted.pt: the manifest does not list this file" in problems
    (directory / "optimizer.pt").unlink()
    assert "optimizer.pt: missing" in "\n".join(checkpoint_directory.verify_files(found))


def test_every_other_content_of_a_file_is_reported_to_the_rank_that_reads_it(tmp_path) -> None:
    """Whether its SHA-256 is below or above the one in the manifest."""
    directory = write(tmp_path, 5)
    found = checkpoint_directory.read(directory)
    assert [checkpoint_directory.verify_files(found, rank, 2) for rank in (0, 1)] == [[], []]
    (directory / "unlisted.pt").touch()
    unlisted = [len(checkpoint_directory.verify_files(found, rank, 2)) for rank in (0, 1)]
    assert unlisted == [1, 0], "one rank names what the manifest does not list"
    (directory / "unlisted.pt").unlink()
    (path, *_) = [directory / entry["file"] for entry in found.manifest["files"]]
    content = path.read_bytes()
    for bit in range(16):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        (problem,) = checkpoint_directory.verify_files(found, 0, 2)
        assert f"{path}: SHA-256" in problem
        assert checkpoint_directory.verify_files(found, 1, 2) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({"format": "other", "version": 1, "progress": {}})]
)
def test_error_names_a_damaged_manifest(tmp_path, text) -> None:
    directory = write(tmp_path, 5)
    (directory / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"step-00000005/MANIFEST\.json"):
        checkpoint_directory.newest(tmp_path)


def test_a_manifest_with_progress_that_is_not_ours_is_refused_in_spite_of_its_digest(
    tmp_path,
) -> None:
    directory = write(tmp_path, 5)
    content = json.loads((directory / MANIFEST).read_text())
    content["progress"]["other"] = 1
    content["digest"] = manifest_digest(content)
    (directory / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"step-00000005/MANIFEST\.json"):
        checkpoint_directory.read(directory)


def test_the_digest_of_a_manifest_does_not_depend_on_the_order_of_its_keys(tmp_path) -> None:
    manifest = json.loads((write(tmp_path, 5) / MANIFEST).read_text())
    assert manifest_digest(dict(reversed(manifest.items()))) == manifest["digest"]


def test_copies_of_checkpoints_are_ignored_by_everything(tmp_path) -> None:
    directory = write(tmp_path, 5)
    checkpoints = directory.parent
    copies = [
        "step-00000005.bak", "step-00000099 (copy)", "damaged-step-00000007.old", "xstep-00000009",
        "rolled-back-notes", "rolled-back-0001-step-00000003~", ".tmp-step-00000005.swp",
    ]  # fmt: skip
    for name in copies:
        shutil.copytree(directory, checkpoints / name)
    assert [each.progress.step for each in candidates(tmp_path)[0]] == [5]
    assert run_files.foreign_entries(checkpoints) == sorted(copies)
    rollback.remove_older(tmp_path, 99)
    write(tmp_path, 10, Retention(last=1))
    assert names(tmp_path) == sorted(["latest", "step-00000010", *copies])
    shutil.rmtree(checkpoints / "step-00000010")
    (checkpoints / "latest").unlink()
    assert candidates(tmp_path) == ([], {}), "nothing of the run itself is left"


@pytest.mark.parametrize(
    ("occupy", "kept"),
    [
        (Path.mkdir, ["damaged-step-00000005"]),
        (Path.touch, ["foreign-step-00000005"]),
        (lambda path: path.symlink_to(path.parent), []),
    ],
    ids=["directory", "file", "link"],
)
def test_what_has_the_name_of_a_new_checkpoint_is_set_aside(tmp_path, occupy, kept) -> None:
    (tmp_path / "checkpoints").mkdir()
    occupy(tmp_path / "checkpoints" / "step-00000005")
    assert checkpoint_directory.read(write(tmp_path, 5)).progress.step == 5
    assert names(tmp_path) == sorted([*kept, "latest", "step-00000005"])


def test_a_link_to_a_checkpoint_is_not_followed(tmp_path) -> None:
    outside = write(tmp_path / "other", 5)
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000005").symlink_to(outside)
    (checkpoints / "rolled-back-0001-step-00000004").symlink_to(outside)
    with pytest.raises(CheckpointError, match="no complete checkpoint is left"):
        candidates(tmp_path / "run")
    rollback.remove_older(tmp_path / "run", 2)
    write(tmp_path / "run", 10, Retention(last=1))
    assert checkpoint_directory.read(outside).progress.step == 5
    assert "step-00000005" in run_files.foreign_entries(checkpoints)
