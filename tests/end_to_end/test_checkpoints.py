"""Checkpoints under kills, full disks and damage, compared with an uninterrupted run."""

import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.recipe import profile, recipe
from tests.end_to_end.run_digest import differences, digest
from tests.launching import events, run_module, run_ranks
from zerolm.checkpoint import load
from zerolm.common.errors import ConfigError
from zerolm.common.faults import POINTS

STEPS, SAVE = 24, 6


def run_flags(llama, corpus, run_dir: Path, stage: int = 2) -> list[object]:
    """ZeRO-2 keeps bf16 weights beside the float32 ones, in files of its own."""
    json_file = profile(run_dir.parent / f"zero{stage}.json", stage, bf16=stage == 2)
    arguments = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    return [*arguments, "--checkpoint_interval", SAVE, "--wandb", "off"]


def run(arguments: list[object], ledger: Path, **more: str) -> subprocess.CompletedProcess[str]:
    ledger.mkdir(exist_ok=True)
    return run_ranks(2, *arguments, ZEROLM_LEDGER=str(ledger), **more)


def published(run_dir: Path) -> list[int]:
    found = (run_dir / "checkpoints").glob("step-*/MANIFEST.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


STAGES = [
    pytest.param(2, id="zero2"),
    pytest.param(3, id="zero3", marks=pytest.mark.soak),
]


@pytest.fixture(scope="module", params=STAGES)
def uninterrupted(request, tmp_path_factory, llama, corpus):
    """An uninterrupted run: (stage, its directory, its digest)."""
    base = tmp_path_factory.mktemp("uninterrupted")
    done = run(run_flags(llama, corpus, base / "run", request.param), base / "ledger")
    assert done.returncode == 0, done.stdout[-4000:]
    return request.param, base / "run", digest(base / "run", base / "ledger")


def test_failed_saves_are_reported_and_a_kill_during_one_leaves_a_complete_checkpoint(
    tmp_path, llama, corpus, uninterrupted
) -> None:
    """Rank 0 is killed before the rename; a soak test kills each rank at every point."""
    stage, _, reference = uninterrupted
    run_dir = tmp_path / "run"
    arguments = [*run_flags(llama, corpus, run_dir, stage), "--checkpoint_keep", 1]
    faults = ["checkpoint.write:1:6:enospc", "checkpoint.rename:0:12:eio"]
    killed = run(
        arguments, tmp_path / "ledger", FAULT=",".join([*faults, "checkpoint.rename:0:18:kill"])
    )
    assert killed.returncode not in (0, 2, 75, 76), killed.stdout[-4000:]
    failed = events(run_dir, "checkpoint_failed")
    assert [event["step"] for event in failed] == [6, 12]
    assert "rank 1: [Errno 28] No space left on device" in failed[0]["error"]
    assert "rank 0: [Errno 5] Input/output error" in failed[1]["error"]
    assert failed[0]["next_try"] == 7, "sooner than the next interval"
    saved = [event["step"] for event in events(run_dir, "checkpoint")]
    assert 6 < saved[0] < 12 and saved[-1] < 18 and len(saved) <= 2
    assert published(run_dir) == saved[-1:] and list(run_dir.glob("checkpoints/.tmp-*"))
    done = run(arguments, tmp_path / "ledger")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "resume" in done.stdout and not list(run_dir.glob("checkpoints/.tmp-*"))
    assert published(run_dir) == [STEPS]
    assert differences(digest(run_dir, tmp_path / "ledger"), reference) == []


PUBLISHER = ("manifest", "rename", "pointer", "rotate", "rotated")  # on rank 0 only
EVERY_POINT = [point for point in POINTS if point.startswith("checkpoint.")]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_killed_at_every_point_of_a_save_equals_an_uninterrupted_one(
    tmp_path, llama, corpus, uninterrupted, rank
) -> None:
    """One run, killed once at each point in turn."""
    stage, _, reference = uninterrupted
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    arguments = [*run_flags(llama, corpus, run_dir, stage), "--checkpoint_keep", 1]
    for point in EVERY_POINT:
        if rank == 1 and point.endswith(PUBLISHER):
            continue
        fault = {"FAULT": f"{point}:{rank}:*:kill", "FAULT_ONCE": str(marks)}
        killed = run(arguments, tmp_path / "ledger", **fault)
        assert killed.returncode not in (0, 2, 75, 76), killed.stdout[-4000:]
        for directory in run_dir.glob("checkpoints/step-*"):
            assert (directory / "MANIFEST.json").is_file()
    done = run(arguments, tmp_path / "ledger")
    assert done.returncode == 0, done.stdout[-4000:]
    assert not list(run_dir.glob("checkpoints/.tmp-*"))
    assert differences(digest(run_dir, tmp_path / "ledger"), reference) == []


def test_what_a_kill_after_the_last_save_has_left_is_removed(
    tmp_path, llama, corpus, uninterrupted
) -> None:
    stage, source, _ = uninterrupted
    run_dir = tmp_path / "run"
    shutil.copytree(source, run_dir)
    oldest = min((run_dir / "checkpoints").glob("step-*"))
    oldest.rename(oldest.with_name(f".tmp-{oldest.name}"))  # a retired one, not deleted yet
    done = run(run_flags(llama, corpus, run_dir, stage), tmp_path / "ledger")
    assert done.returncode == 0, done.stdout[-4000:]
    assert not list(run_dir.glob("checkpoints/.tmp-*"))


class Bomb:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_damage_is_reported_and_the_newest_complete_checkpoint_is_used(
    tmp_path, llama, corpus, uninterrupted
) -> None:
    stage, source, reference = uninterrupted
    run_dir, mark = tmp_path / "run", tmp_path / "command_was_run"
    shutil.copytree(source, run_dir)
    flipped = next((run_dir / "checkpoints" / "step-00000024").glob("*rank_1*optim_states.pt"))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    malicious = next((run_dir / "checkpoints" / "step-00000018").glob("*model_states.pt"))
    malicious.write_bytes(pickle.dumps(Bomb(mark)))
    arguments = run_flags(llama, corpus, run_dir, stage)
    again = run(arguments, tmp_path / "ledger")
    assert again.returncode == 0, again.stdout[-4000:]
    assert not mark.exists(), "a file that does not match the manifest was unpickled"
    for victim in (flipped, malicious):
        assert str(victim) in again.stdout
    assert "XXH3" in again.stdout and "step 12" in again.stdout
    assert [Path(event["checkpoint"]).name for event in events(run_dir, "damaged")] == [
        "damaged-step-00000024", "damaged-step-00000018",
    ]  # fmt: skip
    ours = digest(run_dir, tmp_path / "ledger")
    reference = {**reference, "ledger": {k: v for k, v in reference["ledger"].items() if k > 12}}
    assert differences(ours, reference) == []


DAMAGE = {
    "flipped": lambda path: path.write_bytes(_flip(path.read_bytes())),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_every_kind_of_damage_to_every_file_is_found(tmp_path, uninterrupted, one_rank) -> None:
    _, source, _ = uninterrupted
    newest = source / "checkpoints" / "step-00000024"
    num_damaged = 0
    for file in sorted(path.name for path in newest.iterdir()):
        for name, damage in DAMAGE.items():
            if file == "MANIFEST.json" and name == "missing":
                continue  # without a manifest it is not a checkpoint
            run_dir = tmp_path / f"{file}-{name}"
            shutil.copytree(source / "checkpoints", run_dir / "checkpoints")
            victim = run_dir / "checkpoints" / newest.name / file
            damage(victim)
            found, damaged = load.newest_complete(run_dir, 0, 1)
            assert found is not None and found.directory.name == "step-00000018", victim
            (problem,) = [line for each in damaged for line in each.problems]
            assert str(victim) in problem
            num_damaged += 1
    assert num_damaged >= 15
    all_damaged = tmp_path / "all-damaged"
    shutil.copytree(source / "checkpoints", all_damaged / "checkpoints")
    for path in all_damaged.glob("checkpoints/step-*/*.pt"):
        DAMAGE["flipped"](path)
    before = sorted(all_damaged.rglob("*"))
    with pytest.raises(ConfigError) as refused:
        load.newest_complete(all_damaged, 0, 1)
    assert "Nothing was deleted" in refused.value.problems[-1]
    assert sorted(all_damaged.rglob("*")) == before


@pytest.mark.soak
def test_a_run_ends_after_several_failed_saves(tmp_path, llama, corpus) -> None:
    """With a limit on file sizes, for the error of a real system call."""
    run_dir = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    try:
        flags = [*run_flags(llama, corpus, run_dir), "--checkpoint_failures", 2]
        ended = run_ranks(2, *flags, LIMITED="1")  # so that a new fork server inherits the limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.returncode == 1 and "Traceback" not in ended.stdout, ended.stdout[-4000:]
    failed = [event["step"] for event in events(run_dir, "checkpoint_failed")]
    assert [step for step in failed if step % 6 == 0] == [6, 12] and 3 <= len(failed) <= 5
    assert "File too large" in ended.stdout and "Free disk space" in ended.stdout
    assert published(run_dir) == []


@pytest.mark.soak
def test_a_full_disk_is_reported_with_needed_and_free_space(tmp_path, llama, corpus) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        arguments = run_flags(llama, corpus, disk / "run")
        ended = run_ranks(2, *arguments, "--checkpoint_failures", 1)
        assert ended.returncode == 1 and "Traceback" not in ended.stdout, ended.stdout[-4000:]
        (failed,) = events(disk / "run", "checkpoint_failed")
        assert "needs 1." in failed["error"] and ", has " in failed["error"], failed
        verified = run_module("zerolm", "verify-checkpoint", disk / "run")
        assert verified.returncode == 0, verified.stderr
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=30)
        refused = run_ranks(2, *arguments)
        assert refused.returncode == 2 and "Traceback" not in refused.stdout
        assert f"--run_dir: {disk / 'run'}" in refused.stdout, refused.stdout[-3000:]
    finally:
        subprocess.run(["umount", disk], check=True, timeout=30)
