"""Progress: a bar on a terminal, plain lines in a log."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time

from data_prep.tasks import progress
from data_prep.tasks.progress import Progress, ProgressWatcher, TaskProgress
from tests import ROOT
from tests.data_prep.small_corpus import TEXTS, write_jsonl


def test_a_log_has_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    counts = Progress("tokenize", 4_000_000)
    counts.add(1_000_000, 10, 5000)
    counts.add(1_000_000, 5)
    counts.close()
    first, second = capsys.readouterr().err.splitlines()
    start = "tokenize: read_mb=1.0 of_mb=4.0 documents=10 tokens=5000 seconds="
    assert first.startswith(start) and "seconds_left=" in first
    assert "read_mb=2.0 of_mb=4.0 documents=15 tokens=5000" in second


def test_inputs_of_unknown_size_have_no_remaining_time(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    Progress("tokenize", None).add(0, 10, 5000)
    line = capsys.readouterr().err
    assert "documents=10" in line and "of_mb" not in line and "left" not in line


def test_a_terminal_has_a_bar_and_pipes_have_the_summary(tmp_path, tokenizer_directory):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "data_prep", "tokenize", "--workers", "1"),
            *("--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_directory)),
            *("--output", str(tmp_path / "s")),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=120,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert result.returncode == 0
    assert "tokenize: 100%" in shown and "7 documents" in shown
    assert b"7 documents" in result.stdout and b"\r" not in result.stdout


def test_the_watcher_sums_tasks_and_names_the_slowest(tmp_path, monkeypatch, capsys):
    """Two tasks are done after 2 seconds; one has been running for 100 seconds."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    for task in range(2):
        record = {
            "splits": [{"num_tokens": 50}, {"num_tokens": 5}],
            "tally": {"input_bytes": 1_000_000},
            "documents_out": 7,
            "seconds": 2.0,
        }
        (tmp_path / f"{task:05d}.json").write_text(json.dumps(record))
    running = tmp_path / "00002.running"
    running.write_text(json.dumps({"started": time.time() - 100, "host": "here", "pid": 1}))
    monkeypatch.setattr(progress, "NOTE_SECONDS", 0)
    TaskProgress(running, 3_000_000).add(500_000, 3, 20)
    assert json.loads(running.read_text())["host"] == "here"
    shown = Progress("tokenize", 5_000_000)
    watch = ProgressWatcher(shown, tmp_path, ["a.jsonl", "b.jsonl", "c.jsonl"])
    watch._show()
    assert (shown.input_bytes, shown.num_documents, shown.num_tokens) == (2_500_000, 17, 130)
    line = capsys.readouterr().err
    assert "tasks=2/3 slowest=c.jsonl (100 s, others 2 s)" in line
