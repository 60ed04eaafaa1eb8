"""A file or directory that the user may not read or write is refused in one message, with exit 2.

Root may read everything, so the commands run in a process without that capability.
"""

import contextlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.damaged_runs import command, make_run
from tests.launching import environment
from tests.texts import write_tokenizer
from zerolm.common.errors import EXIT_REFUSED

WITHOUT = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps",
           "-dac_override,-dac_read_search"]  # fmt: skip
READ, WRITE = 0o000, 0o500  # the mode that is left
IDS = "shards/shard-00000.bin"
CASES: dict[str, tuple[list[str], str, int]] = {  # {what: (command, path, its mode)}
    "documents": (["data", "clean", "--input", "text.jsonl", "--filters", "filters.json",
                   "--output", "out/new"], "text.jsonl", READ),
    "a directory of documents": (["data", "dedup", "--input", "text", "--output", "out/new"],
                                 "text", READ),
    "filters": (["data", "clean", "--input", "text.jsonl", "--filters", "filters.json",
                 "--output", "out/new"], "filters.json", READ),
    "evaluation items": (["data", "decontaminate", "--input", "text.jsonl", "--evaluation",
                          "text/items.jsonl", "--output", "out/new"], "text/items.jsonl", READ),
    "an output": (["data", "dedup", "--input", "text", "--output", "out/new"], "out", WRITE),
    "ids of stats": (["data", "stats", "shards", "--workers", "1"], IDS, READ),
    "ids of inspect": (["data", "inspect", "shards", "--document", "0", "--json"], IDS, READ),
    "ids of verify": (["data", "verify", "shards"], IDS, READ),
    "a manifest": (["data", "verify", "shards"], "shards/manifest.json", READ),
    "figures": (["data", "stats", "shards", "--json", "out/stats.json"], "out", WRITE),
    "an index": (["data", "pack", "shards", "--seq_len", "16"], "shards", WRITE),
    "records of tasks": (["data", "progress", "piped"], "piped/records", READ),
    "ids of another format": (["data", "convert", "mega.bin", "--from", "megatron", "--tokenizer",
                               "tokenizer", "--output", "out/new"], "mega.bin", READ),
    "a run of predict": (["predict", "runs"], "runs/one", READ),
    "a profile of plan": (["plan", "--model_config", "llama.json", "--write", "out/x.json",
                           "--search"], "out", WRITE),
    "a run": (["status", "run"], "run", READ),
    "checkpoints": (["verify-checkpoint", "run"], "run/checkpoints", READ),
    "a manifest of a checkpoint": (["verify-checkpoint", "run"],
                                   "run/checkpoints/step-00000015/MANIFEST.json", READ),
    "a page": (["report", "run", "--output", "out/x.html"], "out", WRITE),
    "a picture": (["plot", "run", "--output", "out/x.png"], "out", WRITE),
    "curves to plot": (["plot", "run", "--output", "out/x.png"], "run/metrics.jsonl", READ),
    "curves for W&B": (["wandb-sync", "run", "--mode", "offline"], "run/metrics.jsonl", READ),
    "a run to export": (["export", "run", "out/new"], "run/run.json", READ),
    "a file of --check": (["--check"], IDS, READ),
    "a model of --check": (["--check"], "llama.json", READ),
    "a new run directory": (["--check", "--run_dir", "out/new"], "out", WRITE),
    "a started run": (["--check"], "run/run.json", READ),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Run all cases; return (exit code, output) of each."""
    if not (shutil.which("setpriv") or os.geteuid()):
        pytest.skip("no setpriv here")
    base = tmp_path_factory.mktemp("permissions")
    with contextlib.redirect_stdout(io.StringIO()):
        make_run(base)
    for name in ("text", "out", "piped/records/clean", "runs/one"):
        (base / name).mkdir(parents=True)
    (base / "filters.json").write_text("[]")
    for name in ("text.jsonl", "text/items.jsonl"):
        (base / name).write_text('{"text": "one two three"}\n')
    shutil.copy(base / "run" / "run.json", base / "runs" / "one")
    write_tokenizer(base / "tokenizer")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2)
    (base / "mega.idx").write_bytes(header + struct.pack("<iqqq", 3, 0, 0, 1))
    (base / "mega.bin").write_bytes(bytes(6))
    prefix = [] if os.geteuid() else WITHOUT
    done = subprocess.run(
        [*prefix, sys.executable, "-m", __name__, base], env=environment(), cwd=base,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("what", CASES)
def test_what_may_not_be_read_or_written_is_refused_by_its_name(outcomes, what) -> None:
    code, output = outcomes[what]
    assert code == EXIT_REFUSED, output
    assert CASES[what][1] in output and "Traceback" not in output, output
    assert any(word in output for word in ("ermission", "writable", "Let this user read")), output


# ---- In the process without the capability


def outcome(base: Path, words: list[str]) -> tuple[int, str]:
    """Run a command in this process, or `pretrain.py --check`; return its exit code and output."""
    from zerolm.__main__ import main
    from zerolm.common.errors import ConfigError
    from zerolm.preflight import check

    output: Any = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if words[0] != "--check":
                return main(words), output.getvalue()
            check.check([*command(base), *words], {})
        except ConfigError as error:
            return error.exit_code, str(error)
        except OSError as error:  # as pretrain.py does
            from zerolm.watchdog import limits

            return EXIT_REFUSED, str(limits.refusal(error))
    return 0, output.getvalue()


def run_all(base: Path) -> dict[str, tuple[int, str]]:
    found = {}
    for what, (words, name, mode) in CASES.items():
        path = base / name
        before = path.stat().st_mode
        path.chmod(mode)
        found[what] = outcome(base, words)
        path.chmod(before)
    return found


if __name__ == "__main__":
    print(json.dumps(run_all(Path(sys.argv[1]))))
