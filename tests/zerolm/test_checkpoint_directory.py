import json
import shutil
from pathlib import Path

import pytest

from zerolm import checkpoint_directory, topology
from zerolm.checkpoint_directory import MANIFEST, POINTER, Progress
from zerolm.errors import CheckpointError
from zerolm.files import sha256_file

ADAMW = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}


def write(run_dir: Path, step: int, keep: int = 3, world_size: int = 2) -> Path:
    """Publish a checkpoint of two files, the way `save` does."""
    temporary = run_dir / "checkpoints" / f".tmp-{checkpoint_directory.directory_name(step)}"
    temporary.mkdir(parents=True)
    files = []
    for name in ("model.pt", "optimizer.pt"):
        (temporary / name).write_bytes(f"{name} of {step}".encode())
        path = temporary / name
        size = path.stat().st_size
        files.append({"file": name, "size_bytes": size, "sha256": sha256_file(path)})
    manifest = {
        "format": checkpoint_directory.FORMAT,
        "version": checkpoint_directory.VERSION,
        "world_size": world_size,
        "zero_stage": 2,
        "optimizer": topology.optimizer_kind(ADAMW),
        "progress": vars(Progress(step=step, position=8 * step)),
        "files": files,
    }
    return checkpoint_directory.publish(temporary, manifest, keep)


def test_the_newest_is_found_and_only_the_last_stay(tmp_path) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step, keep=2)
    assert checkpoint_directory.newest(tmp_path).progress.step == 20
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000015", "step-00000020"]
    assert (tmp_path / "checkpoints" / POINTER).read_text() == "step-00000020\n"
    assert checkpoint_directory.problems_of(checkpoint_directory.newest(tmp_path)) == []


def test_a_directory_without_a_manifest_does_not_exist(tmp_path) -> None:
    write(tmp_path, 5)
    unfinished = write(tmp_path, 10)
    (unfinished / MANIFEST).unlink()
    assert checkpoint_directory.newest(tmp_path).progress.step == 5


def test_a_new_run_has_no_checkpoint(tmp_path) -> None:
    assert checkpoint_directory.newest(tmp_path) is None


def test_lost_checkpoints_are_refused_and_never_step_zero(tmp_path) -> None:
    shutil.rmtree(write(tmp_path, 5))
    with pytest.raises(CheckpointError, match=r"latest: names 'step-00000005', but no checkpoint"):
        checkpoint_directory.newest(tmp_path)


def test_every_kind_of_damage_is_named(tmp_path) -> None:
    directory = write(tmp_path, 5)
    found = checkpoint_directory.read(directory)
    flipped = bytearray((directory / "model.pt").read_bytes())
    flipped[0] ^= 1
    (directory / "model.pt").write_bytes(flipped)
    (directory / "optimizer.pt").write_bytes(b"short")
    (directory / "stranger.pt").write_bytes(b"unvouched pickle")
    problems = "\n".join(checkpoint_directory.problems_of(found))
    assert "model.pt: SHA-256" in problems and found.manifest["files"][0]["sha256"] in problems
    assert "optimizer.pt: 5 bytes, the manifest says 17" in problems
    assert "stranger.pt: the manifest does not list this file" in problems
    (directory / "optimizer.pt").unlink()
    assert "optimizer.pt: missing" in "\n".join(checkpoint_directory.problems_of(found))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({"format": "other", "version": 1, "progress": {}})]
)
def test_a_damaged_manifest_is_refused_by_name(tmp_path, text) -> None:
    directory = write(tmp_path, 5)
    (directory / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"step-00000005/MANIFEST\.json"):
        checkpoint_directory.newest(tmp_path)
