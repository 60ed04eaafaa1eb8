"""The same texts in every format, and how to read them."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from data_prep.read.discovery import find_inputs
from data_prep.read.documents import InputRules
from data_prep.read.work_units import Tally, plan_units, read_batches

TEXTS = [f"document {number} " + "word " * (number % 7) * 9 for number in range(60)]


def jsonl(texts=TEXTS) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_txt(path: Path) -> str:
    path.mkdir()
    for number, text in enumerate(TEXTS):
        (path / f"{number:03}.txt").write_text(text)
    return str(path)


def write_jsonl(path: Path) -> str:
    path = path.with_suffix(".jsonl")
    path.write_bytes(jsonl()[:-1])  # without the last newline
    return str(path)


def write_gz(path: Path) -> str:
    path = path.with_suffix(".jsonl.gz")
    path.write_bytes(gzip.compress(jsonl(TEXTS[:9])) + gzip.compress(jsonl(TEXTS[9:])))
    return str(path)


def write_zst(path: Path) -> str:
    path = path.with_suffix(".jsonl.zst")
    frames = [pa.compress(jsonl(part), "zstd", asbytes=True) for part in (TEXTS[:9], TEXTS[9:])]
    path.write_bytes(b"".join(frames))
    return str(path)


def write_parquet(path: Path) -> str:
    path = path.with_suffix(".parquet")
    table = pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})
    pq.write_table(table, path, row_group_size=17)
    return str(path)


WRITERS = [write_txt, write_jsonl, write_gz, write_zst, write_parquet]


def read(arguments, text_field="text", chunk_bytes=1 << 18, unit_bytes=None) -> list[str]:
    inputs, _ = find_inputs(arguments, text_field)
    tally = Tally()
    batches = [
        batch
        for unit in plan_units(inputs, unit_bytes)
        for batch in read_batches(inputs, unit, InputRules(text_field), tally, chunk_bytes)
    ]
    texts = [document.text for batch in batches for document in batch.documents]
    assert tally.num_documents == len(texts) and not tally.bad
    assert tally.input_bytes == sum(each.size_bytes for each in inputs)
    return texts
