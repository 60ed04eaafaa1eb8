"""`clean` of an input that cannot be split: several files for one task, and resume after a kill."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.files.documents import InputRules
from data_prep.filters.clean import CleanOptions, run_clean
from data_prep.read.bad_input import Tally
from data_prep.read.discovery import find_inputs
from data_prep.read.stage_files import read_records, read_stage
from data_prep.read.work_units import WorkUnit, plan_units, read_batches
from data_prep.tasks.phases import LocalExecutor
from tests import ROOT

TEXTS = [f"Document {n} " + "has some words " * (n % 37) + "and an end." for n in range(3000)]
NUM_KILLED = 1700  # the document at which the first run is killed
RULES = InputRules(keep_records=True, on_bad_input="skip")

FILTER = f"""
import os, signal
def keep(text, record, log=""):
    number = int(text.split()[1])
    with open(log, "a") as file:
        file.write(f"{{number}}\\n")
    if number == {NUM_KILLED} and os.environ.get("KILL"):
        os.kill(os.getpid(), signal.SIGKILL)
    return number % 5 != 0
"""
RUN = """
import sys
from pathlib import Path
from tests.data_prep.filters.test_clean import run
run(Path(sys.argv[1]), sys.argv[2])
"""


def write(directory: Path, suffix: str) -> Path:
    path = directory / f"a{suffix}"
    lines = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(TEXTS))
    lines = lines.replace('"n": 40}', '"n": 40').encode()  # which is not JSON any more
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=1100)
    elif suffix.endswith(".zst"):
        path.write_bytes(pa.compress(lines, "zstd", asbytes=True))
    else:
        path.write_bytes(gzip.compress(lines, 6, mtime=0) if suffix.endswith(".gz") else lines)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_batches_after_a_position_equal_those_of_reading_from_the_start(suffix, tmp_path):
    """So files that end between batches do not depend on where a task stopped."""
    inputs, _ = find_inputs([str(write(tmp_path, suffix))], "text")
    unit = WorkUnit(plan_units(inputs)[0].ranges, 0)
    whole = list(read_batches(inputs, unit, RULES, Tally(), 20_000))
    assert len(whole) > 3
    for number in range(len(whole) - 1):
        behind = read_batches(inputs, unit, RULES, Tally(), 20_000, whole[number].next)
        found = [(batch.documents, batch.next) for batch in behind]
        assert found == [(batch.documents, batch.next) for batch in whole[number + 1 :]]


def run(directory: Path, name: str) -> dict:
    inputs, _ = find_inputs([str(directory / "a.jsonl.gz")], "text")
    options = {"log": str(directory / f"{name}.log")}
    filters = ({"filter": "python", "function": "own_slow_filter:keep", "options": options},)
    output = directory / name
    chosen = CleanOptions(filters, RULES, None, output / "dropped", piece_bytes=200_000)
    return run_clean(chosen, inputs, output, LocalExecutor(1), {})


def test_a_killed_task_resumes_after_its_last_file_with_the_same_bytes(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("datatrove")
    (tmp_path / "own_slow_filter.py").write_text(FILTER)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, ".jsonl.gz")
    whole = run(tmp_path, "whole")
    environment = {
        **os.environ,
        "KILL": "1",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    killed = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), "killed"],
        cwd=ROOT, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    assert not (tmp_path / "killed" / "stage.json").exists()
    done = len(list((tmp_path / "killed" / "records/clean/pieces").iterdir()))
    assert done >= 2
    assert main(["progress", str(tmp_path)]) == 0
    assert re.search(r"task 00000 on \S+ \(pid \d+\) for [\d,]+ s", capsys.readouterr().out)
    again = run(tmp_path, "killed")
    assert again["files"] == whole["files"] and len(whole["files"]) > done + 1
    for key in ("documents_in", "documents_out", "dropped", "reading", "lengths_in", "examples"):
        assert again[key] == whole[key], key
    assert whole["reading"]["bad"] == {"bad_json": 1}
    files = [sorted((tmp_path / name).glob("**/*.jsonl.zst")) for name in ("whole", "killed")]
    assert [each.read_bytes() for each in files[0]] == [each.read_bytes() for each in files[1]]
    assert not list(tmp_path.glob("killed/**/*.tmp"))
    kept = [
        each["n"] for path in read_stage(tmp_path / "killed").paths for each in read_records(path)
    ]
    assert kept == [n for n in range(len(TEXTS)) if n % 5 and n != 40]
    judged = Counter((tmp_path / "killed.log").read_text().split())
    redone = sum(count - 1 for count in judged.values())
    assert 0 < redone < NUM_KILLED / 2  # it did not start over
    assert sum(entry["text_bytes"] for entry in whole["files"]) == whole["text_bytes_out"]


def test_large_input_that_cannot_be_split_is_deduplicated_in_bounded_files(
    tmp_path, monkeypatch, capsys
):
    """Otherwise the signatures of all its documents would be in memory at once."""
    lines = [json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(TEXTS[:60] * 2)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("".join([*lines, "no\n"]).encode()))
    words = ["dedup", "--near", "off", "--input", str(tmp_path / "a.jsonl.gz"), "--workers", "1"]
    words += ["--on_bad_input", "skip", "--output"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    monkeypatch.setattr("data_prep.stages.documents.LARGE_BYTES", 100)
    monkeypatch.setitem(sys.modules, "datatrove.data", None)  # an extra that is not needed here
    for _ in range(2):  # the second one finds it published
        assert main([*words, str(tmp_path / "read")]) == 0
    assert "1 lines that are not JSON" in capsys.readouterr().out.split("read/dup")[0]
    one, two = (read_stage(tmp_path / name) for name in ("whole", "read"))
    for key in ("documents_in", "dropped", "bad_documents", "lengths_out"):
        assert one.manifest[key] == two.manifest[key]
    for name in ("00000.jsonl.zst", "duplicates.jsonl.zst"):
        records = [list(read_records(tmp_path / each / name)) for each in ("whole", "read")]
        assert records[0] == records[1]
    assert {path.name for path in (tmp_path / "read").iterdir()} == {
        "00000.jsonl.zst", "duplicates.jsonl.zst", "records", "stage.json"
    }  # fmt: skip
    words[words.index("skip")] = "fail"
    assert main([*words, str(tmp_path / "refused")]) == 2


def test_a_document_emptied_by_filters_is_dropped_with_its_text(tmp_path):
    pytest.importorskip("datatrove")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "no end of a line", "k": 1}) + "\n")
    inputs, _ = find_inputs([str(tmp_path / "a.jsonl")], "text")
    filters = ({"filter": "c4_quality", "min_num_sentences": 0},)
    options = CleanOptions(filters, RULES, keep_dropped=tmp_path / "dropped")
    manifest = run_clean(options, inputs, tmp_path / "out", LocalExecutor(1), {})
    assert manifest["dropped"] == {"emptied": 1}
    (record,) = read_records(tmp_path / "dropped" / "00000.jsonl.zst")
    assert record["text"] == "no end of a line" and record["dropped_by"] == "emptied"


@pytest.mark.parametrize("content", [{"filters": []}, {"clean": {"filter": []}}, {}])
def test_an_object_without_filters_is_refused(tmp_path, capsys, content):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "f.json").write_text(json.dumps(content))
    words = ["clean", "--input", tmp_path / "a.txt", "--filters", tmp_path / "f.json"]
    assert main([*map(str, words), "--output", str(tmp_path / "out")]) == 2
    assert "f.json: has no clean.filters. Give a list of filters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
