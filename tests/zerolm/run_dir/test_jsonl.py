import json
import random

import pytest

from zerolm.run_dir import jsonl
from zerolm.run_dir.jsonl import SampleRow


def write(path, steps, size: int = 0) -> None:
    rows = [
        {
            "step": step,
            "tokens": 0,
            "prompt": "",
            "text": "x" * random.Random(step).randint(0, size),
        }
        for step in steps
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("size", [0, 200_000], ids=["short", "longer than a block"])
def test_the_end_is_what_reading_everything_gives(tmp_path, size) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 1, 2, 3, 3, 3, 4, 6], size)
    everything = list(jsonl.read_rows(path, SampleRow))
    for step in range(8):
        rows, end = jsonl.rows_from(path, step, SampleRow)
        assert rows == [row for row in everything if row["step"] >= step]
        kept = [json.loads(line) for line in path.read_bytes()[:end].splitlines()]
        assert kept == [row for row in everything if row["step"] <= step]


def test_a_line_that_is_not_whole_is_cut_off(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    rows, end = jsonl.rows_from(path, 2, SampleRow)
    assert [row["step"] for row in rows] == [2, 3]
    jsonl.truncate(path, end)
    assert [row["step"] for row in jsonl.read_rows(path, SampleRow)] == [1, 2]
    assert path.read_bytes().endswith(b"\n")


def test_nothing_is_an_empty_file(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert jsonl.rows_from(path, 0, SampleRow) == ([], 0)
    jsonl.truncate(path, 0)
    assert path.read_bytes() == b"" and jsonl.rows_from(path, 5, SampleRow) == ([], 0)


def test_only_the_end_is_read(tmp_path, monkeypatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(100_000))
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    blocks = []
    original = jsonl._lines_backwards
    monkeypatch.setattr(
        jsonl,
        "_lines_backwards",
        lambda path: (blocks.append(start) or (start, line) for start, line in original(path)),
    )
    rows, _ = jsonl.rows_from(path, 99_998, SampleRow)
    assert [row["step"] for row in rows] == [99_998, 99_999]
    assert len(blocks) == 3
