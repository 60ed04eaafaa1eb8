"""Bad input to the real command is counted, named, skipped or refused; never a traceback.

Each case runs alone under `fail`, and with all others and good documents under `skip`.
"""

import gzip
import io
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from data_prep.encode.options import TokenizeOptions
from data_prep.encode.run import run_tokenization
from data_prep.files.documents import InputRules
from data_prep.read.discovery import find_inputs
from data_prep.tasks.phases import LocalExecutor
from data_prep.tokenizer.load import load_tokenizer
from tests import ROOT
from tests.data_prep.read.bad_input_cases import CASES, GOOD, HARMLESS, LIMIT, odd_files, zst
from tests.data_prep.small_corpus import data_prep
from zerolm.common.errors import ConfigError

FLAGS = ["--max_document_bytes", LIMIT, "--max_expansion", 100, "--encoder", "tokenizers"]


def decoded(shards: Path) -> dict[str, list[str]]:
    """Return {name of an input file: its texts}, without this project's readers."""
    manifest = json.loads((shards / "manifest.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(shards / "tokenizer")
    inputs = json.loads((shards / "inputs.json").read_text())["inputs"]
    texts: dict[str, list[str]] = {}
    for shard in manifest["shards"]:
        ids = np.fromfile(shards / shard["file"], "<u2")
        ends = np.fromfile(shards / shard["index"], "<u8").astype(int)
        origins = np.fromfile(shards / shard["origins"], "<u8").tolist()
        for part, origin in zip(np.split(ids, ends[:-1]), origins, strict=True):
            name = Path(inputs[origin >> 40]["name"]).name
            texts.setdefault(name, []).append(tokenizer.decode(part[:-1]))
    return texts


def test_bad_input_of_every_kind_is_skipped_counted_and_named(tmp_path, tokenizer_directory):
    corpus = tmp_path / "corpus"
    (corpus / "directory.jsonl").mkdir(parents=True)
    (corpus / "directory.jsonl" / "inner.txt").write_text("inner")
    odd = odd_files(corpus)
    cases = CASES | HARMLESS
    for name, case in cases.items():
        (corpus / name).write_bytes(case.content)
    command = [
        *("tokenize", "--input", corpus, "--tokenizer", tokenizer_directory, *FLAGS),
        *("--output", tmp_path / "s", "--on_bad_input", "skip"),
    ]
    result = data_prep(*command)
    assert result.returncode == 2, "more than 1% was bad"
    assert "more than --max_bad_fraction 0.01" in result.stderr
    assert not (tmp_path / "s" / "manifest.json").exists()

    result = data_prep(*command, "--max_bad_fraction", 1)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    bad: dict[str, int] = {"unreadable": len(odd)}
    skipped: dict[str, int] = {}
    for case in cases.values():
        for counts, more in ((bad, case.bad), (skipped, case.skipped)):
            for reason, count in more.items():
                counts[reason] = counts.get(reason, 0) + count
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    report = manifest["bad_input"]
    assert report["bad_documents"] == bad and report["on_bad_input"] == "skip"
    assert report["lost_bytes"] > 0
    assert manifest["skipped_documents"] == skipped
    for reason, count in bad.items():
        assert any(f"bad input: {count:,} " in line for line in result.stdout.splitlines()), reason
    found = decoded(tmp_path / "s")
    assert found.pop("inner.txt") == ["inner"]
    for name, case in cases.items():
        texts = found.pop(name, [])
        if isinstance(case.texts, list):
            assert texts == case.texts, name
        else:
            assert texts == ["good"] * case.texts, name
    assert not found


@pytest.fixture
def command(capsys, tokenizer_directory):
    """Run `main` in this process; return (exit code, lines of standard error)."""
    import signal

    from data_prep.__main__ import main

    before = signal.getsignal(signal.SIGTERM)

    def run(source: Path, output: Path, *arguments: object) -> tuple[int, list[str]]:
        flags = ["tokenize", "--input", source, "--tokenizer", tokenizer_directory, *FLAGS]
        code = main(
            [*map(str, flags), "--output", str(output), "--workers", "1", *map(str, arguments)]
        )
        lines = capsys.readouterr().err.splitlines()
        return code, [line for line in lines if line != "python -m data_prep tokenize: refused"]

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", CASES)
def test_each_bad_input_is_refused_with_its_place(tmp_path, command, name):
    case = CASES[name]
    path = tmp_path / name
    path.write_bytes(case.content)
    code, lines = command(path, tmp_path / "s")
    assert code == 2 and len(lines) == max(1, len(case.bad) if "bomb" in name else 1), lines
    assert any(case.message.replace("{file}", str(path)) in line for line in lines), lines
    assert all(line.startswith(str(path)) for line in lines)
    assert sorted(each.name for each in tmp_path.iterdir()) == [name]


def test_documents_encoded_before_a_bad_line_are_kept(tmp_path, tokenizer_directory, capsys):
    """Also in a compressed file, which is one unit; a run with "skip" resumes from them."""
    path, output = tmp_path / "a.jsonl.gz", tmp_path / "s{x}"  # braces are ordinary characters
    rng = random.Random(0)
    lines = [b'{"text": "%x"}\n' % rng.getrandbits(400) for _ in range(20000)]
    path.write_bytes(gzip.compress(b"".join(lines) + b"bad\n" + GOOD))
    inputs, _ = find_inputs([str(path)], "text")
    tokenizer = load_tokenizer(str(tokenizer_directory))
    options = TokenizeOptions(encoder="tokenizers", part_seconds=0)
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz:20001: "):
        run_tokenization(inputs, tokenizer, [output], options, LocalExecutor(1), {})
    parts = sorted((output / "parts").rglob("*.ids"))
    times = [part.stat().st_mtime_ns for part in parts]
    assert len(parts) > 1 and not (output / "manifest.json").exists()
    assert "The encoded parts are kept" in capsys.readouterr().err
    changed = []

    class Executor(LocalExecutor):
        def run(self, phase, tasks):
            if phase.name == "tokenize.encode":
                super().run(phase, tasks)
                changed.extend(part.stat().st_mtime_ns for part in parts)
            else:
                super().run(phase, tasks)

    skip = replace(options, rules=InputRules(on_bad_input="skip"))
    run_tokenization(inputs, tokenizer, [output], skip, Executor(1), {})
    assert changed[:-1] == times[:-1]
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["num_documents"] == 20001


def test_paths_that_cannot_be_opened_are_refused_all_at_once(tmp_path, command):
    (tmp_path / "corpus").mkdir()
    odd = odd_files(tmp_path / "corpus")
    code, lines = command(tmp_path / "corpus", tmp_path / "s")
    assert code == 2 and len(lines) == len(odd)
    for name, message in odd.items():
        start = f"{tmp_path / 'corpus' / name}: "
        assert any(start in each and message in each for each in lines)


def test_arguments_that_are_not_utf8_are_refused(tmp_path, command):
    code, lines = command(tmp_path / "caf\udce9.jsonl", tmp_path / "s\udce9")
    assert code == 2 and len(lines) == 2 and r"caf\udce9.jsonl': is not UTF-8" in lines[0]


def test_flags_for_bad_input_are_checked(tmp_path, command):
    (tmp_path / "a.txt").write_text("a")
    wrong = ["--max_document_bytes", 0, "--max_expansion", "x", "--max_bad_fraction", 2]
    code, lines = command(tmp_path / "a.txt", tmp_path / "s", *wrong, "--on_bad_input", "warn")
    assert code == 2 and len(lines) == 5, lines


# The peak of the process itself: ru_maxrss includes the peak of its parent before the exec.
PEAK = """
from pathlib import Path
print("peak", int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
"""
COMMAND = """
import sys
from data_prep.__main__ import main
code = main(sys.argv[1:])
"""
LIBRARIES = """
import numpy, orjson, tokenizers
"""


def peak_of(program: str, *arguments: object) -> tuple[str, int]:
    """Run a program; return its standard output, and its peak of memory in MiB."""
    result = subprocess.run(
        [sys.executable, "-c", program + PEAK, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout, int(result.stdout.partition("peak ")[2])


def giant_line(path: Path, megabytes: int) -> None:
    """Write gzip of a good line, one with that many MiB of text, and a good one."""
    text = "".join(random.Random(0).choices("etaoin shrdlu", k=1 << 20)).encode()
    block = gzip.compress(text, 1)
    with path.open("wb") as file:
        file.write(gzip.compress(GOOD + b'{"text": "'))
        for _ in range(megabytes):
            file.write(block)
        file.write(gzip.compress(b'"}\n' + GOOD))


def peak_with_a_giant_line(tmp_path, tokenizer, megabytes: int) -> int:
    giant_line(tmp_path / "giant.jsonl.gz", megabytes)
    output, peak = peak_of(
        COMMAND,
        *("tokenize", "--input", tmp_path / "giant.jsonl.gz", "--tokenizer", tokenizer),
        *("--output", tmp_path / "s", "--workers", "1", "--on_bad_input", "skip"),
        *("--max_bad_fraction", "0.5", "--max_document_bytes", "1e6", "--encoder", "tokenizers"),
    )
    assert "bad input: 1 in documents longer than --max_document_bytes" in output
    assert decoded(tmp_path / "s") == {"giant.jsonl.gz": ["good", "good"]}
    return peak


def test_a_giant_line_needs_no_memory(tmp_path, tokenizer_directory):
    """A limit of 1 MB keeps nothing of 48 MB: memory stays close to that of the libraries."""
    _, libraries = peak_of(LIBRARIES)
    assert peak_with_a_giant_line(tmp_path, tokenizer_directory, 48) < libraries + 40


@pytest.mark.soak
def test_a_line_of_a_gigabyte_needs_no_memory(tmp_path, tokenizer_directory):
    _, libraries = peak_of(LIBRARIES)
    assert peak_with_a_giant_line(tmp_path, tokenizer_directory, 1024) < libraries + 40


@pytest.mark.parametrize("seed", range(2))
def test_damaged_files_lose_nothing_silently(tmp_path, command, seed):
    """Bytes change anywhere, in all formats: documents are kept, or damage is reported."""
    rng = random.Random(seed)
    texts = [f"{number} " + "word " * rng.randrange(30) for number in range(300)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    data = b"".join(lines)
    table_file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), table_file, write_page_checksum=True)
    formats = {
        "a.jsonl": data, "b.jsonl.gz": gzip.compress(data), "c.jsonl.zst": zst(data),
        "d.parquet": table_file.getvalue(),
    }  # fmt: skip
    for name, whole in formats.items():
        content = bytearray(whole)
        places = [rng.randrange(len(content)) for _ in range(3)]
        for at in places:
            content[at] ^= 1 << rng.randrange(8)
        path = tmp_path / name
        path.write_bytes(content)
        code, lines_shown = command(
            path, tmp_path / f"s-{name}", "--on_bad_input", "skip", "--max_bad_fraction", 1
        )
        if code == 2:
            assert "would contain no documents" in lines_shown[0], lines_shown
            continue
        assert code == 0
        found = decoded(tmp_path / f"s-{name}")[name]
        manifest = json.loads((tmp_path / f"s-{name}" / "manifest.json").read_text())
        bad = manifest["bad_input"]["bad_documents"]
        if name == "a.jsonl":
            ends = np.cumsum([len(one) for one in lines])
            hurt = {int(np.searchsorted(ends, at, "right")) for at in places}
            hurt |= {number + 1 for number in hurt} | {number - 1 for number in hurt}
            assert {texts[n] for n in range(300) if n not in hurt} <= set(found)
        else:
            assert found == texts or bad, (name, places)
