import contextlib
import io
import json
import signal
import subprocess
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.read.readers import InputRange, read_input
from data_prep.read.stage_files import (
    StageWriter,
    is_stage,
    provenance_of,
    publish_stage,
    read_records,
    read_stage,
    stage_file,
)
from data_prep.stages.counts import merge_counts
from zerolm.common.errors import ConfigError

RECORDS = [
    {"text": "first\nline", "id": "a", "score": 0.1, "nested": {"é": [1, None, True]}},
    {"text": "日本 \u2028 text", "id": "b"},
    *({"text": f"document {n} " * 50, "id": n} for n in range(3000)),
]


def write(directory: Path, records=RECORDS, task: int = 0) -> dict:
    with StageWriter(directory / stage_file(task)) as writer:
        for record in records:
            writer.write(record, len(record["text"].encode()))
        return writer.close()


def publish(directory: Path) -> dict:
    entries = [write(directory), write(directory, [], 1)]
    counts = merge_counts([])
    return publish_stage(
        directory, "clean", entries, inputs="f", text_field="text",
        counts=counts, options={"filters": []}, provenance={"inputs": ["raw"]},
    )  # fmt: skip


def test_a_stage_is_read_as_it_was_written_by_us_and_by_zstd(tmp_path):
    publish(tmp_path)
    stage = read_stage(tmp_path)
    assert [path.name for path in stage.paths] == ["00000.jsonl.zst", "00001.jsonl.zst"]
    assert list(read_records(stage.paths[0])) == RECORDS
    assert list(read_records(stage.paths[1])) == []
    entry = stage.manifest["files"][0]
    assert entry["num_documents"] == len(RECORDS)
    assert entry["text_bytes"] == sum(len(record["text"].encode()) for record in RECORDS)
    zstandard = pytest.importorskip("zstandard")
    with zstandard.open(stage.paths[0], "rt", encoding="utf-8", newline="\n") as file:
        assert [json.loads(line) for line in file] == RECORDS
    sums = subprocess.run(
        ["sha256sum", stage.paths[0]], capture_output=True, text=True, check=True, timeout=60
    )
    assert sums.stdout.split()[0] == entry["sha256"]


def test_equal_documents_give_equal_bytes(tmp_path):
    assert write(tmp_path / "one") == write(tmp_path / "two")


def test_an_exception_leaves_no_file(tmp_path):
    with pytest.raises(ZeroDivisionError), StageWriter(tmp_path / "00000.jsonl.zst") as writer:
        writer.write(RECORDS[0], 1)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_stage_is_refused_with_every_file(tmp_path):
    with pytest.raises(ConfigError, match="are unfinished"):
        read_stage(tmp_path)
    publish(tmp_path)
    assert is_stage(tmp_path)
    (tmp_path / "00000.jsonl.zst").write_bytes(b"short")
    (tmp_path / "00001.jsonl.zst").unlink()
    with pytest.raises(ConfigError) as refused:
        read_stage(tmp_path)
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match="truncated or damaged"):
        list(read_records(tmp_path / "00000.jsonl.zst"))


def test_a_truncated_file_is_refused(tmp_path):
    write(tmp_path)
    path = tmp_path / "00000.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"00000\.jsonl\.zst"):
        list(read_records(path))


@pytest.mark.parametrize("reads", ["a stage", "tokenize"])
def test_a_changed_bit_in_a_published_file_is_found(tmp_path, reads):
    """The zstd frames have no checksum: most changed bits decompress to another text."""
    publish(tmp_path)
    path = tmp_path / "00000.jsonl.zst"
    content = bytearray(path.read_bytes())
    content[-12] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"00000\.jsonl\.zst: its SHA-256 differs from stage"):
        if reads == "a stage":
            list(read_records(path))
        else:
            (source, *_), _ = find_inputs([str(tmp_path)], "text")
            list(read_input(source, InputRange(0), InputRules(), 1 << 20))


def test_provenance_is_everything_but_the_files(tmp_path):
    publish(tmp_path)
    before = provenance_of(read_stage(tmp_path))
    assert before["stage"] == "clean"
    assert before["before"] == {"inputs": ["raw"]}
    assert before["num_files"] == 2
    assert "files" not in before


def run_command(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed as errors."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main([str(each) for each in arguments])
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
        signal.signal(number, handler)
    return code, errors.getvalue()


def test_a_later_command_reads_the_key_that_a_stage_wrote_or_is_refused(
    tmp_path, tokenizer_directory
):
    """A key `text` beside it may hold the raw text."""
    raw, stage = tmp_path / "a.jsonl", tmp_path / "clean"
    text = "mail me at john.doe%d@example-site.com now, word for word"
    lines = [{"content": text % n, "text": f"raw {text % n}"} for n in range(20)]
    long = {"content": "word " * 99, "text": "raw"}
    raw.write_text("".join(json.dumps(line) + "\n" for line in [*lines, long]))
    filters = tmp_path / "filters.json"
    filters.write_text('[{"filter": "length", "max_words": 50}]')
    flags = ["--workers", 1, "--output"]
    code, _ = run_command(
        "clean",
        "--input",
        raw,
        "--text_field",
        "content",
        "--filters",
        filters,
        "--keep_dropped",
        stage / "dropped",
        *flags,
        stage,
    )
    assert code == 0 and read_stage(stage).text_field == "content"
    commands = {
        "tokenize": ["--tokenizer", tokenizer_directory],
        "clean": ["--filters", filters],
        "dedup": [],
        "train-tokenizer": ["--vocab_size", 300],
    }
    for name, more in commands.items():
        more = [*more, *(flags if name != "train-tokenizer" else flags[2:])]
        for number, given in enumerate((stage, stage / "00000.jsonl.zst")):
            output, right = tmp_path / f"{name}-{number}", ["--text_field", "content"]
            code, errors = run_command(name, "--input", given, *right, *more, output)
            assert code == 0, (name, errors)
            if name == "tokenize":
                size = json.loads((output / "manifest.json").read_text())["text_bytes"]
                assert size == sum(len(line["content"]) for line in lines)
            elif name != "train-tokenizer":
                assert read_stage(output).text_field == "content"
        for wrong in ([stage], [stage, raw], [stage / "00000.jsonl.zst"], [stage / "dropped"]):
            code, errors = run_command(name, "--input", *wrong, *more, tmp_path / "refused")
            assert code == 2 and "text in the key 'content', not 'text'" in errors, (name, errors)
