"""`CheckpointWriter` with obstacles in its directory and failing calls, in this process."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.manifests import FACTS
from zerolm.checkpoint import save_job
from zerolm.checkpoint.directory import newest, read, verify_files
from zerolm.checkpoint.file_writer import write_hashed
from zerolm.checkpoint.manifest import Progress
from zerolm.checkpoint.rotation import Retention
from zerolm.checkpoint.save_job import Outcome
from zerolm.checkpoint.writer import CheckpointWriter
from zerolm.common import faults

NAME = "step-00000005"


class Engine:
    """The part of a DeepSpeed engine that the writer uses."""

    global_rank, world_size, has_moe_layers = 0, 1, False
    checkpoint_engine: object = None
    module = torch.nn.Module()

    def zero_optimization_stage(self) -> int:
        return 2

    def save_checkpoint(
        self, directory: str, tag: str, save_latest: bool, client_state: dict
    ) -> None:
        self.checkpoint_engine.save({"weight": torch.arange(4.0)}, f"{directory}/{tag}/model.pt")


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def run_dir(tmp_path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def save(writer: CheckpointWriter, step: int) -> Outcome:
    writer.save(Progress(step=step), **FACTS)
    outcome = writer.finish()
    assert outcome is not None
    return outcome


def obstruct(path: Path, kind: str, outside: Path) -> None:
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "dangling link":
        path.symlink_to(outside / "absent")
    else:
        path.write_text("of the user")


@pytest.mark.parametrize("name", [NAME, f".tmp-{NAME}"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_nothing_with_the_name_of_a_checkpoint_stops_saving(tmp_path, run_dir, name, kind) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    writer = CheckpointWriter(Engine(), run_dir, Retention(last=1))
    for step in (5, 10):  # once when it is published or written, once when it is removed
        obstruct(run_dir / "checkpoints" / name, kind, outside)
        assert save(writer, step).error is None
        assert newest(run_dir).progress.step == step and verify_files(newest(run_dir)) == []
        assert [path.name for path in outside.iterdir()] == ["precious"]
        if step == 5 and name == NAME:
            break  # the name is now that of the checkpoint itself
    foreign = [path for path in (run_dir / "checkpoints").iterdir() if path.is_file()]
    texts = [path.read_text() for path in foreign if path.name != "latest"]
    assert texts == ["of the user"] * len(texts) and bool(texts) == (kind == "file")


@pytest.mark.parametrize("fault", ["pointer", "rotate", "rotated"])
@pytest.mark.parametrize("action", ["eio", "raise"])
def test_a_published_checkpoint_has_not_failed_whatever_comes_after(
    run_dir, monkeypatch, fault, action
) -> None:
    writer = CheckpointWriter(Engine(), run_dir, Retention(last=1))
    assert save(writer, 5).problems == []
    text = f"checkpoint.{fault}:0:10:{action}"
    monkeypatch.setattr(faults, "_FAULTS", faults.parse_faults(text))
    outcome = save(writer, 10)
    assert outcome.error is None and len(outcome.problems) == 1, outcome
    assert newest(run_dir).progress.step == 10
    monkeypatch.setattr(faults, "_FAULTS", [])
    assert save(writer, 15).problems == []
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["latest", "step-00000015"]


def test_a_directory_in_place_of_latest_is_a_note_and_no_failure(run_dir) -> None:
    (run_dir / "checkpoints" / "latest").mkdir()
    writer = CheckpointWriter(Engine(), run_dir, Retention(last=1))
    for step in (5, 10):
        outcome = save(writer, step)
        assert outcome.error is None and "latest cannot be written" in outcome.problems[0]
        assert read(run_dir / "checkpoints" / outcome.name).progress.step == step


def test_a_run_directory_that_vanishes_for_a_while_is_a_failed_save(run_dir) -> None:
    writer = CheckpointWriter(Engine(), run_dir, Retention(last=1))
    run_dir.rename(run_dir.with_name("unmounted"))
    assert "No such file" in (save(writer, 5).error or "")
    run_dir.with_name("unmounted").rename(run_dir)
    assert save(writer, 10).error is None


def test_reading_back_finds_a_file_that_the_disk_has_changed(run_dir, monkeypatch) -> None:
    def changed(path, *rest):
        entry = write_hashed(path, *rest)
        with open(path, "r+b") as file:
            file.seek(100)
            file.write(b"x")
        return entry

    monkeypatch.setattr(save_job, "write_hashed", changed)
    writer = CheckpointWriter(Engine(), run_dir, Retention(last=1), read_back=True)
    assert "model.pt: reads back as" in (save(writer, 5).error or "")
    assert newest(run_dir) is None
    assert save(CheckpointWriter(Engine(), run_dir, Retention(last=1)), 10).error is None
    (problem,) = verify_files(newest(run_dir))
    assert "model.pt: XXH3" in problem
