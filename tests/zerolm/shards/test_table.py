"""A table of shards says what the manifest says, and a wrong one is found and not used."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.manifests import write_shard_manifest
from tests.zerolm.shards.small_shards import EOS, many_shards, write
from zerolm.common.errors import ShardError, ShardReadError
from zerolm.shards import directory as shard_directory
from zerolm.shards import disk, local, manifest
from zerolm.shards.reader import open_source, verify
from zerolm.shards.table import TABLE, ShardTable, encode_table

COUNT = 12


@pytest.fixture
def shards(tmp_path, monkeypatch) -> Path:
    """Shards with a table; their sizes are checked in a sample of one shard in seven."""
    monkeypatch.setattr(shard_directory, "MIN_SHARDS", COUNT)
    monkeypatch.setattr(disk, "MAX_SAMPLED_FILES", COUNT)
    monkeypatch.setattr(local, "MAX_SAMPLED_FILES", COUNT)
    directory = many_shards(tmp_path / "s", COUNT, monkeypatch)
    assert (directory / TABLE).is_file()
    return directory


def facts(source) -> tuple:
    ids = [source.ids(number, 0, 2).tolist() for number in range(COUNT)]
    ends = [source.document_ends(number).tolist() for number in range(COUNT)]
    return (
        source.manifest,
        source.fingerprint,
        source.starts.tolist(),
        source.head["eos_id"],
        ids,
        ends,
    )


def test_a_source_is_the_same_with_the_table_and_without_it(shards, tmp_path, monkeypatch):
    """With the table the manifest is not parsed, except on request."""
    without = shutil.copytree(shards, tmp_path / "without")
    (without / TABLE).unlink()
    expected = facts(open_source(without))
    monkeypatch.setattr(local, "read_manifest", lambda directory: pytest.fail("parsed"))
    source = open_source(shards)
    assert isinstance(source.shards, ShardTable)
    assert facts(source) == expected
    assert source.shards[-1] == expected[0]["shards"][-1]
    assert source.shards[2:4] == expected[0]["shards"][2:4]
    with pytest.raises(IndexError):
        source.shards[COUNT]
    assert verify(shards) == expected[0]


def test_few_shards_have_no_table(tmp_path):
    assert not (write(tmp_path / "s") / TABLE).exists()


def test_any_damage_to_a_table_is_found_and_the_manifest_is_read_instead(shards, capsys):
    path = shards / TABLE
    intact = path.read_bytes()
    expected = facts(open_source(shards))
    capsys.readouterr()
    wrong = [intact[:size] for size in (0, 7, 8, 47, 48, 100, len(intact) // 2, len(intact) - 1)]
    for bit in range(0, 8 * len(intact), 97):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        wrong.append(bytes(content))
    for content in [*wrong, intact + b"x"]:
        path.write_bytes(content)
        source = open_source(shards)
        assert isinstance(source.shards, list)
        note = capsys.readouterr().err
        assert str(path) in note and "Remove it; runs then parse manifest.json" in note
    assert facts(source) == expected
    with pytest.raises(ShardError, match=r"shards\.table: is damaged: its checksum differs"):
        verify(shards)


def test_a_table_of_another_manifest_is_found(shards, capsys, monkeypatch):
    """Of the same size: the entries of two shards are swapped, as by a copy of other shards."""
    text = (shards / "manifest.json").read_text()
    first, second = "shard-00001.bin", "shard-00002.bin"
    swapped = text.replace(first, "X").replace(second, first).replace("X", second)
    write_shard_manifest(shards, json.loads(swapped))
    source = open_source(shards)
    assert "was made from another manifest.json" in capsys.readouterr().err
    assert source.shards[1]["file"] == second
    with pytest.raises(ShardError, match=r"shards\.table: was made from another manifest"):
        verify(shards)
    capsys.readouterr()
    monkeypatch.setenv("LOCAL_RANK", "1")  # one process of a node says so, all notice
    assert open_source(shards).shards[1]["file"] == second
    assert capsys.readouterr().err == ""


def damage_lose(path: Path) -> None:
    path.unlink()


def damage_truncate(path: Path) -> None:
    os.truncate(path, 2)


def damage_extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"xx")


@pytest.mark.parametrize(
    ("damage", "on_opening", "in_full"),
    [
        (damage_lose, r"can no longer be opened with 4 bytes", r"it is missing"),
        (
            damage_truncate,
            r"can no longer be opened with 4 bytes",
            r"2 bytes, but the manifest says 4",
        ),
        (damage_extend, r"6 bytes, but the manifest says 4", r"6 bytes, but the manifest says 4"),
    ],
)
def test_a_wrong_file_that_the_start_did_not_look_at_is_found(
    shards, monkeypatch, damage, on_opening, in_full
):
    """When its shard is opened, by one process soon after the start, by verify; and by the start if
    it is one of those that it looks at, or without a table."""
    monkeypatch.setattr(local, "CHECK_DELAY_SECONDS", 0.0)
    damage(shards / "shard-00001.bin")
    with pytest.raises(ShardReadError, match=rf"shard-00001\.bin: {on_opening}"):
        open_source(shards).ids(1, 0, 2)
    with pytest.raises(ShardError, match=rf"shard-00001\.bin: .*{in_full}"):
        verify(shards)
    source = open_source(shards)
    source.files.prefetch([(0, 0, 2)])
    source.files.check_sizes()
    deadline = time.monotonic() + 30
    with pytest.raises(ShardReadError, match=rf"shard-00001\.bin: .*{in_full}"):
        while time.monotonic() < deadline:
            source.files.prefetch([(0, 0, 2)])
    monkeypatch.setenv("CROSS_RANK", "1")
    with pytest.raises(ShardError, match=rf"shard-00001\.bin: .*{in_full}"):
        open_source(shards)
    monkeypatch.setenv("CROSS_RANK", "0")
    (shards / TABLE).unlink()
    with pytest.raises(ShardError, match=rf"shard-00001\.bin: .*{in_full}"):
        open_source(shards)


def test_swapped_shards_are_found(shards):
    """Of equal sizes, so only their checksums tell."""
    one, two = shards / "shard-00001.bin", shards / "shard-00002.bin"
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    with pytest.raises(ShardReadError, match=r"shard-00001\.bin: block 0 .* is damaged"):
        open_source(shards).ids(1, 0, 2)


@pytest.mark.parametrize("name", ["CROSS_RANK", "GROUP_RANK"])
def test_nodes_look_at_different_shards_and_at_all_of_them_together(name, monkeypatch):
    class Looked(list):
        def __getitem__(self, number):
            seen.append(number)
            return {}

    together: set[int] = set()
    for node in range(64):
        seen: list[int] = []
        monkeypatch.setenv(name, str(node))
        monkeypatch.setenv("RANK", str(3 * node))
        assert disk.sampled_size_problems(Path("none"), Looked([{}] * 40_000)) == []
        assert len(seen) * len(manifest.FILE_KEYS) <= disk.MAX_SAMPLED_FILES + 5
        together.update(seen)
    assert together == set(range(40_000))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(note="mine"),
        lambda entry: entry.update(file="other-00003.bin"),
        lambda entry: [entry.pop(key) for key in [*entry] if key.startswith("sums")],
        lambda entry: entry.update(sha256="0"),
        lambda entry: entry.update(sha256=entry["sha256"].upper()),
    ],
)
def test_a_manifest_that_says_more_than_a_table_can_has_none(shards, change):
    values = json.loads((shards / "manifest.json").read_text())
    change(values["shards"][3])
    assert encode_table(json.dumps(values).encode()) is None


def test_nothing_is_left_of_a_writer_that_could_not_publish_its_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_directory, "MIN_SHARDS", 1)
    directory = tmp_path / "new"

    def fill(path, content):
        assert path.name == TABLE
        path.write_bytes(content)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_directory, "write_atomically", fill)
    with pytest.raises(OSError, match="No space"):
        write(directory, [[1, EOS]])
    assert not directory.exists()


def test_the_table_is_what_the_format_says(shards):
    """Read without this project."""
    content = (shards / TABLE).read_bytes()
    values = json.loads((shards / "manifest.json").read_text())
    num_shards, head_size, files = (
        np.frombuffer(content[40:48] + content[48:56], "<u8")[0],
        *(np.frombuffer(content[48:56], "<u4")),
    )
    assert content[:8] == b"zlmtbl01" and num_shards == COUNT and files == 0b10111
    head = json.loads(content[56 : 56 + head_size])
    assert {**head, "shards": values["shards"]} == values
    record = np.dtype(
        [("num_tokens", "<u8"), ("num_documents", "<u8")]
        + [field for n in "abcd" for field in ((f"{n}_size", "<u8"), (f"{n}_sha256", "S32"))]
    )
    rows = np.frombuffer(content, record, offset=56 + int(head_size))
    assert rows["num_tokens"].tolist() == [shard["num_tokens"] for shard in values["shards"]]
    assert rows["c_size"].tolist() == [shard["sums_size_bytes"] for shard in values["shards"]]
