import json
import os
import stat
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import pytest

from data_prep.encode.options import TokenizeOptions
from data_prep.encode.run import run_tokenization
from data_prep.read.discovery import find_inputs
from data_prep.tasks import slurm as slurm_tasks
from data_prep.tasks.executors import make_executor
from data_prep.tasks.phases import (
    Executor,
    LocalExecutor,
    Phase,
    fingerprint,
    run_phase,
    valid_records,
)
from data_prep.tasks.slurm import SlurmExecutor
from data_prep.tokenizer.load import load_tokenizer
from tests.data_prep.tasks.pipeline_tasks import Cubes
from zerolm.common.errors import ConfigError, ZerolmError

pytest.importorskip("datatrove")

# sbatch runs its array at once: the script, with the variables that Slurm sets for each index
SBATCH = """
import os, re, subprocess, sys
script = open(sys.argv[-1]).read()
first, last = map(int, re.search(r"#SBATCH --array=(\\d+)-(\\d+)", script).groups())
offset = re.search(r"RUN_OFFSET=(\\d+)", " ".join(sys.argv)).group(1)
here = os.path.dirname(os.path.abspath(__file__))
number = len(os.listdir(here + "/jobs")) + 1
open(f"{here}/jobs/{number}", "w").write(" ".join(sys.argv[1:-1]))
if os.environ.get("REFUSE") == str(number):
    sys.exit("sbatch: error: Batch job submission failed")
logs = re.search(r"#SBATCH --output=(.*)", script).group(1)
for index in range(first, last + 1):
    if index in map(int, os.environ.get("LOSE", "").split()):
        continue
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(index), "SLURM_NODELIST": "node7",
        "SLURM_JOB_ID": str(number), "RUN_OFFSET": offset}
    log = open(logs.replace("%A", str(number)).replace("%a", str(index)), "w")
    writers = [subprocess.Popen(["bash", sys.argv[-1]], env=environment, stdout=log, stderr=log)
        for _ in range(int(os.environ.get("WRITERS", 1)))]
    for each in writers:
        each.wait(300)
print("Submitted batch job", number, "on cluster c1")
"""
SRUN = """
import subprocess, sys
words = sys.argv[1:]
sys.exit(subprocess.call(words[words.index("launch_pickled_pipeline"):]))
"""
SCONTROL = "print('node7')\n"
SQUEUE = "import sys; sys.exit('slurm_load_jobs error: Invalid job id specified')\n"
SACCT = "import sys; print('NODE_FAIL|1:0|node7' if sys.argv[5] == '1_1' else '')"
SCANCEL = """
import os, sys
open(os.path.dirname(os.path.abspath(__file__)) + "/cancelled", "a").write(" ".join(sys.argv[1:]))
"""
COMMANDS = {
    "sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "sacct": SACCT,
    "scancel": SCANCEL,
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("CANCELLED by 0|0:0|node1", "it could not be written there"),
        ("CANCELLED by 0|0:0|None assigned", "it never started"),
        ("", "it never started, or the log was removed"),
    ],
)
def test_a_state_of_several_words_is_one_column(row, why, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_tasks.shutil, "which", lambda name: name)
    monkeypatch.setattr(slurm_tasks, "_output", lambda *command: row and f"{row}\n")
    *states, line = slurm_tasks._lost_task_lines(tmp_path, "7_1")
    assert states == ([f"Slurm job 7_1: {row} (state, exit code, node)"] if row else [])
    assert line.endswith(f": {why}")


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Put local stand-ins for Slurm's commands on PATH; return the directory of their jobs."""
    programs = tmp_path / "slurm"
    (programs / "jobs").mkdir(parents=True)
    for name, text in COMMANDS.items():
        path = programs / name
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return programs / "jobs"


def phase(directory: Path, num_tasks: int = 3) -> Phase:
    directory.mkdir(exist_ok=True)
    return Phase("cubes", directory, num_tasks, Cubes(directory), fingerprint("cubes"))


OPTIONS = {"time": "1:00:00", "partition": "cpu", "poll_seconds": 0.05, "tasks_per_job": 2}


def test_slurm_runs_every_task_and_repeats_a_lost_one(tmp_path, slurm, monkeypatch, capfd):
    """Each array index is a real process that loads datatrove's pickle and runs our tasks."""
    executor = SlurmExecutor(2, OPTIONS)
    cubes = phase(tmp_path / "out")
    monkeypatch.setenv("LOSE", "1")  # the node of the second index, with task 2, fails
    with pytest.raises(ZerolmError, match=r"1 of 3 tasks did not finish: cubes 2"):
        run_phase(cubes, executor)
    assert [record is not None for record in valid_records(cubes)] == [True, True, False]
    shown = capfd.readouterr().err
    assert "cubes 2: Slurm job 1_1: NODE_FAIL|1:0|node7" in shown
    assert "1_1 has no log " in shown
    script = next((cubes.records / "jobs").glob("*/launch_script.slurm")).read_text()
    assert "#SBATCH --array=0-1%2\n" in script
    assert "#SBATCH --partition=cpu\n" in script

    monkeypatch.delenv("LOSE")
    records = run_phase(cubes, executor)
    assert [record["cube"] for record in records] == [0, 1, 8]
    assert (tmp_path / "out" / "log").read_text().split() == ["0", "1", "2"]  # each of them once


def test_a_refusal_on_a_slurm_node_is_reported_locally(tmp_path, slurm, capfd):
    cubes = phase(tmp_path / "out", 1)
    (tmp_path / "out" / "refuse-0").touch()
    with pytest.raises(ConfigError, match=r"input 0: is bad"):
        run_phase(cubes, SlurmExecutor(1, OPTIONS))
    note = json.loads(cubes.path(0, ".failed").read_text())
    assert note["pid"] != os.getpid()
    shown = capfd.readouterr().err
    assert "cubes 0: the end of " in shown and "ConfigError" in shown  # of the job's log


@pytest.mark.parametrize("end", ["interrupt", "refused"])
def test_no_slurm_array_outlives_the_command(tmp_path, slurm, monkeypatch, end):
    """datatrove itself keeps only the last of several arrays."""
    monkeypatch.setenv("LOSE", "0 1 2")  # nothing runs
    if end == "interrupt":
        monkeypatch.setattr("data_prep.tasks.slurm.time.sleep", Mock(side_effect=KeyboardInterrupt))
    else:
        monkeypatch.setenv("REFUSE", "3")
    cubes = phase(tmp_path / "out", 5)
    with pytest.raises(KeyboardInterrupt if end == "interrupt" else ZerolmError):
        run_phase(cubes, SlurmExecutor(2, {**OPTIONS, "max_array_size": 1}))
    assert sorted(path.name for path in slurm.iterdir()) == ["1", "2", "3"]
    assert "--dependency=afterany:1" in (slurm / "2").read_text()
    expected = "1 2 3" if end == "interrupt" else "1 2"
    assert (slurm.parent / "cancelled").read_text() == expected


def tokenize(directory: Path, name: str, executor: Executor, tokenizer: Path) -> tuple[list, list]:
    """Return the shards' entries and the names of all files."""
    inputs, _ = find_inputs([str(directory / "a.jsonl")], "text")
    options = TokenizeOptions(encoder="tokenizers", part_seconds=0, unit_bytes=900_000)
    output = directory / name
    summary = run_tokenization(
        inputs, load_tokenizer(str(tokenizer)), [output], options, executor, {}
    )
    (manifest,) = summary.manifests
    assert manifest["num_documents"] == 99
    return manifest["shards"], sorted(path.name for path in output.iterdir())


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Write documents for three tasks."""
    lines = [json.dumps({"text": f"Document {n} of a few. " * 900}) + "\n" for n in range(99)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return tmp_path


def test_two_processes_that_run_the_same_task_write_the_same_shards(
    corpus, slurm, monkeypatch, tokenizer_directory
):
    """Slurm may restart a task before its first process has ended."""
    monkeypatch.setenv("WRITERS", "2")
    here = tokenize(corpus, "here", LocalExecutor(1), tokenizer_directory)
    there = SlurmExecutor(3, {**OPTIONS, "tasks_per_job": 3})
    assert tokenize(corpus, "there", there, tokenizer_directory) == here


def test_all_invalid_options_are_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    options = {"slurm": {"partion": "x", "qos": 3}, "slurmm": {}}
    with pytest.raises(ConfigError) as refused:
        make_executor("slurm", 2, options, "r.json")
    text = "\n".join(refused.value.problems)
    for piece in (
        'executor.slurmm: is not an option. Did you mean "slurm"?',
        'executor.slurm.partion: is not an option. Did you mean "partition"?',
        "executor.slurm.qos: 3 is not of type str",
        "executor.slurm.time: is missing",
        "sbatch is not on PATH",
    ):
        assert piece in text
