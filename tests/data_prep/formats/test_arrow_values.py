"""Columns that nobody asked for: values without a Python type are neither damage nor lost."""

import decimal
import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.files.documents import InputRules
from data_prep.formats.arrow import read_batch
from data_prep.read.discovery import find_inputs
from data_prep.read.work_units import Tally, plan_units, read_batches
from tests.data_prep.stage_cases import documents_of
from zerolm.common.errors import ConfigError

FAR = pa.array([1 << 60], pa.timestamp("s"))
FAR_TEXT = f"{1 << 60} s since 1970"
BAD_TEXT = pa.array([b"\xff"]).view(pa.string())
COLUMNS = {
    "end": (
        pa.array([253402300799000000], pa.timestamp("us", tz="Asia/Tokyo")),
        "9999-12-31T23:59:59.000000Z",
    ),
    "begin": (
        pa.array([-62135596800000000], pa.timestamp("us", tz="America/New_York")),
        "0001-01-01T00:00:00.000000Z",
    ),
    "zone": (pa.array([0], pa.timestamp("us", tz="No/Such")), "1970-01-01T00:00:00.000000Z"),
    "seconds": (FAR, FAR_TEXT),
    "nanoseconds": (pa.array([1], pa.timestamp("ns")), "1970-01-01T00:00:00.000000001"),
    "date": (pa.array([-1_000_000], pa.date32()), "-0768-02-04"),
    "last date": (pa.array([(1 << 31) - 1], pa.date32()), f"{(1 << 31) - 1} days since 1970"),
    "milliseconds": (pa.array([1 << 60], pa.date64()), f"{1 << 60} ms since 1970"),
    "time": (pa.array([86399999999999], pa.time64("ns")), "23:59:59.999999999"),
    "duration": (pa.array([(1 << 63) - 1], pa.duration("s")), f"{(1 << 63) - 1} s"),
    "decimal": (pa.array([decimal.Decimal(10) ** 75], pa.decimal256(76)), "1" + "0" * 75),
    "interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), [1, 2, 3]),
    "map": (pa.MapArray.from_arrays([0, 1], pa.array(["a"]), FAR), [["a", FAR_TEXT]]),
    "list": (pa.ListArray.from_arrays([0, 1], FAR), [FAR_TEXT]),
    "struct": (
        pa.StructArray.from_arrays([FAR, BAD_TEXT], ["a", "b"]),
        {"a": FAR_TEXT, "b": r"\xff"},
    ),
    "twice": (pa.StructArray.from_arrays([FAR, FAR], ["a", "a"]), [["a", FAR_TEXT]] * 2),
    "dictionary": (pa.DictionaryArray.from_arrays(pa.array([0]), FAR), FAR_TEXT),
    "category": (pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), BAD_TEXT), r"\xff"),
    "texts": (pa.ListArray.from_arrays([0, 1], BAD_TEXT), [r"\xff"]),
    "pair": (pa.FixedSizeListArray.from_arrays(BAD_TEXT, 1), [r"\xff"]),
    "keys": (pa.MapArray.from_arrays([0, 1], BAD_TEXT, BAD_TEXT), [[r"\xff", r"\xff"]]),
    "runs": (pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), FAR), FAR_TEXT),
    "bytes": (pa.array([b"\xff"], pa.binary_view()), "/w=="),
    "extension": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16], pa.binary(16))),
        "78787878-7878-7878-7878-787878787878",
    ),
}  # fmt: skip


def record_of(path) -> dict:
    inputs, _ = find_inputs([str(path)], "text")
    rules, (unit,) = InputRules(keep_records=True), plan_units(inputs)
    batches = list(read_batches(inputs, unit, rules, Tally()))
    (document,) = [document for batch in batches for document in batch.documents]
    return document.record


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_value_without_a_python_type_becomes_text_that_says_all(tmp_path, name, ending):
    column, expected = COLUMNS[name]
    table = pa.table({"text": ["a text"], "other": column})
    path = tmp_path / f"a.{ending}"
    try:
        if ending == "parquet":
            pq.write_table(table, path)
        else:
            pa.feather.write_feather(table, path, compression="uncompressed")
    except (pa.ArrowException, NotImplementedError):
        pytest.skip(f"pyarrow writes no {column.type} to {ending}")
    read_back = pq.read_table(path)["other"] if ending == "parquet" else column
    if read_back.type.equals(column.type):
        assert record_of(path) == {"text": "a text", "other": expected}
    else:
        assert record_of(path)["other"]  # stored as another type: seconds become milliseconds


@pytest.mark.parametrize(
    "column",
    [
        pa.ListArray.from_arrays(pa.array([0, 9, 2], pa.int32()), pa.array(["a", "b"])),
        pa.DictionaryArray.from_arrays(pa.array([0, 9]), pa.array(["a"]), safe=False),
    ],
    ids=["list", "dictionary"],
)
def test_a_place_outside_of_a_column_is_damage(column):
    with pytest.raises(pa.ArrowException):
        list(read_batch(pa.record_batch({"other": column}), 0, InputRules(), 1 << 20))


def test_categories_that_pyarrow_cannot_read_are_no_damage_of_the_file(tmp_path):
    """It reads those with indices of 32 bits, and checks the text where it converts others."""
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), BAD_TEXT)
    pq.write_table(pa.table({"text": ["a text"], "other": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="A categorical column contains text that is not UTF-8"):
        record_of(tmp_path / "a.parquet")


def test_one_such_value_does_not_change_those_beside_it(tmp_path):
    values = [0, 253402300799000000, None]
    column = pa.array(values, pa.timestamp("us", tz="Asia/Tokyo"))
    pq.write_table(pa.table({"text": list("abc"), "other": column}), tmp_path / "a.parquet")
    inputs, _ = find_inputs([str(tmp_path / "a.parquet")], "text")
    (batch,) = read_batches(inputs, plan_units(inputs)[0], InputRules(keep_records=True), Tally())
    found = [document.record["other"] for document in batch.documents]
    assert found == ["1970-01-01T09:00:00+09:00", "9999-12-31T23:59:59.000000Z", None]


def test_stages_carry_such_values_and_decontaminate_reads_such_items(tmp_path):
    table = pa.table({"text": ["some words of a text"], "when": COLUMNS["zone"][0]})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "f.json").write_text(json.dumps([{"filter": "length", "min_words": 1}]))
    words = ["--input", tmp_path / "a.parquet", "--workers", "1"]
    clean = ["clean", *words, "--filters", tmp_path / "f.json", "--output", tmp_path / "clean"]
    assert main([str(word) for word in clean]) == 0
    ((record),) = documents_of(tmp_path / "clean")
    assert record["when"] == "1970-01-01T00:00:00.000000Z"
    evaluation = f"{tmp_path / 'a.parquet'}:text"
    words += ["--evaluation", evaluation, "--output", tmp_path / "decontaminated"]
    assert main([str(word) for word in ["decontaminate", *words]]) == 0
