"""Random damage to every format never crashes a reader, and every byte is accounted for."""

import bz2
import csv
import gzip
import io
import lzma
import random

import pyarrow as pa
import pytest

from data_prep.files.documents import InputRules
from data_prep.read.bad_input import summary_lines
from tests.data_prep.files.test_streams import compress_long
from tests.data_prep.read.small_inputs import find, read_all
from tests.input_edges import arrow_of
from tests.web_pages import topic_pages, write_warc

ROUNDS = 600


def intact_files(directory):
    pages = topic_pages(10)
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["id", "text"])
    writer.writerows([n, f'row "{n}" é\nsecond, line'] for n in range(40))
    rows = table.getvalue().encode()
    lines = b"".join(b'{"text": "line %d"}\n' % n for n in range(400))
    return {
        "z.warc.gz": write_warc(directory / "z.warc.gz", pages).read_bytes(),
        "z.warc": write_warc(directory / "z.warc", pages).read_bytes(),
        "z.csv": rows,
        "z.csv.gz": gzip.compress(rows),
        "z.tsv": rows.replace(b",", b"\t"),
        "z.jsonl.bz2": bz2.compress(lines),
        "z.jsonl.xz": lzma.compress(lines),
        "z.jsonl.zst": compress_long(lines),
        "z.arrow": arrow_of(pa.table({"text": [f"row {n}" for n in range(400)]})),
        "z.html": pages[0][1],
        "z.txt": ("é café naïve\n" * 30).encode("cp1252"),
    }


def damaged(content, rng):
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place, kind = rng.randrange(len(data) or 1), rng.randrange(5)
        if kind == 0 and data:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place : place + rng.randrange(1, 2000)]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randrange(1, 50))
        elif kind == 3:
            data = data[:place]
        else:
            data[place : place + 20] = b"\0" * 20
    return bytes(data)


def read(inputs, rules, unit_bytes):
    documents, tally = read_all(inputs, rules, unit_bytes, 3000)
    return [(each.text, each.start) for each in documents], tally


@pytest.mark.soak
def test_damage_is_counted_alike_in_units_of_any_size(tmp_path):
    rng = random.Random(0)
    files = intact_files(tmp_path)
    for number in range(ROUNDS):
        name = rng.choice(list(files))
        path, content = tmp_path / name, damaged(files[name], rng)
        path.write_bytes(content)
        encoding = rng.choice(["utf-8", "auto", "utf-16", "cp1252"])
        rules = InputRules(on_bad_input="skip", max_bad_fraction=1, encoding=encoding)
        inputs = find([path], rules)
        documents, tally = read(inputs, rules, 1 << 30)
        again = read(inputs, rules, rng.choice([500, 3000, 9000]))
        assert (again[0], again[1].record()) == (documents, tally.record()), (number, name)
        assert tally.input_bytes + tally.lost_bytes == len(content), (number, name)
        summary_lines(inputs, tally, rules)
