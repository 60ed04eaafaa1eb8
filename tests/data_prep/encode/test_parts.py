"""Parts and assembly: shards do not depend on how the documents are divided into parts."""

import hashlib
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from data_prep.encode import assemble
from data_prep.encode.parts import (
    Batch,
    PartWriter,
    is_record_intact,
    part_files,
    part_name,
    read_parts,
)
from data_prep.tasks.phases import LocalExecutor
from zerolm.common.files import attempt_token


def shards_one_by_one(lengths: list[int], shard_tokens: int) -> list[list[int]]:
    """Apply the rule of docs/formats.md directly, one document at a time."""
    shards: list[list[int]] = [[]]
    for number, length in enumerate(lengths):
        if shards[-1] and sum(lengths[each] for each in shards[-1]) + length > shard_tokens:
            shards.append([])
        shards[-1].append(number)
    return shards


def write_parts(
    directory, documents: list[np.ndarray], cuts: list[int], token: str | None = None
) -> list[list]:
    """Write documents in parts; return the entry of each part in the unit's record."""
    parts = []
    limits = [0, *sorted(cuts), len(documents)]
    token, previous = token or attempt_token(), None
    for number, (first, last) in enumerate(pairwise(limits)):
        name = part_name(7, number, token)
        writer = PartWriter(directory, name, 1)
        own = documents[first:last]
        if own:
            lengths = np.array([len(each) for each in own])
            writer.add(0, Batch(np.concatenate(own), lengths, np.arange(first, last), 7))
        writer.close(previous, False, fingerprint="f")
        previous = name
        if own:
            parts.append([f"{name}.0.ids", len(own), int(lengths.sum())])
    return parts


def check_shards(directory, documents, expected, entries):
    """Compare shards with the direct rule, and checksums with the libraries that define them."""
    assert len(entries) == len(expected) == len(list(directory.glob("shard-*.bin")))
    for number, (entry, members) in enumerate(zip(entries, expected, strict=True)):
        content = np.concatenate([documents[each] for each in members]).tobytes()
        stem = directory / f"shard-{number:05d}"
        assert stem.with_suffix(".bin").read_bytes() == content
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        ends = np.fromfile(stem.with_suffix(".idx"), "<u8").tolist()
        assert ends == np.cumsum([len(documents[each]) for each in members]).tolist()
        assert np.fromfile(stem.with_suffix(".org"), "<u8").tolist() == members
        sums = np.fromfile(stem.with_suffix(".sums"), "<u8").tolist()
        blocks = [content[start : start + 65536] for start in range(0, len(content), 65536)]
        assert sums == [xxhash.xxh3_64_intdigest(block) for block in blocks]
        assert entry["num_documents"] == len(members) and entry["num_tokens"] == ends[-1]


@pytest.mark.parametrize("seed", range(12))
def test_shards_are_the_same_for_any_parts_and_any_assembler(tmp_path, monkeypatch, seed):
    """By tasks; by a thread that gets the units in another order; by a thread that starts late."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 9, 30, 200]) for _ in range(rng.randrange(1, 60))]
    documents = [np.array([rng.randrange(500) for _ in range(n)], "<u2") for n in lengths]
    cuts = [rng.randrange(len(documents) + 1) for _ in range(rng.randrange(6))]
    shard_tokens = rng.choice([1, 40, 100, 10_000])
    (tmp_path / "parts").mkdir()
    parts = write_parts(tmp_path / "parts", documents, cuts)
    units = [{"task": n, "parts": [[part]], "checksums": []} for n, part in enumerate(parts)]
    expected = shards_one_by_one(lengths, shard_tokens)
    for name in ("tasks", "thread", "late"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "shard-09999.bin").write_bytes(b"stale")
        made = {}
        if name != "tasks":
            monkeypatch.setattr(assemble, "MAX_LEFT_BYTES", 20 if name == "late" else 1 << 28)
            arguments = ([directory], tmp_path / "parts", shard_tokens, 2)
            with assemble.BackgroundAssembly(*arguments) as ahead:
                for unit in rng.sample(units, len(units)):
                    ahead.add(unit)
                if name == "late":
                    ahead._all_added = True
                ahead.start()
                made = ahead.finish()
            left = sum(lengths) - sum(entry["num_tokens"] for entry in made.values())
            assert left in ((0,) if name == "thread" else (0, sum(lengths)))
        records = tmp_path / "parts" / "records"
        shutil.rmtree(records, ignore_errors=True)
        (entries,) = assemble.run_assembly(
            [directory], tmp_path / "parts", units, shard_tokens, 2, made, LocalExecutor(1)
        )
        check_shards(directory, documents, expected, entries)


def test_a_stopped_assembly_leaves_no_partial_shard(tmp_path):
    documents = [np.full(5, number, "<u2") for number in range(9)]
    parts = write_parts(tmp_path, documents, [3, 6])
    (tmp_path / "out").mkdir()
    with assemble.BackgroundAssembly([tmp_path / "out"], tmp_path, 1000, 2) as ahead:
        ahead.start()
        ahead.add({"task": 0, "parts": [[parts[0]]]})
        ahead.add({"task": 2, "parts": [[parts[2]]]})  # and never the one between
    assert list((tmp_path / "out").iterdir()) == []
    with assemble.BackgroundAssembly([tmp_path / "absent"], tmp_path, 1000, 2) as ahead:
        ahead.start()
        ahead.add({"task": 0, "parts": [[parts[0]]]})
        with pytest.raises(FileNotFoundError):
            ahead.finish()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "record", "other"])
def test_parts_after_a_damaged_one_are_encoded_again(tmp_path, damage):
    documents = [np.full(5, number, "<u2") for number in range(9)]
    write_parts(tmp_path, documents, [3, 6])
    before = read_parts(tmp_path, 7, "f")
    names = [part["name"] for part in before]
    assert [name[:12] for name in names] == ["00007-00000-", "00007-00001-", "00007-00002-"]
    record = {
        "files": {name: size for part in before for name, size, _ in part_files(part)},
        "checksums": [checksum for part in before for _, _, checksum in part_files(part)],
    }
    assert is_record_intact(tmp_path, record)
    ids = tmp_path / f"{names[1]}.0.ids"
    content = ids.read_bytes()
    if damage == "flip":
        ids.write_bytes(content[:7] + bytes([content[7] ^ 1]) + content[8:])
    elif damage == "cut":
        ids.write_bytes(content[:-1])
    elif damage == "remove":
        ids.unlink()
    elif damage == "record":
        (tmp_path / f"{names[1]}.json").write_text('{"name": "00007-00001", "spl')
    kept = 0 if damage == "other" else 1
    if damage in ("flip", "cut", "remove"):
        assert not is_record_intact(tmp_path, record)
    assert read_parts(tmp_path, 7, "g" if damage == "other" else "f") == before[:kept]
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == set(names[:kept])


def test_two_writers_of_a_unit_do_not_mix_their_parts(tmp_path):
    """Slurm may restart a task on another node while the first attempt still writes."""
    documents = [np.full(5, number, "<u2") for number in range(9)]
    one = write_parts(tmp_path, documents, [3, 6], "othernode-1-0123abcd")
    two = write_parts(tmp_path, documents, [4], "thisnode-1-4567cdef")  # cut where its time ended
    for parts in (one, two):
        ids = [np.fromfile(tmp_path / name, "<u2", tokens) for name, _, tokens in parts]
        assert np.concatenate(ids).tolist() == np.concatenate(documents).tolist()
    (
        tmp_path / "00007-00002-othernode-1-0123abcd.json"
    ).unlink()  # it has only two of its parts by now
    found = read_parts(tmp_path, 7, "f")
    assert [part["previous"] for part in found] == [None, found[0]["name"]]
    assert sum(part["splits"][0]["num_documents"] for part in found) in (6, 9)
    assert (tmp_path / "00007-00002-othernode-1-0123abcd.0.ids").exists()  # which is being written
