"""Checkpoints are found, named and verified; foreign files and links do no harm."""

import shutil
from pathlib import Path

import pytest

from tests.zerolm.checkpoint.written_checkpoints import FILES, fill, names, write
from zerolm.checkpoint import directory as checkpoint_directory
from zerolm.checkpoint import rollback
from zerolm.checkpoint.directory import candidates, locate, locate_several
from zerolm.checkpoint.rotation import Retention
from zerolm.common.errors import CheckpointError
from zerolm.run_dir import files as run_files
from zerolm.run_dir.files import MANIFEST


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
    assert "optimizer.pt: 5 bytes, but the manifest says 17" in problems
    assert "unlisted.pt: the manifest does not list this file" in problems
    (directory / "optimizer.pt").unlink()
    assert "optimizer.pt: missing" in "\n".join(checkpoint_directory.verify_files(found))


def test_every_other_content_of_a_file_is_reported_to_the_rank_that_reads_it(tmp_path) -> None:
    """Whether its SHA-256 is below or above the one in the manifest."""
    directory = write(tmp_path, 5)
    found = checkpoint_directory.read(directory)
    assert [checkpoint_directory.verify_files(found, rank, 2) for rank in (0, 1)] == [[], []]
    (directory / "unlisted.pt").touch()
    (directory / "loop").symlink_to(directory)  # not followed
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
