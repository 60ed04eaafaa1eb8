"""With `keep_freed_memory` repeated allocations cause no page faults, by the kernel's count."""

import platform
import subprocess
import sys

import pytest
import torch

from tests.launching import ROOT, environment
from zerolm.common.machine import keep_operators, running_builds, share_cores

WORK = """
import resource, sys, torch
from zerolm.common.machine import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    for _ in range(10):
        torch.ones(12 << 20).sum()  # 48 MiB, like the float32 logits of a small micro-batch
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.soak
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_is_reused_without_page_faults():
    faults = {}
    for what in ("keep", "leave"):
        command = [sys.executable, "-c", WORK, what]
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        faults[what] = int(done.stdout)
    assert faults["leave"] > 1000, "otherwise pages of 4 KiB or 2 MiB are mapped again"
    assert faults["keep"] < faults["leave"] / 20


@pytest.mark.parametrize("name", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
def test_ranks_of_a_host_share_its_cores_unless_the_user_says_otherwise(name, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(512))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    for ranks, threads, workers in (("8", "64", "32"), ("32", "16", "16"), ("1024", "1", "1")):
        shared = {name: ranks}
        share_cores(shared)
        ours = {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": workers}
        assert shared == {name: ranks} | ours
    task = {"SLURM_NTASKS": "16", "WORLD_SIZE": "16", "SLURM_CPUS_PER_TASK": "512"}  # its own cores
    shared = {name: "8", **task}
    share_cores(shared)
    assert shared["OMP_NUM_THREADS"] == "512"
    given = {name: "8", "OMP_NUM_THREADS": "7", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    alone = {"PATH": ""}
    for unchanged in (given, alone):
        before = dict(unchanged)
        share_cores(unchanged)
        assert unchanged == before


def test_the_ninja_of_the_environment_is_the_first_on_the_path(tmp_path, monkeypatch):
    """A shell of ssh has another one or none; a second version would build all operators again."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    given = {"PATH": "/usr/bin"}
    keep_operators(given)
    assert given["PATH"] == "/usr/bin", "this environment has no ninja"
    (programs / "ninja").touch(mode=0o755)
    for _ in range(2):
        keep_operators(given)
        assert given["PATH"] == f"{programs}:/usr/bin"


def test_an_operator_is_being_built_while_a_compiler_works_in_its_directory(tmp_path):
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "build.ninja").touch()
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert running_builds(variables) == []
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"], cwd=tmp_path / "cpu_adam",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as compiler:  # fmt: skip
        assert compiler.stdout is not None and compiler.stdout.readline()
        assert running_builds(variables) == ["cpu_adam"]
        compiler.communicate(b"\n", timeout=20)
