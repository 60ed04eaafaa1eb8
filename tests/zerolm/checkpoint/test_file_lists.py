"""A checkpoint of many ranks: its manifest stays small, and vouches for every file."""

import json
import shutil
from pathlib import Path

import pytest
import xxhash

from tests.manifests import WRITTEN
from zerolm.checkpoint import checksums, directory, file_lists
from zerolm.checkpoint.directory import publish, read, verify_files
from zerolm.checkpoint.file_lists import LISTED_RANKS, pieces
from zerolm.checkpoint.manifest import FILES, FORMAT, VERSION, Progress
from zerolm.common.errors import CheckpointError
from zerolm.run_dir.files import MANIFEST
from zerolm.upload import restore, uploader

COMMON = "mp_rank_00_model_states.pt"


def own(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(run_dir: Path, num_ranks: int, step: int = 5, **more: int) -> Path:
    """Publish a checkpoint with a file of each rank, and one of all ranks."""
    temporary = run_dir / "checkpoints" / f".tmp-step-{step:08d}"
    temporary.mkdir(parents=True)
    entries = []
    for name, rank in [(COMMON, None), *((own(rank), rank) for rank in range(num_ranks))]:
        content = f"{name} of {step}".encode()
        (temporary / name).write_bytes(content)
        entry = {"file": name, "size_bytes": len(content)}
        entry["xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
        entries.append(entry if rank is None else {**entry, "rank": rank})
    manifest = {
        "format": FORMAT, "version": VERSION, **WRITTEN, "world_size": num_ranks, "zero_stage": 2,
        "progress": vars(Progress(step=step)),
        "files": sorted(entries, key=lambda entry: entry["file"]), **more,
    }  # fmt: skip
    return publish(temporary, manifest)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A checkpoint of 300 ranks: five lists, the last one with 44 files."""
    return write(tmp_path_factory.mktemp("run"), 300)


def test_ranks_read_kilobytes_and_together_compare_every_file_once(published, monkeypatch) -> None:
    found = read(published)
    assert (published / MANIFEST).stat().st_size < 4096 < (published / FILES).stat().st_size
    assert found.num_files == 302 == len(found.entries())
    others = [path for path in published.iterdir() if path.name != MANIFEST]
    assert found.size_bytes == sum(path.stat().st_size for path in others)
    read_bytes = []
    monkeypatch.setattr(
        file_lists, "open_regular",
        lambda path: read_bytes.append(path) or open(path, "rb"),
    )  # fmt: skip
    for world_size in (300, 1, 7, 5, 150, 300_000):
        ranks = range(world_size) if world_size <= 300 else [*range(1000), 299_999]
        read_bytes.clear()
        shares = [pieces(published, found.manifest, rank, world_size) for rank in ranks]
        assert len(read_bytes) <= max(len(ranks), 5), "a list is read once by each of its readers"
        names = sorted(piece.entry["file"] for share in shares for piece in share)
        assert names == sorted([COMMON, *map(own, range(300))]), world_size
    shares = [pieces(published, found.manifest, rank, 300) for rank in (0, 63, 64, 299)]
    for rank, share in zip((0, 63, 64, 299), shares, strict=True):
        assert own(rank) in [piece.entry["file"] for piece in share]


def test_ranks_of_many_groups_together_compare_the_files_of_the_first_once(tmp_path) -> None:
    for num_shards in (4, 130):
        final = write(tmp_path / str(num_shards), num_shards, world_size=260, shards=num_shards)
        manifest = read(final).manifest
        for world_size in (num_shards, 2 * num_shards, 260, 3):
            shares = [pieces(final, manifest, rank, world_size) for rank in range(world_size)]
            names = sorted(piece.entry["file"] for share in shares for piece in share)
            assert names == sorted([COMMON, *map(own, range(num_shards))]), world_size
        mine = pieces(final, manifest, num_shards - 1, num_shards)
        assert own(num_shards - 1) in [piece.entry["file"] for piece in mine]


def test_few_ranks_have_all_files_in_the_manifest_as_before(tmp_path) -> None:
    final = write(tmp_path, LISTED_RANKS)
    assert not (final / FILES).exists() and read(final).manifest["version"] == 3
    assert verify_files(read(final)) == []


def test_every_damage_is_found_by_the_rank_that_needs_the_file(published, tmp_path) -> None:
    copy = tmp_path / "checkpoints" / published.name
    shutil.copytree(published, copy)
    found = read(copy)
    ranks = (0, 70, 299)
    assert [verify_files(found, rank, 300) for rank in ranks] == [[], [], []]
    (copy / own(70)).write_bytes(b"x" * (copy / own(70)).stat().st_size)
    assert [len(verify_files(found, rank, 300)) for rank in ranks] == [0, 1, 0]
    assert own(70) in verify_files(found)[0], "also by one rank alone"
    (copy / own(70)).unlink()
    assert "missing" in verify_files(found, 70, 300)[0]
    shutil.copyfile(published / own(70), copy / own(70))
    (copy / "unlisted.pt").touch()
    assert "does not list this file" in verify_files(found, 0, 300)[0]
    (copy / "unlisted.pt").unlink()

    content = (copy / FILES).read_bytes()
    second = found.manifest["lists"][1]
    for place in range(second["start_byte"], second["start_byte"] + second["size_bytes"], 509):
        flipped = bytearray(content)
        flipped[place] ^= 1
        (copy / FILES).write_bytes(flipped)
        assert [len(verify_files(found, rank, 300)) for rank in ranks] == [0, 1, 0]
        assert f"{copy / FILES}, {second['size_bytes']} bytes" in verify_files(found)[0]
    for cut in (content[: second["start_byte"] + 9], b""):
        (copy / FILES).write_bytes(cut)
        assert len(verify_files(found, 70, 300)) == 1
    (copy / FILES).unlink()
    assert "FILES.jsonl: missing" in verify_files(found, 70, 300)[0]


def test_a_list_that_leaves_the_checkpoint_is_refused_in_spite_of_its_checksum(published) -> None:
    one = json.loads((published / FILES).read_bytes().splitlines()[0])
    one["files"][0]["file"] = "../../other.pt"
    line = json.dumps(one).encode()
    entry = {"start_byte": 0, "size_bytes": len(line), "xxh3_128": xxhash.xxh3_128_hexdigest(line)}
    directory_of_it = published.parent / "crafted"
    directory_of_it.mkdir()
    (directory_of_it / FILES).write_bytes(line)
    with pytest.raises(CheckpointError, match=r"other\.pt"):
        file_lists.read_list(directory_of_it, entry)


def test_lists_are_uploaded_and_restored(tmp_path) -> None:
    run_dir, url = tmp_path / "run", f"file://{tmp_path / 'store'}"
    final = write(run_dir, 70)
    (run_dir / "run.json").write_text("{}")
    files, sums = uploader._stage(run_dir, final.name, tmp_path / "staging")
    assert set(files) >= {FILES, COMMON, *map(own, range(70))} and set(files) == set(sums)
    store = tmp_path / "store" / final.name
    for name, path in files.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, store / name)
    shutil.copyfile(final / MANIFEST, store / MANIFEST)
    restored = restore.restore(url, tmp_path / "again")
    assert restored is not None and restored.manifest == read(final).manifest
    assert verify_files(restored) == [] and len(restored.entries()) == 72
    assert directory.verify_files(restored, 69, 70) == []
    assert checksums.checksum_file(restored.directory / FILES).digest
