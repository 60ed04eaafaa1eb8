"""Copies in memory: whose they are, which is taken, and that none is left behind."""

import os
from pathlib import Path

import pytest
import torch

from tests.manifests import FACTS
from tests.zerolm.checkpoint.test_writer import Engine, group, run_dir
from zerolm.checkpoint import load, memory
from zerolm.checkpoint.manifest import Progress
from zerolm.checkpoint.rotation import Retention
from zerolm.checkpoint.save_job import Outcome
from zerolm.checkpoint.writer import CheckpointWriter
from zerolm.common import faults, processes

__all__ = ["group", "run_dir"]  # fixtures


class MemoryEngine(Engine):
    save_non_zero_checkpoint = False
    save_zero_checkpoint = True

    def save_checkpoint(
        self, directory: str, tag: str, save_latest: bool, client_state: dict
    ) -> None:
        states = {"weight": torch.arange(4.0)}
        if self.save_non_zero_checkpoint:
            self.checkpoint_engine.save(states, f"{directory}/{tag}/mp_rank_00_model_states.pt")
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        if self.save_zero_checkpoint:
            self.checkpoint_engine.save(states, f"{directory}/{tag}/{name}")


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def connect(run_dir: Path) -> memory.MemoryCopies:
    copies = memory.connect(run_dir, 0, 0, 0)
    assert copies.leads and copies.holds
    return copies


def copy(writer: CheckpointWriter, copies: memory.MemoryCopies, step: int) -> Outcome:
    writer.copy_to_memory(Progress(step=step), copies, **FACTS)
    outcome = writer.finish()
    assert outcome is not None and outcome.in_memory
    return outcome


def newest(copies: memory.MemoryCopies, run_dir: Path) -> int | None:
    found, problems = load.newest_copy(copies, run_dir, lambda part: True)
    assert problems == []
    return None if found is None else found.progress.step


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def test_the_newest_copy_is_taken_unless_a_checkpoint_on_disk_is_newer(run_dir) -> None:
    writer, copies = CheckpointWriter(MemoryEngine(), run_dir, Retention(last=1)), connect(run_dir)
    assert newest(copies, run_dir) is None
    for step in (3, 6):
        assert copy(writer, copies, step).error is None
        assert names(copies.directory) == [f"step-{step:08d}"], "the older one is removed"
        assert newest(connect(run_dir), run_dir) == step
    writer.save(Progress(step=10), **FACTS)
    assert writer.finish() is not None
    assert newest(copies, run_dir) is None and names(copies.directory) == []


def test_of_the_ranks_of_a_host_with_parts_of_the_model_only_one_creates_the_directory(
    run_dir, monkeypatch
) -> None:
    token, machine = memory.create_token(run_dir), processes.machine_id()
    places = [((machine, 0), (machine, 0)), ((machine, 1), (machine, 1))]
    monkeypatch.setattr(memory.collectives, "broadcast_object", lambda value: token)
    gathered = {str: [machine, machine], tuple: places}
    monkeypatch.setattr(memory.collectives, "gather_objects", lambda value: gathered[type(value)])
    monkeypatch.setattr(memory.collectives, "require_on_all_ranks", lambda *values: None)
    second = memory.connect(run_dir, 1, 1, 1)
    assert second is not None and second.leads and not second.directory.exists()
    first = memory.connect(run_dir, 0, 0, 0)
    assert first is not None and first.leads and first.directory.is_dir()
    assert first.holds and second.holds
    gathered[tuple] = [((machine, 0), (machine, 0))] * 2  # two groups on a host
    again = memory.connect(run_dir, 1, 0, 0)
    assert not again.leads and not again.holds


@pytest.mark.parametrize("point", ["memory.write", "memory.manifest"])
def test_a_copy_that_fails_leaves_the_one_before(run_dir, monkeypatch, point) -> None:
    writer, copies = CheckpointWriter(MemoryEngine(), run_dir, Retention(last=1)), connect(run_dir)
    copy(writer, copies, 3)
    monkeypatch.setattr(faults, "_FAULTS", faults.parse_faults(f"{point}:0:6:enospc"))
    assert "No space left" in (copy(writer, copies, 6).error or "")
    assert names(copies.directory) == ["step-00000003"] and newest(copies, run_dir) == 3


def test_a_damaged_copy_is_named_and_not_taken(run_dir) -> None:
    writer, copies = CheckpointWriter(MemoryEngine(), run_dir, Retention(last=1)), connect(run_dir)
    copy(writer, copies, 3)
    path = copies.step_directory(3) / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    found, (problem,) = load.newest_copy(copies, run_dir, lambda part: True)
    assert found is None and f"{path}: XXH3" in problem and names(copies.directory) == []


def test_copies_of_a_deleted_run_are_not_taken_by_another_at_its_path(run_dir, shared) -> None:
    writer, copies = CheckpointWriter(MemoryEngine(), run_dir, Retention(last=1)), connect(run_dir)
    copy(writer, copies, 3)
    (run_dir / "memory.json").unlink()
    other = run_dir.with_name("other")
    (other / "checkpoints").mkdir(parents=True)
    assert newest(connect(other), other) is None  # any start removes what nobody can resume from
    assert names(shared / f"zerolm-{os.getuid()}") == [connect(other).directory.name]
    assert newest(connect(run_dir), run_dir) is None


def test_a_start_without_the_flag_and_the_end_of_a_run_leave_nothing(run_dir, shared) -> None:
    writer, copies = CheckpointWriter(MemoryEngine(), run_dir, Retention(last=1)), connect(run_dir)
    copy(writer, copies, 3)
    assert memory.bytes_on_host(run_dir) > 0
    memory.forget(run_dir, 0)
    assert list(shared.iterdir()) == [] and not (run_dir / "memory.json").exists()
    connect(run_dir)
    memory.remove_copies(run_dir)
    assert list(shared.iterdir()) == [] and memory.bytes_on_host(run_dir) == 0


def test_a_directory_of_another_user_is_refused(run_dir, shared) -> None:
    memory.user_directory().mkdir(mode=0o777)
    memory.user_directory().chmod(0o777)
    with pytest.raises(Exception, match="writable by other users"):
        connect(run_dir)


def test_stages_of_a_host_and_other_runs_may_remove_the_last_copies_at_once(
    run_dir, shared, monkeypatch
) -> None:
    """Each stage's first rank removes the run's copies, and the directory of all runs."""
    memory.create_directory(run_dir, "token")
    seen = memory.user_directory().is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path == memory.user_directory() or seen())
    memory.user_directory().rename(shared / "removed")
    memory.remove_copies(run_dir)
    monkeypatch.undo()

    def removed_once(directory: Path) -> None:
        made.append(directory)
        private(directory)
        if len(made) == 1:
            directory.rmdir()

    made, private = [], memory.make_private
    monkeypatch.setattr(memory, "make_private", removed_once)
    monkeypatch.setattr(memory, "SHARED_MEMORY", shared)
    assert memory.create_directory(run_dir, "token").is_dir()
