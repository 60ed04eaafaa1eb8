"""After a power loss the next start finds a complete state, whatever was not synced.

python -m tests.power_loss    # all operations of all writers, in minutes
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.launching import one_rank
from tests.power_loss import campaign
from tests.power_loss.disk import Directory, Disk, read_directory, tree_of
from tests.power_loss.recording import Operation, Recorder
from tests.power_loss.scenarios import Divided, Run, Scenario, Shards

SECONDS = 240.0


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("group") / "store"):
        yield


def disk_after(*operations: Operation) -> Disk:
    disk = Disk(operations, Directory())
    for _ in operations:
        disk.advance()
    return disk


def possible(*operations: Operation) -> list[dict]:
    """Return all that a power loss may leave, with whole writes."""
    disk, found = disk_after(*operations), []
    pending = disk.pending()
    for bits in range(1 << len(pending)):
        kept = {number for place, number in enumerate(pending) if bits >> place & 1}
        if (tree := disk.after_loss(kept.__contains__)) not in found:
            found.append(tree)
    return found


WRITE = (Operation("c", "a.tmp"), Operation("w", "a.tmp", data=b"new"))
RENAME = Operation("r", "a.tmp", "a")


def test_what_is_not_synced_may_be_lost_in_any_order() -> None:
    assert possible(*WRITE) == [{}, {"a.tmp": b""}, {"a.tmp": b"new"}]
    assert {"a": b""} in possible(*WRITE, RENAME)  # the rename before the content
    synced = (*WRITE, Operation("s", "a.tmp"), RENAME)
    assert possible(*synced) == [{}, {"a.tmp": b"new"}, {"a": b"new"}]
    assert possible(*synced, Operation("s", ".")) == [{"a": b"new"}]


def test_a_rename_leaves_the_old_file_or_the_new_one() -> None:
    old = (Operation("c", "a"), Operation("w", "a", data=b"old"), Operation("s", "a"),
           Operation("s", "."))  # fmt: skip
    found = possible(*old, *WRITE, Operation("s", "a.tmp"), RENAME)
    assert {tree["a"] for tree in found} == {b"old", b"new"}


def test_a_directory_that_is_not_synced_loses_its_files() -> None:
    made = (Operation("m", "d"), Operation("c", "d/a"), Operation("s", "d/a"), Operation("s", "."))
    assert possible(*made) == [{"d": None}, {"d": None, "d/a": b""}]
    moved = (*made, Operation("s", "d"), Operation("r", "d", "e"))
    assert possible(*moved) == [{"d": None, "d/a": b""}, {"e": None, "e/a": b""}]


def test_a_write_may_be_torn_between_sectors() -> None:
    disk = disk_after(
        Operation("c", "a"), Operation("s", "."), Operation("w", "a", data=b"x" * 1300)
    )
    found = {disk.after_loss(lambda n: True, random.Random(seed))["a"] for seed in range(200)}
    assert b"x" * 1300 in found and b"" in found and bytes(1300) in found
    assert b"x" * 512 + bytes(788) in found and b"x" * 512 in found
    assert all(content[at : at + 512].strip(b"\0") in (b"", b"x" * len(content[at : at + 512]))
               for content in found for at in range(0, len(content), 512))  # fmt: skip


SCRIPT = """
import os, pathlib, shutil, sys
here = pathlib.Path(sys.argv[1])
(here / "d" / "e").mkdir(parents=True)
with open(here / "d" / "a", "ab") as file:
    file.write(b"one"); file.flush(); os.fsync(file.fileno()); file.write(b"two")
shutil.copyfile(here / "d" / "a", here / "b")
os.replace(here / "b", here / "d" / "c")
os.truncate(os.open(here / "d" / "c", os.O_WRONLY), 2)
(here / "old").write_text("changed")
os.symlink("x", here / "link")
os.rename(here / "d", here / "f")
shutil.rmtree(here / "gone")
"""


def test_all_that_a_process_does_is_recorded(tmp_path) -> None:
    directory = tmp_path / "files"
    (directory / "gone" / "deep").mkdir(parents=True)
    (directory / "gone" / "deep" / "file").touch()
    (directory / "old").write_text("old")
    before = read_directory(directory)
    recorder = Recorder(tmp_path, directory)
    subprocess.run([sys.executable, "-c", SCRIPT, str(directory)], check=True,
                   env={**os.environ, **recorder.variables})  # fmt: skip
    disk = Disk(recorder.operations(), before)
    while disk.at < len(disk.operations):
        disk.advance()
    assert disk.tree() == tree_of(directory)
    assert disk.tree()["f/c"] == b"on" and disk.tree()["link"] == "x"


@pytest.fixture(scope="module")
def divided(tmp_path_factory) -> Divided:
    return Divided(tmp_path_factory.mktemp("power") / "loss")


def test_shards_survive_a_few_power_losses(divided) -> None:
    result = campaign.cut(divided, seed=1, share=0.02, seconds=20)
    assert not result.findings, result.findings
    assert result.states > 20


def test_a_writer_that_syncs_nothing_is_found(divided, monkeypatch) -> None:
    without = [each for each in divided.operations if each.kind != "s"]
    monkeypatch.setattr(divided, "operations", without)
    result = campaign.cut(divided, seed=1, first=len(without) - 2, share=0.2, seconds=60)
    assert any("published, but damaged" in text for text in result.findings.values())


@pytest.mark.soak
@pytest.mark.parametrize("kind", [Run, Shards, Divided])
def test_every_power_loss_leaves_something_complete(kind: type[Scenario], tmp_path, group) -> None:
    seed = random.randrange(10**6)
    print(f"again: python -m tests.power_loss --writers {kind.__name__} --seed {seed}")
    result = campaign.cut(kind(tmp_path / "loss"), seed, share=0.1, seconds=SECONDS)
    print(result)
    assert not result.findings, f"seed {seed}: {result.findings}"
    assert result.points > 200
