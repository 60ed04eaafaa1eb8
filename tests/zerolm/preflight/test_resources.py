"""Checks of disk space, shared memory and the port, with real files and sockets."""

import os
import re
import socket
import subprocess
import sys

from tests.launching import LLAMA, ROOT, run_ranks, write_json, write_shards
from zerolm.common.errors import Findings
from zerolm.parts.settings import RunSettings
from zerolm.preflight import host


def test_error_names_the_process_that_uses_the_port():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        problem = host.port_problem(port)
        assert problem is not None
        assert f"port {port}: in use by process {os.getpid()} (" in problem
        assert "--master_port" in problem
    assert host.port_problem(port) is None


def test_required_space_counts_future_checkpoints(tmp_path):
    free, required = host.checkpoint_room(tmp_path / "run", 100, 3)
    assert free > 0 and required == 400  # three are kept, and one is written
    for step in (1, 2):
        (tmp_path / "run" / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    assert host.checkpoint_room(tmp_path / "run", 100, 3)[1] == 200


def test_too_little_shared_memory_for_the_ranks_of_a_host_is_reported():
    assert host.shared_memory_problem(1 << 30, 8) is None
    problem = host.shared_memory_problem(64 << 20, 8)  # docker's default
    assert problem is not None and "64 MiB free, 8 rank(s) need about 1 GiB" in problem


def test_a_rank_that_is_bound_to_one_core_of_several_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    notices = []
    for bound in (1, 8):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, bound=bound: range(bound))
        found = Findings([])
        host.detect(RunSettings(run_dir=str(tmp_path)), ["pretrain.py"], {"LOCAL_SIZE": "8"}, found)
        notices.append([line for line in found.notices if "cores" in line])
    told = "this rank and its loader workers may use only 1 of the host's 64 cores. Start it with"
    assert notices == [[f"{told} `srun --cpus-per-task 8` or `mpirun --bind-to none`"], []]


def test_run_is_refused_if_its_port_is_in_use(tmp_path):
    words = ["--data", write_shards(tmp_path / "counting", 40), "--run_dir", tmp_path / "run"]
    words += ["--model_config", write_json(tmp_path / "model.json", LLAMA)]
    words += ["--deepspeed_config", ROOT / "ds_configs/zero2.json"]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = run_ranks(1, *words, MASTER_PORT=str(port))
    assert done.returncode == 2, done.stdout
    line = rf"environment: MASTER_PORT: port {port}: in use by process {os.getpid()} \(.*\)\. End"
    assert re.search(line, done.stdout), done.stdout
    assert "Traceback" not in done.stdout and not (tmp_path / "run").exists()


def test_the_variables_of_a_launch_by_ssh_are_checked_as_its_launcher_read_them(tmp_path):
    """The launcher is found by its arguments; a rank lacks its DS_ENV_FILE."""
    (tmp_path / "other.env").write_text('A="x y"\n')
    flags = ["--run_dir", str(tmp_path)]
    wait = [sys.executable, "-c", "print(1, flush=True); input()", "deepspeed", "--hostfile", "h"]
    launched = {"CROSS_SIZE": "2", "MASTER_ADDR": "a", "LOCAL_RANK": "1"}
    for more, expected in ([], ["line 1: A: contains quotes"]), (["--no_ssh"], []):
        with subprocess.Popen(
            [*wait, *more, "pretrain.py", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "HOME": str(tmp_path), "DS_ENV_FILE": "other.env"},
        ) as launcher:  # fmt: skip
            assert launcher.stdout.readline() and launcher.stdin
            found = Findings([])
            host.detect(RunSettings(), flags, {**os.environ, **launched}, found)
            launcher.communicate(b"\n", timeout=20)
        problems = [line for line in found.problems if "other.env" in line]
        assert len(problems) == len(expected)
        assert all(part in line for part, line in zip(expected, problems, strict=True))
