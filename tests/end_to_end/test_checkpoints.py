"""Checkpoints under kills, full disks and damage; an uninterrupted run is the oracle."""

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from oracle import differences, digest
from recipe import profile, recipe

from tests.launching import ROOT, environment, run_ranks
from zerolm.faults import POINTS

STEPS, SAVE = 24, 6


def words(llama, corpus, run_dir: Path, stage: int = 2) -> list[object]:
    json_file = profile(run_dir.parent / f"zero{stage}.json", stage, bf16=True)
    arguments = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    return [*arguments, "--checkpoint_interval", SAVE, "--wandb", "off"]


def run(arguments: list[object], ledger: Path, **more: str) -> subprocess.CompletedProcess[str]:
    ledger.mkdir(exist_ok=True)
    return run_ranks(2, *arguments, ZEROLM_LEDGER=str(ledger), **more)


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def published(run_dir: Path) -> list[int]:
    found = (run_dir / "checkpoints").glob("step-*/MANIFEST.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


STAGES = [
    pytest.param(2, id="zero2", marks=pytest.mark.soak),
    pytest.param(3, id="zero3"),
]


@pytest.fixture(scope="module", params=STAGES)
def whole(request, tmp_path_factory, llama, corpus):
    """A run that nothing interrupted: (stage, its directory, its digest)."""
    base = tmp_path_factory.mktemp("whole")
    done = run(words(llama, corpus, base / "run", request.param), base / "ledger")
    assert done.returncode == 0, done.stdout[-4000:]
    return request.param, base / "run", digest(base / "run", base / "ledger")


def test_a_kill_anywhere_in_a_save_leaves_a_whole_checkpoint(
    tmp_path, llama, corpus, whole
) -> None:
    """A rank that is slow and then dies; the publisher before the rename; in a removal."""
    stage, _, oracle = whole
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    faults = [
        "checkpoint.write:1:6:sleep=2",
        "checkpoint.write:1:6:kill",
        "checkpoint.rename:0:12:kill",
        "checkpoint.rotated:0:18:kill",
    ]
    arguments = [*words(llama, corpus, run_dir, stage), "--checkpoint_keep", 1]
    for newest in ([], [6], [18]):
        killed = run(arguments, tmp_path / "ledger", FAULT=",".join(faults), FAULT_ONCE=str(marks))
        assert killed.returncode not in (0, 2, 75, 76), killed.stdout[-4000:]
        assert published(run_dir) == newest
    done = run(arguments, tmp_path / "ledger", FAULT=",".join(faults), FAULT_ONCE=str(marks))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "resume" in done.stdout and not list(run_dir.glob("checkpoints/.tmp-*"))
    assert differences(digest(run_dir, tmp_path / "ledger"), oracle) == []


PUBLISHER = ("manifest", "rename", "pointer", "rotate", "rotated")  # on rank 0 alone
EVERY_POINT = [point for point in POINTS if point.startswith("checkpoint.")]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_every_point_inside_a_save_ends_in_every_bit(
    tmp_path, llama, corpus, whole, rank
) -> None:
    """One run that is killed at each point in turn, at any save, once."""
    stage, _, oracle = whole
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    arguments = [*words(llama, corpus, run_dir, stage), "--checkpoint_keep", 1]
    for point in EVERY_POINT:
        if rank == 1 and point.endswith(PUBLISHER):
            continue
        struck = {"FAULT": f"{point}:{rank}:*:kill", "FAULT_ONCE": str(marks)}
        killed = run(arguments, tmp_path / "ledger", **struck)
        assert killed.returncode not in (0, 2, 75, 76), killed.stdout[-4000:]
        for directory in run_dir.glob("checkpoints/step-*"):
            assert (directory / "MANIFEST.json").is_file()
    done = run(arguments, tmp_path / "ledger")
    assert done.returncode == 0, done.stdout[-4000:]
    assert not list(run_dir.glob("checkpoints/.tmp-*"))
    assert differences(digest(run_dir, tmp_path / "ledger"), oracle) == []


class Bomb:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_damage_is_named_and_the_newest_whole_checkpoint_is_used(
    tmp_path, llama, corpus, whole
) -> None:
    stage, source, oracle = whole
    run_dir, mark = tmp_path / "run", tmp_path / "bomb_went_off"
    shutil.copytree(source, run_dir)
    flipped = next((run_dir / "checkpoints" / "step-00000024").glob("*rank_1*optim_states.pt"))
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    malicious = next((run_dir / "checkpoints" / "step-00000018").glob("*model_states.pt"))
    malicious.write_bytes(pickle.dumps(Bomb(mark)))
    arguments = words(llama, corpus, run_dir, stage)
    again = run(arguments, tmp_path / "ledger")
    assert again.returncode == 0, again.stdout[-4000:]
    assert not mark.exists(), "what the manifest does not vouch for was unpickled"
    for victim in (flipped, malicious):
        assert str(victim) in again.stdout
    assert "SHA-256" in again.stdout and "step 12" in again.stdout
    assert [Path(event["checkpoint"]).name for event in events(run_dir, "damaged")] == [
        "damaged-step-00000024", "damaged-step-00000018",
    ]  # fmt: skip
    ours = digest(run_dir, tmp_path / "ledger")
    oracle = {**oracle, "ledger": {k: v for k, v in oracle["ledger"].items() if k > 12}}
    assert differences(ours, oracle) == []


DAMAGES = {
    "flipped": lambda path: path.write_bytes(_flip(path.read_bytes())),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


LOOK = """
import json, sys
from pathlib import Path
import torch
from zerolm.checkpoint import newest_whole
from zerolm.errors import ConfigError
place = "file://" + sys.argv[1]
torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
for run_dir in sys.argv[2:]:
    try:
        found, damage = newest_whole(Path(run_dir), 0, 1)
        lines = [line for each in damage for line in each.problems]
        print(json.dumps([found.directory.name, lines]))
    except ConfigError as error:
        print(json.dumps([None, error.problems]))
"""


def test_every_damage_to_every_kind_of_file_is_found(tmp_path, whole) -> None:
    _, source, _ = whole
    newest = source / "checkpoints" / "step-00000024"
    runs, victims = [], []
    for file in sorted(path.name for path in newest.iterdir()):
        for damage, act in DAMAGES.items():
            if file == "MANIFEST.json" and damage == "missing":
                continue  # then it does not exist for us, which is no damage
            runs.append(tmp_path / f"{file}-{damage}")
            shutil.copytree(source / "checkpoints", runs[-1] / "checkpoints")
            victims.append(runs[-1] / "checkpoints" / newest.name / file)
            act(victims[-1])
    lost = tmp_path / "everything"
    shutil.copytree(source / "checkpoints", lost / "checkpoints")
    for path in lost.glob("checkpoints/step-*/*.pt"):
        DAMAGES["flipped"](path)
    before = sorted(lost.rglob("*"))
    found = subprocess.run(
        [sys.executable, "-c", LOOK, tmp_path / "group", *runs, lost],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    *reports, last = map(json.loads, found.stdout.splitlines())
    assert len(reports) == len(victims) >= 15
    for victim, (used, problems) in zip(victims, reports, strict=True):
        assert used == "step-00000018" and len(problems) == 1, victim
        assert str(victim) in problems[0]
    assert last[0] is None and "Nothing was deleted" in last[1][-1]
    assert sorted(lost.rglob("*")) == before


def test_a_failed_save_is_said_and_training_goes_on(tmp_path, llama, corpus, whole) -> None:
    stage, _, oracle = whole
    run_dir = tmp_path / "run"
    done = run(
        words(llama, corpus, run_dir, stage), tmp_path / "ledger",
        FAULT="checkpoint.write:1:6:enospc,checkpoint.rename:0:12:eio",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    failed = events(run_dir, "checkpoint_failed")
    assert [event["step"] for event in failed] == [6, 12]
    assert "rank 1: [Errno 28] No space left on device" in failed[0]["error"]
    assert "rank 0: [Errno 5] Input/output error" in failed[1]["error"]
    assert published(run_dir) == [18, 24] and not list(run_dir.glob("checkpoints/.tmp-*"))
    assert differences(digest(run_dir, tmp_path / "ledger"), oracle) == []


@pytest.mark.soak
def test_a_run_ends_when_saves_go_on_failing(tmp_path, llama, corpus) -> None:
    """A limit on the size of files: the real error of a real system call."""
    run_dir = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, before[1]))
    try:
        ended = run_ranks(2, *words(llama, corpus, run_dir), "--checkpoint_failures", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ended.returncode == 1 and "Traceback" not in ended.stdout, ended.stdout[-4000:]
    assert [event["step"] for event in events(run_dir, "checkpoint_failed")] == [6, 12]
    assert "File too large" in ended.stdout and "Make room" in ended.stdout
    assert published(run_dir) == []


@pytest.mark.soak
def test_a_full_disk_says_what_it_needs_and_has(tmp_path, llama, corpus) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        arguments = words(llama, corpus, disk / "run")
        ended = run_ranks(2, *arguments, "--checkpoint_failures", 1)
        assert ended.returncode == 1 and "Traceback" not in ended.stdout, ended.stdout[-4000:]
        (failed,) = events(disk / "run", "checkpoint_failed")
        assert "needs 1." in failed["error"] and ", has " in failed["error"], failed
        verified = subprocess.run(
            [sys.executable, "-m", "zerolm", "verify-checkpoint", disk / "run"],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert verified.returncode == 0, verified.stderr
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=30)
        refused = run_ranks(2, *arguments)
        assert refused.returncode == 2 and "Traceback" not in refused.stdout
        assert f"--run_dir: {disk / 'run'}" in refused.stdout, refused.stdout[-3000:]
    finally:
        subprocess.run(["umount", disk], check=True, timeout=30)
