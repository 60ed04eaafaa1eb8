"""Inputs are found in the order given; whatever is no input is named or refused."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from data_prep.read.discovery import find_inputs
from tests.data_prep.read.small_inputs import (
    jsonl,
    read,
)
from tests.data_prep.stage_cases import write_stage
from zerolm.common.errors import ConfigError


def test_inputs_are_read_in_the_order_given_and_directories_by_path(tmp_path):
    for name in ("b/two.txt", "b/one.txt", "a/three.txt", "a/deep/four.txt", "a/notes.rst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a[1].txt").write_text("brackets")
    arguments = [str(tmp_path / "b"), str(tmp_path / "a[1].txt"), str(tmp_path / "a")]
    assert read(arguments) == [
        "b/one.txt",
        "b/two.txt",
        "brackets",
        "a/deep/four.txt",
        "a/three.txt",
    ]
    _, notes = find_inputs(arguments, "text")
    assert len(notes) == 1 and "ignored 1 of 3 files" in notes[0] and "notes.rst" in notes[0]
    assert read([str(tmp_path / "?" / "t*.txt")]) == ["a/three.txt", "b/two.txt"]
    deep = read([str(tmp_path / "a" / "**" / "*.txt")])
    assert deep == ["a/deep/four.txt", "a/three.txt"]


def test_hidden_files_are_not_read_and_are_named(tmp_path):
    for name in ("a.txt", ".b.txt", ".cache/c.txt", "d/.e.txt", "d/f.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    inputs, notes = find_inputs([str(tmp_path)], "text")
    assert [Path(each.name).name for each in inputs] == ["a.txt", "f.txt"]
    assert len(notes) == 1 and "ignored 4 hidden files" in notes[0]
    assert read([str(tmp_path / ".b.txt")]) == [".b.txt"], "named, it is read"


def test_every_invalid_input_is_listed(tmp_path):
    (tmp_path / "a.pdf").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("a")
    numbers = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), numbers)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"body": ["a"]}), other)
    wrong = {
        tmp_path / "absent.jsonl": "no such file or directory",
        tmp_path / "a.pdf": "is not one of .txt",
        tmp_path / "empty": "file below",
        tmp_path / "*.gz": "the glob matches nothing",
        numbers: "has type int64, not string",
        other: "no column 'text'; it has body",
        "namespace/absent": "cannot be opened as a hub dataset",
    }
    with pytest.raises(ConfigError) as caught:
        find_inputs([*map(str, wrong), str(tmp_path / "a.txt"), str(tmp_path)], "text")
    for argument, named in wrong.items():
        lines = [line for line in caught.value.problems if str(argument) in line and named in line]
        assert len(lines) == 1, (argument, caught.value.problems)
    assert any("is already named" in line for line in caught.value.problems)


@pytest.mark.parametrize("records", ["records/clean", "work/records/dedup.signatures"])
def test_an_unfinished_stage_is_refused(tmp_path, records):
    stage = tmp_path / "corpus" / "stage"
    (stage / records).mkdir(parents=True)
    (stage / records / "00000.json").write_text("{}")
    (stage / "00000.jsonl").write_bytes(jsonl())
    for argument in (stage, stage.parent):
        with pytest.raises(ConfigError, match=f"{stage} is an unfinished stage"):
            find_inputs([str(argument)], "text")
    (stage / records / "00000.json").unlink()  # other directories may have such names
    assert len(find_inputs([str(stage)], "text")[0]) == 1


def test_stages_below_a_directory_are_refused_by_name(tmp_path, monkeypatch):
    """Otherwise the documents of all stages, and their lists of dropped ones, would be read."""
    (tmp_path / "out").mkdir()
    for name in ("clean", "dedup"):
        write_stage(tmp_path / "out" / name, ["a", "b"], 1)
    (tmp_path / "out" / "dedup" / "duplicates.jsonl.zst").write_bytes(b"")
    clean, dedup = (str(tmp_path / "out" / name) for name in ("clean", "dedup"))
    for argument in (tmp_path, tmp_path / "out", tmp_path / "**/*.zst", f"{dedup}/d*.jsonl.zst"):
        with pytest.raises(ConfigError, match=rf"--input .* of . stages.*{dedup}\b.*Give the dir"):
            find_inputs([str(argument)], "text")
    assert len(find_inputs([clean], "text")[0]) == 2
    monkeypatch.chdir(clean)
    with pytest.raises(ConfigError, match="of 1 stages"):
        find_inputs(["*.zst"], "text")


def test_a_json_array_is_refused_with_the_command_that_converts_it(tmp_path):
    for name in ("a.json", "b.jsonl", "c.jsonl"):
        indent = 1 if name == "c.jsonl" else None
        (tmp_path / name).write_text(json.dumps([{"text": "a"}], indent=indent))
        with pytest.raises(ConfigError, match=r"jq -c '\.\[\]' a\.json > a\.jsonl"):
            read([str(tmp_path / name)])
