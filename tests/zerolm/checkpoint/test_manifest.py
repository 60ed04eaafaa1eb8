"""A manifest is read by earlier and later releases, and any damage to it is found."""

import json

import pytest

from tests.zerolm.checkpoint.written_checkpoints import fill, write
from zerolm.checkpoint import directory as checkpoint_directory
from zerolm.checkpoint.checksums import RANGE_BYTES
from zerolm.checkpoint.directory import candidates, publish
from zerolm.checkpoint.manifest import (
    Progress,
    SavedProgress,
    files_problem,
    manifest_digest,
)
from zerolm.common.errors import CheckpointError
from zerolm.run_dir.files import MANIFEST


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_three_versions_of_a_manifest_are_read(tmp_path, version) -> None:
    temporary, manifest = fill(tmp_path, 5)
    assert manifest["version"] == 3, "earlier releases read a checkpoint without lists"
    final = publish(temporary, {**manifest, "version": version})
    if version in (2, 3, 4):
        assert checkpoint_directory.read(final).progress.step == 5
    else:
        with pytest.raises(CheckpointError, match=f"version {version}, but this release reads"):
            checkpoint_directory.read(final)


def test_a_new_run_has_made_no_progress() -> None:
    assert not any(vars(Progress()).values())
    assert SavedProgress().read() == Progress()


def test_states_that_earlier_releases_stored_in_keys_of_their_own_are_read(tmp_path) -> None:
    directory = write(tmp_path, 5)
    content = json.loads((directory / MANIFEST).read_text())
    earlier = {"steps": 3, "clipped": 1, "noise": 2.5, "signal": 0.5}
    content["progress"] |= {"health": earlier, "ema_counted": 7.0, "clipping": {"norm": 1.0}}
    content["digest"] = manifest_digest(content)
    (directory / MANIFEST).write_text(json.dumps(content))
    found = checkpoint_directory.read(directory).progress.features
    assert found == {"ema": {"counted": 7.0}, "health": earlier}


@pytest.mark.parametrize(
    ("size", "ranges"), [(0, 1), (1, 1), (RANGE_BYTES, 1), (RANGE_BYTES + 1, 2)]
)
def test_a_file_has_a_checksum_for_each_range(size, ranges) -> None:
    for number in (1, 2, 3):
        entry = {"file": "model.pt", "size_bytes": size, "xxh3_128": "0" * 32 * number}
        assert (files_problem([entry]) is None) is (number == ranges)


def test_any_flipped_bit_of_a_manifest_is_detected(tmp_path) -> None:
    write(tmp_path, 5)
    path = write(tmp_path, 10) / MANIFEST
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        if chr(content[place]).isspace():
            continue  # whitespace of JSON has no meaning
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 7
        path.write_bytes(flipped)
        found, damaged = candidates(tmp_path)
        assert [each.progress.step for each in found] == [5], flipped[place - 20 : place + 20]
        assert str(path) in damaged[path.parent]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({"format": "other", "version": 1, "progress": {}})]
)
def test_error_names_a_damaged_manifest(tmp_path, text) -> None:
    directory = write(tmp_path, 5)
    (directory / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"step-00000005/MANIFEST\.json"):
        checkpoint_directory.newest(tmp_path)


def test_a_manifest_with_progress_that_is_not_ours_is_refused_in_spite_of_its_digest(
    tmp_path,
) -> None:
    directory = write(tmp_path, 5)
    content = json.loads((directory / MANIFEST).read_text())
    content["progress"]["other"] = 1
    content["digest"] = manifest_digest(content)
    (directory / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"step-00000005/MANIFEST\.json"):
        checkpoint_directory.read(directory)


def test_the_digest_of_a_manifest_does_not_depend_on_the_order_of_its_keys(tmp_path) -> None:
    manifest = json.loads((write(tmp_path, 5) / MANIFEST).read_text())
    assert manifest_digest(dict(reversed(manifest.items()))) == manifest["digest"]
