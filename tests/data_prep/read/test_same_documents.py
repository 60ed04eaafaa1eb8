"""The same rows give the same documents in every format, on a disk, in a store, and from a hub."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.files.documents import InputRules
from data_prep.files.inputs import Input
from data_prep.read.hub import HubDataset
from data_prep.read.work_units import Tally, plan_units, read_batches
from tests.data_prep.read.small_inputs import find, read_all, read_resuming
from tests.hub_server import COMMIT, hub_server
from zerolm.common.errors import ConfigError

RULES = InputRules(keep_records=True, on_bad_input="skip", max_bad_fraction=1)
MORE = [{"text": f"row {number}", "key": number} for number in range(40)]
CASES = {  # rows, and the type of the text column if it is not that of pyarrow's inference
    "strings": ([{"text": "a"}, {"text": "b\nc"}, {"text": " "}], None),
    "strings that look like others": (
        [{"text": '"Yes,"', "zip": "007"}, {"text": "[1, 2]", "zip": "null"},
         {"text": "NaN", "zip": "true"}, {"text": "2026-01-01", "zip": "1e3"}], None),
    "empty and null": ([{"text": ""}, {"text": None}, {"text": "a"}, {"text": "null"}], None),
    "unicode": ([{"text": "é 🦀 \u2028 \0 \ufeff"}, {"text": "العربية\r\n"}], None),
    "large strings": (MORE, pa.large_string()),
    "string views": (MORE, pa.string_view()),
    "bytes": (MORE, pa.binary()),
    "dictionaries": ([*MORE, *MORE], pa.dictionary(pa.int32(), pa.string())),
    "numbers in other keys": (
        [{"text": "a", "n": 1 << 62, "f": 0.1, "b": True}, {"text": "b", "n": None, "f": 1e300,
         "b": False}], None),
    "nested": (
        [{"text": "a", "m": {"u": "x", "l": [1, 2]}}, {"text": "b", "m": {"u": None, "l": []}}],
        None),
    "a number among texts": (
        [{"text": 7, "key": 1}, {"text": '"x"', "key": 2}, *MORE, {"text": 1.5, "key": 3}], None),
    "a column of several types": (
        [{"text": "one", "zip": 3}, {"text": "two", "zip": "007"}, {"text": "3", "zip": "null"},
         {"text": "four", "zip": [1]}, {"text": "five", "zip": {"a": {"b": "1"}}}], None),
    "objects of several keys": (
        [{"text": "a", "m": {"url": "x"}}, {"text": "b", "m": {"lang": "en", "n": 1}}], None),
    "lists of several types": ([{"text": "a", "l": [1, "1"]}, {"text": "b", "l": []}], None),
}  # fmt: skip


def json_column(values) -> pa.Array:
    literals = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(literals, pa.string()))


def column(values, column_type=None) -> pa.Array:
    """Return a column like that of `datasets`: of the type JSON if there are several types."""
    if any(isinstance(value, list) for value in values) and column_type is None:
        items = [value for each in values for value in each or ()] if not any(
            not isinstance(value, list | None) for value in values) else [1, "1"]  # fmt: skip
        if len({type(item) for item in items}) > 1 and items != [1, "1"]:
            return json_column(values)
    kinds = {str(pa.infer_type([value])) for value in values if value is not None}
    is_struct = all(kind.startswith("struct") for kind in kinds)
    keys = {tuple(value) for value in values if isinstance(value, dict)}
    if len(kinds) > 1 and not (is_struct and len(keys) == 1):
        return json_column(values)
    if column_type and pa.types.is_dictionary(column_type):
        return pa.array(values).dictionary_encode()
    if column_type == pa.binary():
        values = [value.encode() for value in values]
    return pa.array(values, column_type)


def write(folder: Path, kind: str, rows, text_type) -> str:
    """Write rows as the only file of a folder."""
    folder.mkdir(parents=True)
    path = folder / f"train{kind}"
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)
    columns = {key: column([row[key] for row in rows], text_type if key == "text" else None)
               for key in rows[0]}  # fmt: skip
    table = pa.table(columns)
    if kind == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return str(path)


def hub_input(folder: Path) -> list[Input]:
    """`datasets` resolves the files of a local folder as it does those of a hub repository."""
    name = "namespace/name"
    return [Input(name, name, "hub", None, hub=HubDataset(str(folder), None, "train"))]


def result(inputs):
    documents, tally = read_all(inputs, RULES)
    return [(each.text, each.record) for each in documents], dict(tally.bad), dict(tally.skipped)


def differences(folder: Path, case: str) -> dict[str, bool]:
    """Return for each format and place whether its documents differ from the rows."""
    rows, text_type = CASES[case]
    kept = [row for row in rows if isinstance(row["text"], str) and row["text"]]
    counts = Counter(
        "null" if row["text"] is None else "empty" if row["text"] == "" else "not_a_string"
        for row in rows if row not in kept
    )  # fmt: skip
    bad = {key: counts.pop(key) for key in ["not_a_string"] if key in counts}
    expected = [(row["text"], row) for row in kept], bad, dict(counts)
    differ = {}
    for kind in (".jsonl", ".parquet", ".arrow"):
        path = write(folder / kind[1:], kind, rows, text_type)
        places = {
            "local": find([path], RULES),
            "store": find([f"file://{path}"], RULES),
            "hub": hub_input(Path(path).parent),
        }
        for place, inputs in places.items():
            differ[f"{kind} {place}"] = result(inputs) != expected
    return differ


@pytest.mark.parametrize("case", CASES)
def test_rows_give_the_same_documents_in_every_format_and_place(tmp_path, case):
    differ = differences(tmp_path, case)
    assert len(differ) == 9 and not any(differ.values()), differ


def test_files_that_datasets_writes_give_the_documents_of_their_json_lines(tmp_path):
    """Also if documents are in a key of a column of the type JSON."""
    rows = [
        {"text": "a", "meta": {"t": "x"}, "l": [1, "b"]},
        {"text": 7, "meta": {"t": "\n", "n": 1}, "l": []},
    ]
    path = write(tmp_path / "lines", ".jsonl", rows, None)
    made = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path))
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    expected = result(find([path], RULES))
    assert expected[0] == [("a", rows[0])]
    for keep in (True, False):
        rules = InputRules("meta.t", keep_records=keep)
        for name in ("a.parquet", "saved"):
            documents, _ = read_all(find([tmp_path / name], rules), rules)
            assert [each.text for each in documents] == ["x", "\n"]
            assert result(find([tmp_path / name], RULES)) == expected


def test_json_columns_of_other_programs_are_decoded(tmp_path):
    """DuckDB and others write the type of Parquet without Arrow's schema."""
    table = pa.table({"text": ["a"], "j": json_column([{"t": "b", "n": [1]}])})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    for field, text in (("text", "a"), ("j.t", "b")):
        for keep in (True, False):
            rules = InputRules(field, keep_records=keep)
            (document,), _ = read_all(find([tmp_path / "a.parquet"], rules), rules)
            assert document.text == text
            assert not keep or document.record == {"text": "a", "j": {"t": "b", "n": [1]}}


def test_a_literal_that_is_not_json_is_bad_input(tmp_path):
    values = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"a"', "b", "null", '"\\ud800"']))
    table = pa.table({"text": values, "same": values})
    pq.write_table(table, tmp_path / "a.parquet")
    documents, bad, skipped = result(find([tmp_path / "a.parquet"], RULES))
    assert documents == [("a", {"text": "a", "same": "a"})]
    assert bad == {"not_a_string": 1, "lone_surrogate": 1} and skipped == {"null": 1}


@pytest.mark.parametrize("keep", [True, False])
def test_a_hub_dataset_of_several_files_is_resumed_at_any_row(tmp_path, keep):
    """Rows are counted over all files; a problem has its row in its file."""
    (tmp_path / "data").mkdir()
    lines = "".join(f'{{"text": "{n} é"}}\n\n' for n in range(50)) + '{"text": 7}\n'
    (tmp_path / "data/train-0.jsonl").write_text(lines)
    (tmp_path / "data/train-1.jsonl").write_text('{"text": "last"}')
    rules = InputRules(keep_records=keep, on_bad_input="skip")
    documents, tally = read_resuming(hub_input(tmp_path), rules, chunk_bytes=100, samples=9)
    assert [each.text for each in documents] == [*(f"{n} é" for n in range(50)), "last"]
    assert [each.start for each in documents] == [*range(0, 100, 2), 101]
    (example,) = tally.examples
    assert (
        example.place == f"{tmp_path}/data/train-0.jsonl:101" and tally.skipped["blank_lines"] == 50
    )
    inputs = hub_input(tmp_path)
    (unit,) = plan_units(inputs)
    late = [each for batch in read_batches(inputs, unit, rules, Tally(), start=(0, 98))
            for each in batch.documents]  # fmt: skip
    assert [each.text for each in late] == ["49 é", "last"]


CARD = "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: '#'\n---\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[\n{"text": "a"}]', "train|a.json:1: not valid JSON .*jq -c"),
        ("a.csv", "id,text\n1,007\n2,null\n", None),
        ("a.txt", "two\nlines", None),
        ("README.md", CARD,
         r"its configuration sets sep='#', which"),
    ],
)  # fmt: skip
def test_other_files_of_a_hub_dataset_are_read_like_local_ones(tmp_path, name, content, message):
    (tmp_path / "a.csv" if name == "README.md" else tmp_path / name).write_text(content)
    (tmp_path / name).write_text(content)
    if message:
        with pytest.raises(ConfigError, match=message):
            read_all(hub_input(tmp_path), InputRules())
    else:
        documents = read_all(hub_input(tmp_path), InputRules())[0]
        local = read_all(find([tmp_path / name], RULES), InputRules())[0]
        assert [each.text for each in documents] == [each.text for each in local] != []


FROM_HUB = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(90, exit=True)
from data_prep.files.documents import InputRules
from tests.data_prep.read.small_inputs import find, read_all
rules = InputRules(keep_records=True)
inputs = [find([name], rules) for name in sys.argv[1:]]
read = [[each.record for each in read_all(found, rules)[0]] for found in inputs]
print(json.dumps([read, inputs[0][0].packages]))
"""


def test_a_repository_of_a_hub_is_read_like_its_directory(tmp_path):
    """Through the client of the hub and the requests that it makes."""
    rows = [{"text": f"row {n} é", "n": n} for n in range(40)]
    for kind in (".jsonl", ".parquet"):
        write(tmp_path / "root/space" / kind[1:], kind, rows, None)
    names = ["space/jsonl", "space/parquet@train"]
    with hub_server(tmp_path / "root") as (url, requested):
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"),
                       "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}  # fmt: skip
        done = subprocess.run([sys.executable, "-c", FROM_HUB, *names], env=environment,
                              capture_output=True, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    read, packages = json.loads(done.stdout)
    assert read == [rows, rows] and packages == [f"datasets {datasets.__version__}"]
    assert f"GET /datasets/space/jsonl/resolve/{COMMIT}/train.jsonl" in requested
