"""A killed run resumes from the copy of its states in memory, and equals one never killed."""

from pathlib import Path

import pytest

from tests.end_to_end.recipe import profile, recipe
from tests.end_to_end.run_digest import differences, digest
from tests.end_to_end.test_resume import COMPARED, events
from tests.launching import rows, run_ranks
from zerolm.checkpoint import memory

STEPS, COPY = 14, 3
# In the order of the starts: the step of the copy that the next start resumes from.
KILLS = {
    "step.end:0:5:kill,step.end:1:5:kill": 3,
    "memory.write:1:9:kill": 6,  # rank 0 has the copy of step 9, rank 1 has not
    "memory.remove:1:9:kill": 9,  # every rank has the copy of step 9, one has that of step 6 too
    "memory.manifest:0:12:kill": 9,  # while it makes one after a resume from memory
}


def flags(llama: Path, corpus: Path, run_dir: Path, config: Path) -> list[object]:
    arguments = recipe(llama, corpus, run_dir, config, STEPS, micro=2)
    return [
        *arguments,
        "--checkpoint_interval",
        100,
        "--checkpoint_keep",
        1,
        "--no-async_checkpoint",
    ]


def copies() -> list[Path]:
    parent = memory.user_directory()
    return sorted(parent.iterdir()) if parent.is_dir() else []


@pytest.mark.soak
@pytest.mark.parametrize(("bf16", "stage"), [(True, 2), (False, 3)])
def test_a_run_killed_anywhere_resumes_from_the_newest_copy(
    tmp_path, llama, corpus, bf16, stage
) -> None:
    config, before = profile(tmp_path / "ds.json", stage, bf16), copies()
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = run_ranks(2, *flags(llama, corpus, straight, config))
    assert done.returncode == 0, done.stdout + done.stderr
    command = [*flags(llama, corpus, killed, config), "--memory_checkpoint_interval", COPY]
    (tmp_path / "once").mkdir()
    faults = {"FAULT": ",".join(KILLS), "FAULT_ONCE": str(tmp_path / "once")}
    for step in KILLS.values():
        died = run_ranks(2, *command, **faults)
        assert died.returncode not in (0, 2, 75), died.stdout + died.stderr
        (directory,) = set(copies()) - set(before)
        assert (directory / f"step-{step:08d}").is_dir()
    done = run_ranks(2, *command, **faults)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = [event["step"] for event in events(killed) if event["event"] == "resume"]
    assert resumed == list(KILLS.values())
    assert differences(digest(killed), digest(straight)) == []
    assert all(rows(killed, key) == rows(straight, key) for key in COMPARED)
    assert copies() == before and not (killed / "memory.json").exists()
