"""Forked ranks are like those that DeepSpeed's node launcher starts, and end as they do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.launching import environment, free_port, kill_session, session_members
from zerolm.common import processes
from zerolm.common.process_tree import RUNNER
from zerolm.common.shipped import RUN_MODULE
from zerolm.engine.launcher_options import DEEPSPEED, FORK, FRESH

STARTS = (FORK, FRESH, DEEPSPEED)
# Writes what a rank sees of itself, after the imports of pretrain.py.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
forked = "torch" in sys.modules
from zerolm.train.before_imports import prepare_host
prepare_host(os.environ)
import pretrain, zerolm.train.engine_building, torch.utils.cpp_extension, random, torch, numpy
from zerolm.train import process_state

def shown(file):
    entries = Path("/proc/self", file).read_text().rstrip(chr(0)).split(chr(0))
    return entries if file == "cmdline" else sorted(each for each in entries if "RANK=" in each)

seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": str(sys.flags), "path": sys.path,
    "environment": dict(os.environ), "cmdline": shown("cmdline"), "environ": shown("environ"),
    "name": __name__, "directory": os.getcwd(), "unbuffered": sys.stdout.write_through,
    "signals": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(),
                len(list(Path("/proc/self/task").iterdir()))],
    "session": os.getsid(0) == os.getsid(os.getppid()),
    "mask": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "cores": sorted(os.sched_getaffinity(0)), "main": sys.modules["__main__"].__file__,
}
rank = os.environ["RANK"]
drawn = [forked, float(numpy.random.random()), random.random(),
         torch.initial_seed(), os.getppid()]
file = Path(sys.argv[-1], rank)
file.with_suffix(".new").write_text(json.dumps([seen, drawn]))
file.with_suffix(".new").rename(file)
os.write(1, f"rank {rank}{chr(10)}".encode())  # at once, beside the other rank
if "fail" in sys.argv:
    sys.exit(3 if rank == "1" else 0)
if "wait" in sys.argv:
    time.sleep(600)
"""


def start(how: str, directory: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """Start two ranks of the script, with the directory for what they write as the last argument.

    Needs the model's config in front, since the launcher imports the model's module.
    """
    script = directory / "rank.py"
    script.write_text(RANK)
    out = directory / how
    out.mkdir()
    command = [sys.executable, RUN_MODULE, RUNNER, f"--rank_start={how}", "--num_gpus", "2"]
    command += ["--log_level", "error", "--master_port", "29511", script, *words, out]
    return subprocess.Popen(
        [str(word) for word in command], cwd=directory, env=environment(**more),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(paths: list[Path], process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


def all_end(session: int, seconds: float = 10.0) -> bool:
    """Return whether all processes of a session end in time; nobody may have reaped them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = map(processes.inspect_process, session_members(session))
        if all(each is None or each.state in "ZX" for each in found):
            return True
        time.sleep(0.05)
    return False


def test_a_forked_rank_is_like_one_that_deepspeed_starts(tmp_path):
    found, output = {}, {}
    running = {how: start(how, tmp_path, "fail", PYTHONUNBUFFERED="") for how in STARTS}
    for how, process in running.items():
        output[how] = process.communicate(timeout=240)[0].splitlines()
        assert process.returncode == 3, output[how]
        lines = [(tmp_path / how / str(rank)).read_text() for rank in range(2)]
        found[how] = [json.loads(line.replace(f"/{how}", "/HOW")) for line in lines]
    for how in STARTS:
        for (seen, drawn), (expected, _) in zip(found[how], found[DEEPSPEED], strict=True):
            assert seen == expected
            assert drawn[0] == (how == FORK)
        assert not set(found[how][0][1][1:4]) & set(found[how][1][1][1:4])
        assert found[how][0][1][4] == found[how][1][1][4]  # children of one node launcher
        assert {"rank 0", "rank 1"} < set(output[how])
        assert "rank.py" in output[how][-1] and "exits with return code = 3" in output[how][-1]


@pytest.mark.parametrize("how", [FORK, FRESH])
def test_no_rank_outlives_its_launcher(tmp_path, how):
    process = start(how, tmp_path, "wait")
    try:
        wait_for([tmp_path / how / str(rank) for rank in range(2)], process)
        (launcher,) = processes.children(process.pid)
        assert len(processes.children(launcher.pid)) == 2
        os.kill(launcher.pid, signal.SIGKILL)
        assert process.communicate(timeout=30)[0].count("rank") == 2
        assert all_end(process.pid)
        assert process.returncode == 0  # as under DeepSpeed's: outcome.py
    finally:
        kill_session(process.pid)


@pytest.mark.parametrize("how", [FORK, DEEPSPEED])
@pytest.mark.parametrize("to", ["launcher", "rank", "group"])
def test_a_signal_ends_all_ranks_with_the_code_of_deepspeeds_launcher(tmp_path, how, to):
    process = start(how, tmp_path, "wait")
    try:
        wait_for([tmp_path / how / str(rank) for rank in range(2)], process)
        (launcher,) = processes.children(process.pid)
        ranks = [rank.pid for rank in processes.children(launcher.pid)]
        time.sleep(1.0)  # until the launcher handles signals
        if to == "group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(launcher.pid if to == "launcher" else ranks[1], signal.SIGTERM)
        process.communicate(timeout=60)
        codes = {"launcher": {1}, "rank": {256 - signal.SIGTERM}, "group": {-signal.SIGINT}}
        assert process.returncode in codes[to]
        assert all_end(process.pid)
    finally:
        kill_session(process.pid)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "is not zerolm's pretrain.py"),
        (["--rank_start=fork", "--no_python"], "it runs no Python script"),
        (["--rank_start=fork", "--bind_cores_to_rank"], "numactl must bind its cores"),
    ],
)
def test_ranks_that_cannot_be_forked_are_started_afresh_and_a_line_says_why(tmp_path, flags, why):
    (tmp_path / "numactl").write_text('#!/bin/sh\n[ $1 = --hardware ] && exit 1\necho "$@"\n')
    script = tmp_path / "rank.sh"
    script.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE" "$@"\n')
    for file in (script, tmp_path / "numactl"):
        file.chmod(0o755)
    command = [sys.executable, RUN_MODULE, RUNNER, *flags, "--num_gpus", "1", "-q"]
    command += ["--master_port", free_port(), script, "a"]
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, text=True, capture_output=True, timeout=60,
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}"),
    )  # fmt: skip
    assert f"starting each rank afresh: {why}" in done.stderr.replace(f"{script} ", "")
    assert ("0 of 1 --local_rank=0 a" in done.stdout) == ("--no_python" in flags)


def test_imports_leave_a_process_that_may_fork_where_each_rank_has_several_cores():
    program = """import os
from zerolm.common import forked
from zerolm.train import node_launcher
flags = ["--model_config", "model_configs/tiny.json"]
added = node_launcher.import_for_ranks(flags, dict(os.environ))
print(forked.touched(), os.environ.get("OPENBLAS_NUM_THREADS"), sorted(added))
"""
    own = {
        name: each for name, each in environment(OMP_NUM_THREADS="3").items() if "BLAS" not in name
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=own, text=True, capture_output=True,
        timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("None None [") and "OPENBLAS" not in done.stdout, done.stderr
