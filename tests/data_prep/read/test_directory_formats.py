"""Directories of table formats, array formats and caches are refused, wherever they are met."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.files.inputs import Input
from data_prep.finished_shards.items import ReadOptions
from data_prep.finished_shards.parquet import find as find_ids
from data_prep.read.discovery import find_inputs
from data_prep.read.hub import HubDataset, hub_files
from zerolm.common.errors import ConfigError

UUID = "01234567-89ab-4cde-8f01-23456789abcd"
REVISIONS = [f"{number:040x}" for number in range(2)]
TABLES = {  # files of a table, of which the first has rows that are no longer there
    "Delta table": ["a.parquet", "_delta_log/00000000000000000000.json"],
    "Delta table, partitioned": ["day=1/k=a b/a.parquet", "_delta_log/0.checkpoint.parquet"],
    "Hudi table": ["f1_0-1-0_001.parquet", ".hoodie/hoodie.properties"],
    "Hudi table, partitioned": ["asia/a.parquet", "asia/.hoodie_partition_metadata"],
    "Iceberg table": ["data/a.parquet", "metadata/v2.metadata.json"],
    "Iceberg table, partitioned": ["data/d=1/a.parquet", f"metadata/00001-{UUID}.metadata.json"],
    "Iceberg table, compressed": ["data/a.parquet", f"metadata/00001-{UUID}.gz.metadata.json"],
    "Paimon table": ["pt=1/bucket-0/data-1.parquet", "schema/schema-0", "snapshot/snapshot-1"],
    "transactional Hive table": ["a.parquet", "delete_delta_0000002_0000002_0000/bucket_00000"],
    "DuckLake table": [f"main/t/ducklake-{UUID}.parquet"],
    "Spark stream": ["part-0.parquet", "_spark_metadata/0"],
}
OTHERS = {
    "Lance dataset": ["data/a.lance", "_versions/1.manifest"],
    "Vortex dataset": ["a.vortex"],
    "zarr store": ["zarr.json", "c/0"],
    "zarr store of version 2": ["x/.zarray", "x/0.0"],
    "TensorFlow dataset": ["dataset_info.json", "features.json", "a-train.tfrecord-0-of-1"],
    "litdata dataset": ["index.json", "chunk-0-0.bin"],
    "litdata dataset, compressed": ["index.json", "chunk-0-0.zstd.bin"],
    "dataset of Mosaic's streaming": ["index.json", "shard.00000.mds.zstd"],
    "hub cache of several revisions": [f"snapshots/{each}/a.parquet" for each in REVISIONS],
}


def write(top, names):
    """Write the files of a directory; Parquet files have a text."""
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": ["a"]}), top / name)
        else:
            (top / name).write_text("{}")


def problems(*arguments, code=False):
    try:
        find_inputs([str(each) for each in arguments], "text", code=code)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("kind", [*TABLES, *OTHERS])
@pytest.mark.parametrize("below", ["", "some/where"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_directory_that_is_not_its_files_is_refused(tmp_path, kind, below, scheme):
    write(tmp_path / "in" / below, (TABLES | OTHERS)[kind])
    write(tmp_path / "in", ["ok.parquet"])
    (problem,) = problems(f"{scheme}{tmp_path}/in")
    name, fix = kind.partition(" of version")[0].partition(",")[0], ("rite its ", "Give the dir")
    assert name in problem and any(each in problem for each in fix)
    assert problem.startswith(f"--input {scheme}{tmp_path}/in: {scheme}{tmp_path}/in")


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_file_partition_or_glob_of_a_table_is_refused(tmp_path, kind, scheme):
    write(tmp_path, TABLES[kind])
    file = tmp_path / TABLES[kind][0]
    for argument in (file, f"{file.parent}/*.parquet", file.parent):
        (problem,) = problems(f"{scheme}{argument}")
        assert kind.partition(",")[0] in problem, argument


def test_partitions_of_a_table_are_one_problem(tmp_path):
    write(tmp_path, [f"{n}/{name}" for n in range(9) for name in TABLES["Delta table"]])
    (problem,) = problems(tmp_path)
    assert "/0 is a Delta table (and 8 more are): some of its files" in problem


def write_arrow(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(str(path), pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.table({"text": texts}))


def test_results_of_map_and_several_splits_are_refused_beside_their_dataset(tmp_path):
    cache = tmp_path / "hf/wikitext/0.0.0/abc"
    write(cache, ["dataset_info.json"])
    write_arrow(cache / "wikitext-train-00000-of-00002.arrow", ["a"])
    write_arrow(cache / "wikitext-train-00001-of-00002.arrow", ["b"])
    assert not problems(tmp_path / "hf")
    write_arrow(cache / "wikitext-test.arrow", ["c"])
    for argument in (tmp_path / "hf", f"{cache}/*.arrow"):
        (problem,) = problems(argument)
        assert "is a cache of the library datasets, which has 2 splits: test, train" in problem
    write_arrow(cache / "cache-0123456789abcdef.arrow", ["a"])
    for scheme in ("", "file://"):
        for argument in (f"{scheme}{tmp_path}/hf", f"{scheme}{cache}/*.arrow"):
            (problem,) = problems(argument)
            assert "1 results of map or filter, such as cache-0123456789abcdef.arrow" in problem
    assert not problems(f"{cache}/wikitext-train*")
    assert not problems(cache / "cache-0123456789abcdef.arrow")
    named = problems(cache / "cache-0123456789abcdef.arrow", cache / "wikitext-test.arrow")
    assert "results of map" in named[0]


def test_a_glob_over_a_saved_dataset_and_its_results_is_refused(tmp_path):
    write_arrow(tmp_path / "data-00000-of-00001.arrow", ["a"])
    write_arrow(tmp_path / "cache-1.arrow", ["a"])
    (tmp_path / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
    )
    assert not problems(tmp_path)
    (problem,) = problems(f"{tmp_path}/*.arrow")
    assert "results of map or filter" in problem


def test_a_hub_repository_that_is_a_table_is_found(tmp_path, monkeypatch):
    write(tmp_path, TABLES["Delta table"])
    monkeypatch.setattr("data_prep.read.discovery._expand", lambda argument, *_: iter([
        Input(argument, argument, "hub", None, hub=HubDataset(str(tmp_path), None, "train"))
    ]))  # fmt: skip
    assert hub_files(HubDataset(str(tmp_path), None, "train"))
    (problem,) = problems("namespace/name")
    assert f"--input namespace/name: {tmp_path} is a Delta table" in problem


@pytest.mark.parametrize("kind", TABLES)
def test_token_ids_of_a_table_are_not_converted(tmp_path, kind):
    write(tmp_path, TABLES[kind])
    with pytest.raises(ConfigError, match=kind.partition(",")[0]):
        find_ids((tmp_path / TABLES[kind][0]).parent, ReadOptions("text", None))


def test_plain_directories_with_such_words_are_read(tmp_path):
    names = ["metadata", "schema", "data", "base_1", "delta_1", "day=1", "snapshots/x"]
    write(tmp_path, [*(f"{name}/a.jsonl" for name in names), "index.json", "dataset_info.json"])
    for scheme in ("", "file://"):
        assert not problems(f"{scheme}{tmp_path}")
    pytest.importorskip("identify")
    write(tmp_path, TABLES["Delta table"])
    assert not problems(tmp_path, code=True)
