"""Files in S3 and on web servers are read like local ones, through failures of the network."""

import gzip
import os
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry as fsspec_implementations

from data_prep.files import remote
from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.stages.output_rules import overlap_problems
from tests.data_prep.read.small_inputs import read_all
from tests.endpoints import BUCKET, NO_S3, s3_environment, s3_server
from tests.range_server import range_server
from tests.web_pages import topic_pages, write_warc
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.shards import range_reader

KEEP = InputRules(keep_records=True)


@pytest.fixture
def corpus(tmp_path):
    """A directory with a file of each kind."""
    directory = tmp_path / "corpus"
    (directory / "deep").mkdir(parents=True)
    lines = "".join(f'{{"text": "line {n} é", "n": {n}}}\n' for n in range(900))
    (directory / "a.jsonl").write_text(lines)
    (directory / "b.csv").write_text("id,text\n1,first row\n2,second row\n")
    (directory / "c.txt.gz").write_bytes(gzip.compress(b"compressed text"))
    (directory / "deep/d.md").write_text("# marked\n")
    pq.write_table(pa.table({"text": ["p", "q", "r"]}), directory / "e.parquet", row_group_size=1)
    write_warc(directory / "f.warc.gz", topic_pages(2))
    (directory / "ignored.bin").write_bytes(b"?")
    (directory / ".hidden.txt").write_text("hidden")
    return directory


def read(argument, unit_bytes=20_000):
    inputs, notes = find_inputs([str(argument)], "text")
    documents, _ = read_all(inputs, KEEP, unit_bytes, 5000)
    return [each.record for each in documents], inputs, notes


@pytest.mark.skipif(bool(NO_S3), reason=NO_S3)
def test_a_bucket_is_read_like_the_directory_it_is_a_copy_of(corpus, monkeypatch):
    import s3fs

    local, local_inputs, _ = read(corpus)
    with s3_server() as port:
        for name, value in s3_environment(port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(remote, "READ_AHEAD_BYTES", 10_000)
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.put(str(corpus), f"{BUCKET}/data/", recursive=True)
        url = f"s3://{BUCKET}/data/corpus"
        records, inputs, notes = read(url)
        assert records == local and len(local) == 900 + 2 + 1 + 1 + 3 + 2
        names = [Path(each.name).relative_to(corpus).as_posix() for each in local_inputs]
        assert [each.name for each in inputs] == [f"{url}/{name}" for name in names]
        assert "ignored 2 of 8 files" in notes[0]
        assert read(f"{url}/*.jsonl")[0] == local[:900] == read(f"{url}/a.jsonl")[0]
        assert not overlap_problems(Path.cwd(), [url], inputs)
        files.pipe(f"{BUCKET}/data/corpus/b.csv", b"id,text\n1,first row\n2,another one\n")
        with pytest.raises(ConfigError, match=r"b\.csv: has changed since the command started"):
            read_all(inputs, KEEP, 1 << 30)
        problems = []
        for wrong in (f"{url}/nothing", "s3://no-such-bucket/x.txt", f"{url}/*.xml"):
            with pytest.raises(ConfigError) as caught:
                find_inputs([wrong], "text")
            problems += caught.value.problems
        assert len(problems) == 3 and "test-access-key" not in str(problems)


class FakeGoogleStorage(MemoryFileSystem):
    """Objects in memory under gs://, with a generation each, as gcsfs lists them."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.partition("://")[2] or path)

    def unstrip_protocol(self, name):
        return "gs://" + name.lstrip("/")

    def info(self, path, **kwargs):
        return super().info(path, **kwargs) | {"generation": "1"}

    def find(self, path, detail=False, **kwargs):
        return {name: self.info(name) for name in super().find(path)}


def test_google_storage_is_read_like_the_directory_it_is_a_copy_of(corpus, monkeypatch):
    """With a fake in memory: what zerolm asks of fsspec, not gcsfs or its server."""
    local, local_inputs, _ = read(corpus)
    monkeypatch.setitem(fsspec_implementations, "gs", FakeGoogleStorage)
    monkeypatch.setattr(FakeGoogleStorage, "store", {})
    FakeGoogleStorage().put(f"{corpus}/", "bucket/data/", recursive=True)
    records, inputs, _ = read("gs://bucket/data")
    names = [Path(each.name).relative_to(corpus).as_posix() for each in local_inputs]
    assert records == local and len(local) == 900 + 2 + 1 + 1 + 3 + 2
    assert [each.name for each in inputs] == [f"gs://bucket/data/{name}" for name in names]
    assert {each.version for each in inputs} == {"1"}
    assert read("gs://bucket/data/*.jsonl")[0] == local[:900]
    with pytest.raises(ConfigError, match="no such file or directory"):
        find_inputs(["gs://bucket/nothing"], "text")


def test_a_web_server_that_fails_is_asked_again(corpus, monkeypatch):
    monkeypatch.setattr("zerolm.common.store.FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote, "READ_AHEAD_BYTES", 2_000)
    expected = read(corpus / "a.jsonl")[0]
    with range_server(corpus) as server:
        url = f"{server.url}/a.jsonl"
        inputs, _ = find_inputs([url], "text")
        server.cut_every, server.fail_every = 3, 4
        documents, _ = read_all(inputs, KEEP, 30_000, 5000)
        assert [each.record for each in documents] == expected and server.count > 6
        with pytest.raises(ConfigError, match="no such file or directory"):
            find_inputs([f"{server.url}/none.txt"], "text")
        with pytest.raises(ConfigError, match="credentials or a query"):
            find_inputs([f"{url}?token=x"], "text")


def test_a_web_server_that_compresses_is_asked_for_the_bytes_of_the_file(corpus):
    expected = read(corpus / "a.jsonl")[0]
    with range_server(corpus) as server:
        server.compresses = True
        assert read(f"{server.url}/a.jsonl")[0] == expected


def test_a_store_that_stays_down_ends_the_command_in_place_of_skipping(corpus, monkeypatch):
    """Even if bad input is skipped: the documents are not bad."""

    def reader(parent):
        return range_reader.RangeReader(remote.Url(parent), retry_seconds=0.2)

    monkeypatch.setattr(remote, "_reader", reader)
    rules = InputRules(on_bad_input="skip", max_bad_fraction=1)
    with range_server(corpus) as server:
        inputs, _ = find_inputs([f"{server.url}/{name}" for name in FILES], "text", True)
        server.cut_every = 1
        for each in inputs:
            with pytest.raises(ZerolmError, match="run the command again: it resumes"):
                read_all([each], rules, 1)


FILES = ("b.csv", "c.txt.gz", "f.warc.gz")


def test_a_scheme_without_its_package_names_the_extra():
    with pytest.raises(ConfigError, match=r"input gs://bucket/x\.txt: .*launch/setup.sh gcs"):
        find_inputs(["gs://bucket/x.txt"], "text")
    assert os.environ  # nothing was asked over the network
