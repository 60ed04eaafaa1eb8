"""A process that the spare forks equals one that is started: DeepSpeed's launchers run in it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.supervise.attempt import Attempt
from launch.supervise.spare import Spare, runner_arguments
from tests.launching import free_port
from zerolm.common import processes

SHOW = """
import json, os, resource, signal, sys, threading
imported = "{module}" in sys.modules
from zerolm.watchdog import startup
process = {{
    "argv": sys.argv, "path": sys.path[0], "main": __name__, "threads": threading.active_count(),
    "environ": open("/proc/self/environ").read().rstrip("\\0").split("\\0"),
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "parent": open(f"/proc/{{os.getppid()}}/cmdline").read().rstrip("\\0").split("\\0"),
    "interrupt": str(signal.getsignal(signal.SIGINT)), "cwd": os.getcwd(),
    "oom": open("/proc/self/oom_score_adj").read(), "limit": resource.getrlimit(7),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "kinds": [str(os.path.islink(f"/proc/self/fd/{{n}}")) for n in range(3)],
}}
if os.environ["RANK"] == "0":
    print("output of rank 0", flush=True)
    json.dump([process, imported], open(os.environ["SHOWN"], "w"))
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def spare(tmp_path):
    (tmp_path / "modules.json").write_text(
        '["colorsys", "no_such_module", "zerolm.common.files", "edited_library"]'
    )
    found = Spare(tmp_path / "modules.json", tmp_path / "forkable")
    yield found
    found.end()


def wait_for(spare: Spare, command: list[str]) -> str:
    deadline = time.monotonic() + 120
    while (news := spare.tick(command)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return news


def write_script(directory: Path) -> Path:
    script = directory / "pretrain.py"
    script.write_text(SHOW.format(module="colorsys"))
    return script


def deepspeed(script: Path) -> list[str]:
    return [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2",
        "--log_level", "error", "--master_port", str(free_port()), str(script), "--flag", "a b",
    ]  # fmt: skip


def launch(command: list[str], directory: Path, spare: Spare | None, number: int):
    """Run a launch to its end; return the process of rank 0, its exit code and the outcome."""
    attempt = Attempt(command, f"test-{os.getpid()}-{number}", directory, spare=spare)
    try:
        code = attempt.process.wait(timeout=120)
        attempt.finish()
    finally:
        attempt.kill()
    assert processes.marked_pids(attempt.mark) == []
    assert "output of rank 0" in attempt.output
    process, imported = json.loads((directory / "shown").read_text())
    return process, code, imported


@pytest.mark.soak
def test_a_forked_launch_is_like_a_started_one(spare, tmp_path, monkeypatch) -> None:
    library = tmp_path / "edited_library.py"
    library.write_text("VALUE = 1\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    command = deepspeed(write_script(tmp_path))
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setenv("SHOWN", str(tmp_path / "shown"))
    spare.prepare(command)
    assert spare.process is None, "no process with these modules was ever forked"
    assert spare.tick(command) is None, "it has begun to import, and the launch waits for it"
    monkeypatch.setenv("NEW", "set after the spare was started")
    forked, code, imported = launch(command, tmp_path, spare, 2)
    assert (code, imported) == (0, True)
    spare.end()
    spare.prepare(command)
    assert spare.process is not None
    started, code, imported = launch(command, tmp_path, None, 1)
    assert (code, imported) == (0, False)
    marks = [[one for one in rank["environ"] if "SUPERVISOR" in one] for rank in (started, forked)]
    assert marks == [[f"{processes.SUPERVISOR}=test-{os.getpid()}-{n}"] for n in (1, 2)]
    for rank in (started, forked):
        rank["environ"] = sorted(
            one for one in rank["environ"] if not one.startswith("ZEROLM_SUPERVISOR")
        )
    assert forked == started
    # The next launch is of the same spare, and its exit code arrives, too.
    monkeypatch.setenv("CODE", "3")
    assert launch(command, tmp_path, spare, 3)[1:] == (3, True)
    # Not after the edit of a library that it has imported.
    library.write_text("VALUE = 22\n")
    assert spare.launch(command, {**os.environ, processes.SUPERVISOR: "test"}) is None
    assert spare.process is None and spare.problem is None, "another one is started later"


@pytest.mark.soak
def test_a_launch_outlives_its_spare_and_ends_with_the_supervisor(spare, tmp_path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text("import time\nprint('RANK', flush=True)\ntime.sleep(600)\n")
    command = deepspeed(script)
    wait_for(spare, command)
    attempt = Attempt(command, f"test-{os.getpid()}", tmp_path, spare=spare)
    try:
        deadline = time.monotonic() + 60
        while list(attempt.output).count("RANK") < 2:
            assert time.monotonic() < deadline and attempt.running()
            time.sleep(0.05)
        assert spare.process is not None
        spare.process.kill()
        time.sleep(0.5)
        assert len(processes.marked_pids(attempt.mark)) == 4  # both launchers, two ranks
        assert attempt.process.poll() is None
        fields = processes.inspect_process(attempt.process.pid)
        assert fields is not None and fields.parent == os.getpid()
        assert Path(f"/proc/{fields.pid}/cmdline").read_text().count("pretrain.py") == 1
    finally:
        attempt.kill()
    assert attempt.process.wait(10) == -signal.SIGKILL
    # A dead spare is not used, and the next launch is an ordinary one.
    assert spare.launch(command, {**os.environ, processes.SUPERVISOR: "test"}) is None


def test_a_command_that_it_cannot_fork_gets_no_spare(spare, tmp_path) -> None:
    python = tmp_path / "deepspeed"
    python.write_text("#!/usr/bin/other-python\n")
    python.chmod(0o755)
    for command in (["sh", "-c", "true"], [str(python)], ["numactl", *deepspeed(tmp_path)]):
        assert runner_arguments(command) is None
    assert "does not start deepspeed" in wait_for(spare, ["sh", "-c", "true"])
    assert spare.process is None and spare.tick(["sh", "-c", "true"]) is None


def test_the_spare_ends_with_its_supervisor(tmp_path) -> None:
    modules = tmp_path / "modules.json"
    modules.write_text("[]")
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom launch.supervise.spare import Spare\n"
        f"spare = Spare(Path({str(modules)!r}), Path({str(tmp_path / 'forkable')!r}))\n"
        "spare.tick([sys.executable, '-m', 'deepspeed.launcher.runner'])\n"
        "print(spare.process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    pid, deadline = int(done.stdout), time.monotonic() + 10
    while (process := processes.inspect_process(pid)) and process.state not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.05)
