"""The same texts in every format, and how to read them."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from data_prep.files import streams
from data_prep.files.documents import Document, InputRules
from data_prep.files.inputs import Input
from data_prep.read.discovery import find_inputs
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


def find(paths, rules: InputRules) -> list[Input]:
    """Return the inputs of paths as a command with these rules finds them."""
    skip = rules.on_bad_input == "skip"
    names = [str(path) for path in paths]
    return find_inputs(names, rules.text_field, skip, rules.encoding, rules.code)[0]


def read_all(
    inputs, rules: InputRules, unit_bytes=None, chunk_bytes=1 << 16
) -> tuple[list[Document], Tally]:
    """Return all documents of inputs, and the tally."""
    tally, documents = Tally(), []
    for unit in plan_units(inputs, unit_bytes):
        for batch in read_batches(inputs, unit, rules, tally, chunk_bytes):
            documents += batch.documents
    return documents, tally


def read_resuming(
    inputs, rules: InputRules, unit_bytes=None, chunk_bytes=2000, samples=2
) -> tuple[list[Document], Tally]:
    """Return as `read_all`, after a check that reading resumes after any batch.

    With the tally at that batch, restored from JSON.
    """
    tally, documents, states = Tally(), [], []
    for unit in plan_units(inputs, unit_bytes):
        own, places = list[Document](), []
        for batch in read_batches(inputs, unit, rules, tally, chunk_bytes):
            own += batch.documents
            places.append((len(own), json.dumps([batch.next, tally.record()])))
        states += [(unit, own, tally.record(), *place) for place in places]
        documents += own
    for unit, own, end, done, state in random.Random(0).sample(states, min(samples, len(states))):
        position, record = json.loads(state)
        later, rest = Tally.from_records([record]), []
        for batch in read_batches(inputs, unit, rules, later, chunk_bytes // 2 + 1, position):
            rest += batch.documents
        assert own[:done] + rest == own
        # In a compressed file the skipped bytes are known up to a block.
        assert abs(later.input_bytes - end["input_bytes"]) <= 2 * streams.READ_BYTES
        assert later.record() | {"input_bytes": 0} == end | {"input_bytes": 0}
    return documents, tally


def read(arguments, text_field="text", chunk_bytes=1 << 18, unit_bytes=None) -> list[str]:
    """Return the texts of intact inputs."""
    rules = InputRules(text_field)
    inputs = find(arguments, rules)
    documents, tally = read_all(inputs, rules, unit_bytes, chunk_bytes)
    assert tally.num_documents == len(documents) and not tally.bad
    assert tally.input_bytes == sum(each.size_bytes for each in inputs)
    return [document.text for document in documents]
