"""Tokenizations that are killed at any moment and resumed write the same bytes."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests import ROOT
from tests.data_prep.encode.golden_corpus import golden_texts, write_golden_tokenizer

# The command with small parts and units, so that a few seconds of work have many of both.
COMMAND = """
import sys
from dataclasses import replace
from data_prep import __main__
from data_prep.encode import encode_units, run as tokenization
encode_units.READ_BYTES = 1 << 16
run = tokenization.run_tokenization
def with_small_parts(inputs, tokenizer, outputs, options, *more):
    options = replace(options, part_seconds=0.02, unit_bytes=int(sys.argv[1]))
    return run(inputs, tokenizer, outputs, options, *more)
tokenization.run_tokenization = with_small_parts
sys.exit(__main__.main(sys.argv[2:]))
"""

NUM_DOCUMENTS = 1600
UNIT_BYTES = 600_000  # a unit for each of the four files


def write_corpus(directory: Path, num_documents: int) -> list[str]:
    """Write four files, two of them compressed, which are four units; return their texts."""
    directory.mkdir()
    texts = golden_texts(num_documents, seed=5)
    for number in range(4):
        own = texts[number::4]
        content = "".join(json.dumps({"text": text}) + "\n" for text in own).encode()
        if number % 2:
            (directory / f"{number}.jsonl.gz").write_bytes(gzip.compress(content, 1, mtime=0))
        else:
            (directory / f"{number}.jsonl").write_bytes(content)
    return [text for number in range(4) for text in texts[number::4]]


def start(directory: Path, output: str, workers: int, unit_bytes: int = UNIT_BYTES):
    words = [
        *("tokenize", "--input", str(directory / "corpus"), "--workers", str(workers)),
        *("--tokenizer", str(directory / "tokenizer"), "--shard_tokens", "60000"),
        *("--output", str(directory / output), "--val_output", str(directory / f"{output}-val")),
        *("--val_fraction", "0.1"),
    ]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(unit_bytes), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out + err


def contents(directory: Path, output: str) -> dict[str, bytes]:
    """Return {name: content} of both outputs, manifests without the command that made them."""
    found = {}
    for name in (output, f"{output}-val"):
        for path in sorted((directory / name).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                if path.name == "manifest.json":
                    manifest = json.loads(content)
                    del manifest["command"], manifest["digest"]
                    content = json.dumps(manifest).encode()
                key = path.relative_to(directory / name).as_posix()
                found[f"{name.removeprefix(output)}/{key}"] = content
    return found


def num_parts(directory: Path) -> int:
    return len(list(directory.glob("parts/encoded/*/*.json")))


def kill(process: subprocess.Popen, what: str) -> bool:
    """Kill the command and all its processes, or a worker; return whether it was running."""
    if process.poll() is not None:
        return False
    if what == "group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(process.pid).children(recursive=True)
            workers = [each for each in children if "tracker" not in " ".join(each.cmdline())]
            if not workers:
                return False
            random.choice(workers).kill()
    process.communicate(timeout=60)
    return process.returncode != 0


def is_published(directory: Path) -> bool:
    return (directory / "manifest.json").exists()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A directory with a corpus, and the shards that one worker makes of it: `whole`."""
    directory = tmp_path_factory.mktemp("kills")
    texts = write_corpus(directory / "corpus", NUM_DOCUMENTS)
    write_golden_tokenizer(directory / "tokenizer")
    finish(start(directory, "whole", 1))
    manifests = [
        json.loads((directory / name / "manifest.json").read_text())
        for name in ("whole", "whole-val")
    ]
    num_documents = sum(manifest["num_documents"] for manifest in manifests)
    assert num_documents == sum(bool(text) for text in texts)  # none lost, none doubled
    assert manifests[0]["skipped_documents"]["empty"] == sum(not text for text in texts)
    assert len(manifests[0]["shards"]) > 10
    return directory


def test_killed_commands_resume_to_the_same_bytes(uninterrupted):
    """Kill a worker, then the process group, each after more parts; finish with four workers."""
    directory = uninterrupted
    output = directory / "killed"
    for what, more_parts in (("worker", 3), ("group", 2)):
        process = start(directory, "killed", 2)
        before, deadline = num_parts(output), time.monotonic() + 120
        while num_parts(output) < before + more_parts and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert kill(process, what), "it was done before it could be killed"
        assert num_parts(output) >= before + more_parts and not is_published(output)
    output_text = finish(start(directory, "killed", 4))
    assert "resuming the interrupted run of this command" in output_text
    assert contents(directory, "killed") == contents(directory, "whole")
    assert not (output / "parts").exists() and not (output / ".unfinished").exists()


def test_damaged_parts_and_changed_inputs_are_encoded_again(uninterrupted):
    directory = uninterrupted
    output = directory / "damaged"
    process = start(directory, "damaged", 1)
    deadline = time.monotonic() + 120
    while len(list(output.glob("parts/records/tokenize.encode/*.json"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    assert kill(process, "group")
    damaged = sorted(output.glob("parts/encoded/00000/00000-*.0.ids"))[-1]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    changed = directory / "corpus" / "1.jsonl.gz"
    as_it_was = changed.read_bytes()
    try:  # another document during this run; restored afterwards
        changed.write_bytes(gzip.compress(b'{"text": "changed"}\n'))
        finish(start(directory, "damaged", 2))
    finally:
        changed.write_bytes(as_it_was)
    finish(start(directory, "again", 1))
    made, whole = contents(directory, "damaged"), contents(directory, "again")
    assert whole == contents(directory, "whole")
    assert made != whole
    first = np.frombuffer(made["/shard-00000.bin"], "<u2")  # of 0.jsonl, whose part was damaged
    assert first.tobytes() == whole["/shard-00000.bin"]
    names = json.loads(made["/manifest.json"])
    assert names["num_documents"] < json.loads(whole["/manifest.json"])["num_documents"]


def test_another_command_removes_the_parts_and_reports_why(uninterrupted):
    directory = uninterrupted
    output = directory / "other"
    process = start(directory, "other", 1)
    deadline = time.monotonic() + 120
    while num_parts(output) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    second = start(directory, "other", 1)  # while the first one writes
    _, refusal = second.communicate(timeout=60)
    assert second.returncode == 2 and "another process is writing shards there now" in refusal
    assert kill(process, "group")
    words = [
        *("tokenize", "--input", str(directory / "corpus"), "--workers", "1", "--output"),
        *(str(output), "--tokenizer", str(directory / "tokenizer")),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "run of another command (it differs in --val_fraction, outputs)" in done.stderr
    assert (
        json.loads((output / "manifest.json").read_text())["num_documents"]
        == NUM_DOCUMENTS * 49 // 50
    )


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_twenty_kills_at_random_moments_change_no_byte(uninterrupted):
    """Kills of a worker or of the group, with 2 or 4 workers; then other numbers of units."""
    directory = uninterrupted
    expected = contents(directory, "whole")
    rng = random.Random(20261121)
    began = time.monotonic()
    finish(start(directory, "timed", 4))
    seconds = time.monotonic() - began
    assert contents(directory, "timed") == expected
    num_kills = {"worker": 0, "group": 0}
    runs = 0
    while sum(num_kills.values()) < 20:
        output = f"run{runs}"
        runs += 1
        while not is_published(directory / output):
            process = start(directory, output, rng.choice([2, 4]))
            time.sleep(rng.uniform(0, seconds))
            what = rng.choice(["worker", "group"])
            if kill(process, what):
                num_kills[what] += 1
            else:
                process.communicate(timeout=300)
        assert contents(directory, output) == expected, output
    print(f"{num_kills} in {runs} tokenizations")
    for workers, unit_bytes in ((1, 40_000), (2, 300_000), (4, 100_000)):
        finish(start(directory, f"units{workers}", workers, unit_bytes))
        assert contents(directory, f"units{workers}") == expected
