"""`python -m data_prep tokenize`: kills, stops, and memory."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests import ROOT
from tests.data_prep.small_corpus import TEXTS
from zerolm.shards.reader import open_source
from zerolm.shards.writer import ShardWriter


@pytest.fixture
def endless(tmp_path, tokenizer_directory):
    """A running tokenization that has written some parts and needs many more seconds."""
    document = json.dumps({"text": "".join(TEXTS)}) + "\n"
    (tmp_path / "a.jsonl").write_text(document * (60_000_000 // len(document)))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "data_prep", "tokenize", "--workers", "2"),
            *("--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_directory)),
            *("--output", str(tmp_path / "s")),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background job, as this suite may be, ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if len(list((tmp_path / "s").glob("parts/records/tokenize.encode/*.json"))) >= 2:
            break
        time.sleep(0.02)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=30)


def children_of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_all_gone(children) -> None:
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_a_killed_worker_ends_the_command_with_an_error(tmp_path, endless):
    children = children_of(endless)
    workers = [child for child in children if "tracker" not in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[1].kill()
    _, stderr = endless.communicate(timeout=60)
    assert endless.returncode == 1
    assert f"(pid {workers[1].pid}) was killed by SIGKILL" in stderr
    assert "the same command resumes from them" in stderr and "Traceback" not in stderr
    assert_all_gone(children)
    assert not (tmp_path / "s" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stopped_command_leaves_no_process_and_can_resume(tmp_path, endless, number, code):
    children = children_of(endless)
    if number == signal.SIGINT:
        os.killpg(endless.pid, number)  # as a terminal does: to everybody
    else:
        endless.send_signal(number)
    _, stderr = endless.communicate(timeout=60)
    assert endless.returncode == code and "Traceback" not in stderr, stderr
    assert "nothing is published" in stderr and "the same command resumes from them" in stderr
    assert_all_gone(children)
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_workers_end_when_the_command_is_killed(tmp_path, endless):
    """Its files are not data, and do not block the next writer."""
    children = children_of(endless)
    endless.kill()
    endless.wait(timeout=60)
    assert_all_gone(children)
    assert (tmp_path / "s" / "parts").exists()
    assert not (tmp_path / "s" / "manifest.json").exists()
    with ShardWriter(
        tmp_path / "s", vocab_size=300, eos_id=0, tokenizer={"name": "x", "fingerprint": "f"}
    ) as writer:
        writer.add(np.array([1, 0]))
    assert open_source(tmp_path / "s").num_tokens == 2


def peak_memory(pid: int) -> int:
    """Return the high-water mark of a process in KiB, 0 if it is gone.

    Not ru_maxrss, which a new program inherits from the process that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.split("VmHWM:")[1].split()[0]) if "VmHWM:" in status else 0


def watch_memory(command: list[str]) -> tuple[int, int]:
    """Run a command; return the peaks in KiB of its process and of the largest of its children."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peaks = [0, 0]
    try:
        while process.poll() is None:
            peaks[0] = max(peaks[0], peak_memory(process.pid))
            with suppress(psutil.Error):  # it has just ended
                for child in children_of(process):
                    peaks[1] = max(peaks[1], peak_memory(child.pid))
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == 0
    return peaks[0], peaks[1]


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """60 MB instead of 10 MB: neither the command nor its largest worker needs 8 MB more."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    line = (
        "a line of one hundred bytes, which this tokenizer takes for one token ...... " + "." * 22
    )
    backend = Tokenizer(models.WordLevel({"<|endoftext|>": 0, line: 1}, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    backend.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tokenizer").mkdir()
    backend.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    document = json.dumps({"text": (line + "\n") * 50}) + "\n"
    peaks = []
    for megabytes in (10, 60):
        corpus = tmp_path / f"{megabytes}.jsonl"
        corpus.write_text(document * (megabytes * 10**6 // len(document)))
        command = [
            *(sys.executable, "-m", "data_prep", "tokenize", "--input", str(corpus)),
            *("--tokenizer", str(tmp_path / "tokenizer"), "--workers", "2"),
            *("--output", str(tmp_path / f"s{megabytes}"), "--encoder", "tokenizers"),
        ]
        peaks.append(watch_memory(command))
    for small, large in zip(*peaks, strict=True):
        assert large - small < 8 * 1024, f"KiB of the command and of its largest worker: {peaks}"
    assert min(map(min, peaks)) > 8 * 1024, "the memory of something else was measured"
