"""Lines of streams and of files, compared with plain Python."""

import itertools
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.files import lines as lines_module
from data_prep.files import streams
from data_prep.files.lines import count_lines, read_line_blocks, read_plain_line_blocks
from data_prep.files.streams import Stream


class Blocks(list):
    """A stream that did not fail."""

    read_bytes = 0
    failure = None


@given(
    st.text(alphabet="ab\n", max_size=40).map(str.encode),
    st.integers(1, 7),
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), max_size=4).map(sorted),
)
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("is_file", [False, True])
def test_any_ranges_of_a_file_give_each_line_once(
    is_file, tmp_path_factory, data, block, chunk, limit, cuts
):
    """For any ranges and blocks; a line belongs to the range in which it starts."""
    file = tmp_path_factory.getbasetemp() / "ranges.jsonl"
    cuts = [0, *(cut for cut in cuts if cut < len(data)), None]
    found = []

    def lines_of(start, stop):
        rest = data[max(0, start - 1) :]
        if not is_file:
            blocks = Blocks(rest[at : at + block] for at in range(0, len(rest), block))
            return read_line_blocks(blocks, start, stop, chunk, limit)
        file.write_bytes(data)
        stream = Stream(str(file), ".jsonl", start, 200)
        with patch.object(lines_module, "SEARCH_BYTES", block):
            return list(read_plain_line_blocks(stream, start, stop, chunk, limit))

    for start, stop in itertools.pairwise(cuts):
        if start == stop:
            continue
        for lines in lines_of(start, stop):
            assert lines.stop > lines.start and data[lines.start : lines.stop].endswith(lines.data)
            assert not found or found[-1].stop == lines.start
            assert lines.data or lines.stop - lines.start > limit, "a short line was dropped"
            found.append(lines)
    assert (found[-1].stop if found else 0) == len(data)
    for lines in found:
        whole = lines.data.splitlines(keepends=True)
        assert all(line in data.splitlines(keepends=True) for line in whole)
    kept = [line for lines in found for line in lines.data.splitlines()]
    assert [line for line in kept if len(line) <= limit] == [
        line for line in data.splitlines() if len(line) <= limit
    ]


def test_line_numbers_are_those_of_an_editor(monkeypatch, tmp_path):
    monkeypatch.setattr(streams, "READ_BYTES", 7)
    data = b"one\ntwo\n\nfour\nfive"
    offsets = [0, 3, 4, 8, 9, 14, 18, 40]
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    stream = Stream(str(path), ".jsonl", 0, 200)
    assert count_lines(stream, offsets) == [data.count(b"\n", 0, at) + 1 for at in offsets]
