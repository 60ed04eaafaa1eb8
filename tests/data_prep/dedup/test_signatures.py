"""Comparison with kept signatures equals one pass over everything, which equals brute force."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.dedup.dedup import run_dedup
from data_prep.dedup.options import DedupOptions
from data_prep.read.stage_files import read_records, read_stage
from data_prep.stages.documents import stage_documents
from data_prep.tasks.phases import LocalExecutor
from tests import ROOT
from tests.data_prep.dedup.near_copies import planted_texts, similar_pairs
from tests.data_prep.dedup.test_dedup import SHORT, expected_kept, files_of
from tests.data_prep.stage_cases import documents_of, write_stage
from zerolm.common.errors import ConfigError
from zerolm.common.files import write_json
from zerolm.common.records import with_digest

CUTS = (0, 70, 71, 150, 260)  # of the texts: one stage has a single document


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Planted copies of all kinds, across stages and within them."""
    planted = planted_texts(40, 4, seed=5)
    template = " ".join(f"row{n} of a page that is made from one template" for n in range(60))
    pages = [f"{template} {n}" for n in range(30)]
    mixed = planted + planted[:20] + SHORT + SHORT + pages + [pages[7]] * 2
    random.Random(1).shuffle(mixed)
    return mixed[: CUTS[-1]]


@pytest.fixture(scope="module")
def parts(texts, tmp_path_factory) -> list[Path]:
    directory = tmp_path_factory.mktemp("parts")
    return [
        write_stage(directory / f"part{number}", texts[start:end], 60, start)
        for number, (start, end) in enumerate(itertools.pairwise(CUTS))
    ]


def dedup(source: Path, output: Path, *against: Path, **options):
    documents = stage_documents(read_stage(source))
    keep = {"keep_signatures": True, **options}
    chosen = DedupOptions(against=tuple(map(str, against)), **keep)
    manifest = run_dedup(chosen, documents, output, LocalExecutor(1))
    return manifest, documents_of(output), list(read_records(output / "duplicates.jsonl.zst"))


@pytest.fixture(scope="module")
def chain(parts, tmp_path_factory) -> list[Path]:
    """Each part compared with all parts before it, one process after the other."""
    directory, done = tmp_path_factory.mktemp("chain"), []
    for number, part in enumerate(parts):
        dedup(part, directory / f"new{number}", *done)
        done.append(directory / f"new{number}")
    return done


def test_parts_one_after_the_other_equal_one_pass_and_brute_force(texts, parts, chain, tmp_path):
    union = write_stage(tmp_path / "union", texts, 200)
    _, kept, notes = dedup(union, tmp_path / "one", keep_signatures=False)
    in_parts = [record for each in chain for record in documents_of(each)]
    assert in_parts == kept
    expected = expected_kept(texts, similar_pairs(texts, 0.8), 0.8)
    assert [record["id"] for record in kept] == [f"d{number}" for number in sorted(expected)]
    found = [note for each in chain for note in read_records(each / "duplicates.jsonl.zst")]
    stores = [note.pop("kept_in", None) for note in found]
    assert found == notes and len(notes) > 60
    owner = {
        record["id"]: f"{each.parent.name}/{each.name}"
        for each in chain
        for record in documents_of(each)
    }
    own = {
        note["id"]: f"{each.parent.name}/{each.name}"
        for each in chain
        for note in read_records(each / "duplicates.jsonl.zst")
    }
    for note, store in zip(found, stores, strict=True):
        assert owner[note["kept"]] == (store or own[note["id"]])
    assert sum(store is not None for store in stores) > 30


def test_exact_copies_alone_are_found_across_stages(texts, parts, tmp_path):
    done: list[Path] = []
    for number, part in enumerate(parts[:3]):
        dedup(part, tmp_path / f"new{number}", *done, near=False, exact="words")
        done.append(tmp_path / f"new{number}")
    union = write_stage(tmp_path / "union", texts[: CUTS[3]], 200)
    _, kept, _ = dedup(union, tmp_path / "one", near=False, exact="words")
    assert [record for each in done for record in documents_of(each)] == kept


def test_the_old_text_is_not_read_again(chain, parts, tmp_path):
    """Only the signatures are there, moved to another place."""
    for number, each in enumerate(chain[:-1]):
        shutil.copytree(each / "signatures", tmp_path / f"moved{number}")
    moved = [tmp_path / f"moved{number}" for number in range(3)]
    manifest, kept, _ = dedup(parts[3], tmp_path / "out", *moved)
    assert kept == documents_of(chain[3])
    again = json.loads((chain[3] / "stage.json").read_text())
    assert manifest["against"] == again["against"] and len(manifest["against"]) == 3
    assert [each["num_documents"] for each in manifest["against"]] == [70, 1, 79]


@pytest.mark.soak
def test_a_killed_comparison_resumes_with_the_same_bytes(chain, parts, tmp_path):
    output = tmp_path / chain[3].parent.name / chain[3].name  # its name is in the signatures
    command = [sys.executable, "-m", "data_prep", "dedup", "--input", parts[3], "--output", output]
    command += ["--keep_signatures", "on", "--workers", "1", "--against", *chain[:3]]
    kill_at_phases(command, output, ("dedup.signatures", "dedup.verify", "dedup.keep"))
    names = ("options", "before")
    assert {**_manifest(output), **dict.fromkeys(names)} == {
        **_manifest(chain[3]),
        **dict.fromkeys(names),
    }
    ours, theirs = files_of(output), files_of(chain[3])
    del ours["stage.json"], theirs["stage.json"]
    assert ours == theirs
    assert _files(output / "signatures") == _files(chain[3] / "signatures")
    assert not (output / "work").exists()


def kill_at_phases(command: list[object], output: Path, phases: Sequence[str]) -> None:
    """Kill a command at the first record of each phase, then let it end."""
    argv = [str(each) for each in command]
    for phase in phases:
        work = output if phase.endswith(".write") else output / "work"
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while process.poll() is None and not (work / "records" / phase / "00000.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(argv, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)


def _manifest(output: Path) -> dict:
    return json.loads((output / "stage.json").read_text())


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_signatures_that_cannot_be_compared_are_refused_together(chain, parts, tmp_path, capsys):
    def refused(*more: object) -> str:
        command = ["dedup", "--input", parts[3], "--output", tmp_path / "out", *more]
        assert main([str(each) for each in command]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    shown = refused("--against", chain[0], tmp_path / "none", "--threshold", "0.7")
    assert "threshold is 0.8, but 0.7 for the new documents. Use threshold 0.8" in shown
    assert "none: has no signatures (signatures.json is missing)" in shown
    assert "new2: its documents were compared with those of" in refused("--against", chain[2])
    assert "already given" in refused("--against", chain[0], chain[0] / "signatures")
    manifest = json.loads((chain[0] / "signatures" / "signatures.json").read_text())
    broken = tmp_path / "broken"
    for key, value, reason in (
        ("version", 2, "'zerolm-signatures' version 2, not"),
        ("settings", {**manifest["settings"], "unicode": "1.0"}, "unicode is '1.0', but"),
        ("units", 3, "It is damaged"),
    ):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(chain[0] / "signatures", broken)
        write_json(broken / "signatures.json", with_digest({**manifest, key: value}))
        assert reason in refused("--against", broken)
    command = ["dedup", "--input", parts[3], "--output", chain[0], "--against", chain[0]]
    assert main([str(each) for each in command]) == 2
    assert "is in the output of this stage" in capsys.readouterr().err
    assert (chain[0] / "stage.json").exists()


@pytest.mark.parametrize("kind", ["exact", "bands", "members", "dropped"])
def test_damaged_signatures_are_refused_before_they_decide(chain, parts, tmp_path, kind):
    shutil.copytree(chain[0], tmp_path / "old")
    path = tmp_path / "old" / "signatures" / kind / "00001.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{kind}/00001\.npy: its SHA-256 differs"):
        dedup(parts[1], tmp_path / "out", tmp_path / "old")
    path.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"{kind}/00001\.npy: has .* bytes; signatures\.json"):
        dedup(parts[1], tmp_path / "out", tmp_path / "old")
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{kind}/00001\.npy: is missing"):
        dedup(parts[1], tmp_path / "out", tmp_path / "old")
    assert not (tmp_path / "out" / "stage.json").exists()


def test_signatures_are_written_when_they_are_asked_for_later(parts, tmp_path):
    first, kept, _ = dedup(parts[0], tmp_path / "out", keep_signatures=False)
    assert not (tmp_path / "out" / "signatures").exists()
    again, same, _ = dedup(parts[0], tmp_path / "out")
    assert same == kept and (tmp_path / "out" / "signatures" / "signatures.json").exists()
    assert again["signatures"]["num_documents"] == first["documents_in"] == 70
    shutil.rmtree(tmp_path / "out" / "signatures")
    dedup(parts[0], tmp_path / "out")
    assert (tmp_path / "out" / "signatures" / "signatures.json").exists()
    dedup(parts[0], tmp_path / "out", keep_signatures=False)
    assert not (tmp_path / "out" / "signatures").exists()
