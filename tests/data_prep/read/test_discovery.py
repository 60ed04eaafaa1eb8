"""Inputs are found in the order given; whatever is no input is named or refused."""

import gzip
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


def test_a_name_with_a_line_break_is_refused_in_one_line(tmp_path):
    (tmp_path / "a\nzerolm: done.txt").write_text("a")
    with pytest.raises(ConfigError) as refusal:
        find_inputs([str(tmp_path)], "text")
    assert str(refusal.value).count("\n") == 0
    assert r"a\nzerolm: done.txt: has a line break in its name. Rename it." in str(refusal.value)


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


HIDDEN = (
    "_temporary/0/part-0.txt", "_old/0.jsonl", "_SUCCESS.txt", "k=1/_part-1.txt", "~$a.txt",
    "__MACOSX/a.txt", "__MACOSX/._a.txt", "._a.txt", ".a.txt.crc", "@eaDir/a.txt",
)  # fmt: skip
OTHER = (
    "Thumbs.db",
    "desktop.ini",
    "_SUCCESS",
    "a.txt~",
    "b.txt.tmp",
    "part-0.inprogress.7",
    "x.crc",
)


def write_files(top, names):
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"text of {name}")


def test_files_that_other_programs_hide_are_not_read_and_are_counted(tmp_path):
    write_files(tmp_path, [*HIDDEN, *OTHER, "a.txt", "k=1/b.txt", "_day=2/c.txt"])
    read_names = ["_day=2/c.txt", "a.txt", "k=1/b.txt"]
    for argument in (str(tmp_path), f"file://{tmp_path}", str(tmp_path / "**/*.txt")):
        inputs, notes = find_inputs([argument], "text")
        found = [each.name.removeprefix("file://") for each in inputs]
        assert found == [str(tmp_path / name) for name in read_names], argument
        assert any("ignored" in note and "hidden" in note for note in notes), argument
    assert "ignored 12 hidden files" in " ".join(find_inputs([str(tmp_path)], "text")[1])


def test_what_an_argument_names_is_read_whatever_its_name(tmp_path):
    write_files(tmp_path / "_top", ["_a.txt", "b.txt", "_sub/c.txt", "README.md"])
    top = tmp_path / "_top"
    for argument, names in {
        "_a.txt": ["_a.txt"],
        "": ["b.txt"],
        "_sub": ["_sub/c.txt"],
        "_*": ["_a.txt", "_sub/c.txt"],
        "*.txt": ["b.txt"],
        "*.md": ["README.md"],
        "_*/*.txt": ["_sub/c.txt"],
    }.items():
        inputs, _ = find_inputs([str(top / argument)], "text")
        assert [each.name for each in inputs] == [str(top / name) for name in names], argument


def test_code_may_have_names_with_underscores(tmp_path):
    pytest.importorskip("identify")
    write_files(tmp_path, ["pkg/__init__.py", "_a.py", "__MACOSX/b.py", "desktop.ini", "._c.py"])
    inputs, _ = find_inputs([str(tmp_path)], "text", code=True)
    assert [Path(each.name).name for each in inputs] == ["_a.py", "__init__.py"]


POINTERS = {
    "Git LFS": f"version https://git-lfs.github.com/spec/v1\noid sha256:{7:064}\nsize 12345\n",
    "git-annex": f"/annex/objects/SHA256E-s12345--{7:064}.txt\n",
    "git-annex.": f"../.git/annex/objects/xX/yY/SHA256E-s1--{7:064}/SHA256E-s1--{7:064}",
    "Git-Xet": "# xet version 0\nfilesize = 12345\nhash = '77'\n",
}


@pytest.mark.parametrize("program", POINTERS)
@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.parquet", "a.csv", "a.jsonl.gz", "a.arrow"]
)
def test_a_pointer_to_a_file_elsewhere_is_no_document(tmp_path, program, name):
    (tmp_path / name).write_text(POINTERS[program])
    for argument in (tmp_path, tmp_path / name):
        with pytest.raises(
            ConfigError, match=f"is a pointer of {program.rstrip('.')}, not the file itself"
        ):
            find_inputs([str(argument)], "text")
    if not name.endswith((".parquet", ".csv", ".arrow")):  # whose columns are looked at first
        with pytest.raises(
            ConfigError, match=f"is a pointer of {program.rstrip('.')}, not the file itself"
        ):
            read([f"file://{tmp_path / name}"])
    (found,), _ = find_inputs([str(tmp_path)], "text", skip_bad=True)
    assert found.problem is not None
    (tmp_path / name).unlink()
    (tmp_path / "b.txt").write_text("The version https://git-lfs.github.com/spec/v1 of a pointer.")
    assert len(read([str(tmp_path)])) == 1, "a text about it"


def test_a_file_is_read_once_whatever_its_links(tmp_path):
    write_files(tmp_path, ["a.txt", "c.txt"])
    (tmp_path / "b.txt").hardlink_to(tmp_path / "a.txt")
    (tmp_path / "d.txt").symlink_to(tmp_path / "c.txt")
    for argument in (tmp_path, tmp_path / "*.txt"):
        inputs, notes = find_inputs([str(argument)], "text")
        assert [Path(each.name).name for each in inputs] == ["a.txt", "c.txt"]
        assert "ignored 2 more links to files that are already read" in notes[0]
    for two in ("b.txt", "a.txt"):
        with pytest.raises(ConfigError, match="is already named by --input"):
            find_inputs([str(tmp_path / "a.txt"), str(tmp_path / two)], "text")


def test_a_loop_of_links_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.txt: is not a readable file \(a broken link\)"):
        find_inputs([str(tmp_path)], "text")


def test_a_file_that_is_there_compressed_and_not_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl()))
    _, notes = find_inputs([str(tmp_path)], "text")
    names = f"{tmp_path / 'a.jsonl'} and {tmp_path / 'a.jsonl.gz'}"
    assert len(notes) == 1 and "both are read" in notes[0] and names in notes[0]


@pytest.mark.parametrize(
    ("content", "is_read"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', True),
        ('\ufeff{"text": "a"}\n{"text": "b"}', True),
        ('{"text": "a"}', True),
        ('{"text": "' + "long " * 300_000 + '"}\n{"text": "b"}\n', True),
        ('{"a": [' + "1, " * 500_000 + '2], "text": "b"}', False),  # beyond what is looked at
        ('{"a": "' + "long " * 300_000 + '", "b": 1}\n', False),
        ('\n\n{"text": "a"}', True),
        ('{"note": 1}\n\n{"text": "b"}\n', True),
        ('{"text": 7, "vocab": 8}', False),
        ('{"note": 1}\n', False),
        ('{"note": 1}\n{"text": "b"}\n', True),  # which then names its first line
        ('{\n "text": "a"\n}\n', False),
        ('[{"text": "a"}]', False),
        ("", False),
        ("7\n8\n", False),
    ],
)
def test_json_lines_are_read_whatever_their_name(tmp_path, content, is_read):
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "b.txt").write_text("b")
    inputs, notes = find_inputs([str(tmp_path)], "text")
    assert len(inputs) == 1 + is_read and any("a.json" in note for note in notes) != is_read
    if is_read:
        assert inputs[0].suffix == ".jsonl"


def test_a_glob_with_two_slashes_hides_the_same_files(tmp_path):
    write_files(tmp_path / "e", ["a.txt", "_x.txt"])
    for glob in ("e/*.txt", "e//*.txt", "./e/*.txt"):
        inputs, notes = find_inputs([f"{tmp_path}/{glob}"], "text")
        assert [Path(each.name).name for each in inputs] == ["a.txt"]
        assert "ignored 1 hidden file" in notes[0], glob
