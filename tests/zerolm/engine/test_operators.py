"""Builds of operators: a killed build stops no later one, and a start says what it waits for.

The operators are real builds of torch with a plain C function, so that the compiler takes
milliseconds; `CXX` is a script that can be made to wait.
"""

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import parse

from tests.launching import LLAMA, ROOT, environment, write_json, write_shards
from zerolm.common import processes

BUILD = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from zerolm.engine import operators
operators.guard_builds(lambda line: sys.exit("the first listener was told"))
operators.guard_builds(lambda line: print(line, flush=True))  # the one to tell from now on
directory = Path(sys.argv[1])
cpp_extension.load("op", [str(directory / "op.cpp")], build_directory=str(directory / "op"),
                   is_python_module=False)
print("loaded", flush=True)
"""
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) while [ -e {directory}/hold ]; do sleep 0.1; done;; esac
exec g++ "$@"
"""
COMPILING = "compiling op: takes minutes, once per environment"


def start(directory: Path, *command: object, **variables: str) -> subprocess.Popen[str]:
    compiler = directory / "compiler"
    if not compiler.exists():
        compiler.write_text(COMPILER.format(directory=directory))
        compiler.chmod(0o755)
        (directory / "op").mkdir(exist_ok=True)
        (directory / "op.cpp").write_text('extern "C" int one() { return 1; }\n')
    given = {**environment(), "CXX": str(compiler), "PYTHONPATH": str(ROOT), **variables}
    given["PATH"] = f"{Path(sys.executable).parent}:{given['PATH']}"
    return subprocess.Popen(
        [*map(str, command or (sys.executable, "-c", BUILD, directory))],
        env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> list[str]:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    others = ("Warning", "No CUDA runtime is found")
    lines = [line for line in text.splitlines() if line[:1] != " "]
    return [line for line in lines if not any(words in line for words in others)]


def test_a_left_lock_stops_no_build_and_each_build_is_announced(tmp_path) -> None:
    """`lock` is what torch 2.13 leaves if it is killed; a missing object file is built again."""
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    first, second = output(start(tmp_path)), output(start(tmp_path))
    (tmp_path / "op" / "op.o").unlink()
    third = output(start(tmp_path))
    assert [lines[-2:] for lines in (first, third)] == [[COMPILING, "loaded"]] * 2
    assert second == ["loaded"]


def test_a_build_is_waited_for_and_repeated_once_its_process_and_compilers_are_gone(
    tmp_path,
) -> None:
    (tmp_path / "hold").touch()
    killed = start(tmp_path)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.strip() == COMPILING:
            break
    waiting = start(tmp_path)
    assert waiting.stdout is not None
    told = next(line for line in waiting.stdout if line.startswith("waiting"))
    assert re.match(rf"waiting for process {killed.pid} on \S+ to compile op: {tmp_path}/op", told)
    killed.kill()
    killed.wait(timeout=20)
    killed.stdout.close()
    assert processes.is_working_directory(tmp_path / "op"), "its compiler still runs"
    (tmp_path / "hold").unlink()
    lines = output(waiting)
    assert lines[-1] == "loaded"
    keeps_lock = parse(version("torch")) >= parse("2.15")  # unlocked
    assert (tmp_path / "op" / "lock").exists() == keeps_lock
    assert output(start(tmp_path)) == ["loaded"]


def test_a_signal_during_a_build_ends_launcher_ranks_and_compilers(tmp_path) -> None:
    (tmp_path / "hold").touch()
    write_shards(tmp_path / "shards", 60)
    model = write_json(tmp_path / "model.json", LLAMA)
    run = start(
        tmp_path, sys.executable, "-m", "zerolm", "train", "--num_gpus", "1", "--data",
        tmp_path / "shards", "--model_config", model, "--deepspeed_config",
        ROOT / "ds_configs/zero2.json", "--run_dir", tmp_path / "run", "--seq_len", "32",
        "--batch_tokens", "256", "--total_tokens", "512", "--micro_batch_size", "4",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "operators"), DS_ACCELERATOR="cpu",
        MARK_OF_TEST=str(tmp_path),
    )  # fmt: skip
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if "compiling deepspeed_shm_comm" in line:
            break
    else:
        pytest.fail("".join(lines))
    run.send_signal(signal.SIGTERM)
    text, _ = run.communicate(timeout=60)
    assert run.returncode == 75, text
    assert "SIGTERM: stopped before the first step, so there was nothing to save" in text
    left = processes.marked_pids(f"MARK_OF_TEST={tmp_path}")
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if pid != os.getpid()]
    assert not [each for each in commands if b"ninja" in each or b"pretrain" in each]
