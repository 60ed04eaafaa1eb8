"""Whatever an input holds, it is accepted or refused in a sentence: no traceback, hang or leak.

python -m pytest -m soak tests/fuzz    # a turn with a new seed; a failure names it
python -m tests.fuzz --minutes 30      # a campaign
"""

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz import campaign, guard
from tests.fuzz.mutations import Damage, written
from tests.fuzz.targets import COMMANDS, TARGETS, Bench, Input, Target, bench

FEW = 5  # inputs of each target in the suite
TURN_SECONDS = 150.0


@pytest.fixture(scope="module")
def made() -> Iterator[Bench]:
    with bench() as found:
        yield found


@pytest.mark.parametrize("name", TARGETS)
def test_valid_files_are_accepted(made, name) -> None:
    nothing = {
        "settings": "settings.json", "DeepSpeed JSON": "profiles/zero2.json",
        "model config": "models/a-tiny-llama.json",
    }.get(name)  # fmt: skip
    damage = (Damage(nothing, "nothing", lambda path: None),) if nothing else ()
    for command in COMMANDS if name == "metrics and events" else [""]:
        assert made.read(TARGETS[name], Input(damage, (command,) if command else ()))


def test_a_few_inputs_of_each_kind_are_answered(made) -> None:
    tallies = campaign.run(made, list(TARGETS.values()), 1, inputs=FEW)
    assert not campaign.findings_of(tallies), campaign.findings_of(tallies)
    assert all(tally.inputs == FEW for tally in tallies.values())


@pytest.mark.soak
def test_a_turn_of_the_fuzzer_finds_nothing(made) -> None:
    seed = secrets.randbelow(10**6)
    print(f"again: python -m tests.fuzz --seed {seed} --minutes {TURN_SECONDS / 60:g}")
    tallies = campaign.run(made, list(TARGETS.values()), seed, seconds=TURN_SECONDS)
    print(campaign.table(tallies))
    assert not campaign.findings_of(tallies), f"seed {seed}\n{campaign.findings_of(tallies)}"


# ---- What the fuzzer itself must find


def crash() -> None:
    raise KeyError("x")


def spin() -> None:
    while True:
        pass


FORBIDDEN = {
    "a traceback": (crash, "KeyError"),
    "a hang": (spin, "hangs"),
    "a write elsewhere": (lambda: os.close(os.open("/dev/full", os.O_WRONLY)), "outside"),
    "a process": (lambda: subprocess.run(["true"], check=True), "outside"),
    "memory": (lambda: b"x" * (100 << 20), "of memory"),
    "a control character": (lambda: print("\x1b[31m"), "prints"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_no_input_may_cause_is_found_once_and_made_small(made, what, monkeypatch) -> None:
    act, error = FORBIDDEN[what]
    if what == "a hang":
        monkeypatch.setattr(guard, "HANG_SECONDS", 0.2)
    monkeypatch.setattr(guard, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(campaign, "SHRINK_SECONDS", 3.0)

    def read(base, given: Input) -> bool:
        if any("a" in word for word in given.words):
            act()
        return True

    target = Target("flags", TARGETS["flags"].draw, read)
    (tally,) = campaign.run(made, [target], 3, inputs=10).values()
    (finding,) = tally.findings.values()
    assert error in finding.error, finding
    assert finding.times + tally.accepted == tally.inputs == 10


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def separated(path: Path) -> None:
    record = json.loads(path.read_text())
    record["settings"]["val_data"] = "\u2028"
    path.write_text(json.dumps(record))


LONG = written("settings.json", "a long list", json.dumps({"seq_len": [*range(2000)]}).encode())
IDS = "shards/shard-00000.bin"
MODEL = "run/checkpoints/step-00000010/model.pt"
PINNED = {  # what the fuzzer has found, {what: (target, input)}
    "a message of 9,000 characters": ("settings", Input((LONG,))),
    "a path that is escaped in its message": (
        "settings", Input((Damage("run/run.json", "a line separator", separated),))
    ),
    "stats of damaged ids": (
        "shards", Input((Damage(IDS, "a byte", flip),))
    ),
    "a link to itself in a checkpoint": (
        "checkpoints and records", Input((Damage(MODEL, "a link to itself", linked),))
    ),
    "a new run directory beside the checkout": ("flags", Input(words=("--run_dir", "text"))),
}  # fmt: skip


@pytest.mark.parametrize("what", PINNED)
def test_what_was_found_is_answered(made, what) -> None:
    name, given = PINNED[what]
    made.read(TARGETS[name], given)
