"""Two hosts under ssh, Open MPI and Slurm: the same curve, the right host blamed, jobs that end.

Skipped without root or the packages, which the reason names.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, missing
from tests.cluster.slurm import Slurm
from tests.launching import LLAMA, events, rows, write_json, write_shards
from zerolm.common.process_tree import NODE_LAUNCHER

SECONDS = 240.0
PYTHON = ".venv/bin/python"

pytestmark = pytest.mark.skipif(bool(reason := missing()), reason=reason or "there is a cluster")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster") / "hosts", 2) as made:
        yield made


@pytest.fixture(scope="module")
def run_flags(cluster) -> list[object]:
    inputs = cluster.directory / "inputs"
    inputs.mkdir()
    write_shards(inputs / "data")
    zero = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}
    return [
        "--deepspeed_config", write_json(inputs / "ds.json", zero),
        "--model_config", write_json(inputs / "model.json", LLAMA), "--data", inputs / "data",
        "--seq_len", 32, "--batch_tokens", 256, "--precision", "fp32", "--wandb", "off",
        "--checkpoint_interval", 10,
    ]  # fmt: skip


def output_of(cluster: Cluster, name: str) -> Path:
    return cluster.directory / f"{name}.out"


def start(cluster: Cluster, name: str, *command: object) -> subprocess.Popen:
    with output_of(cluster, name).open("w") as log:
        return cluster.start("node1", [PYTHON, "-m", "zerolm", *command], stdout=log, stderr=log)


def test_a_killed_rank_of_another_host_is_blamed_and_both_launchers_have_the_same_curve(
    cluster, run_flags
):
    run_dir, mpi_dir = cluster.directory / "killed", cluster.directory / "mpi"
    hosts = ["--hostfile", cluster.hostfile()]
    total = ["--total_tokens", 256 * 60]
    train = ["zerolm", "train", *hosts, *run_flags, *total, "--run_dir", run_dir]
    run = start(cluster, "killed", "supervise", "--", *train)
    deadline = time.monotonic() + SECONDS
    while not (run_dir / "checkpoints" / "step-00000010").exists():
        assert run.poll() is None and time.monotonic() < deadline, output_of(cluster, "killed")
        time.sleep(0.1)
    ranks = [
        pid for pid in cluster.pids("node2", "--run_dir", str(run_dir))
        if NODE_LAUNCHER not in Path(f"/proc/{pid}/cmdline").read_text()
    ]  # fmt: skip
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    assert run.wait(timeout=SECONDS) == 0, output_of(cluster, "killed").read_text()[-4000:]
    (lost,) = events(run_dir, "rank_lost")
    (blamed,) = lost["ranks"]
    assert (blamed["rank"], blamed["host"]) == (1, "node2")
    assert "(the only rank on node2): the host has failed" in blamed["reason"]
    output = output_of(cluster, "killed").read_text()
    assert "supervise:   rank 1 on node2" in output and "launcher reported SIGKILL" in output

    mpi = ["--launcher", "openmpi", "--launcher_args", "--allow-run-as-root"]
    code = start(
        cluster, "mpi", "train", *hosts, *mpi, *run_flags, *total, "--run_dir", mpi_dir
    ).wait(timeout=SECONDS)
    assert code == 0, output_of(cluster, "mpi").read_text()[-4000:]
    assert json.loads((mpi_dir / "run.json").read_text())["world_size"] == 2
    assert rows(mpi_dir, "train/loss") == rows(run_dir, "train/loss"), "in every digit"


def test_a_launcher_of_mpi_that_would_choose_hosts_is_refused(cluster, run_flags):
    chosen = ["--launcher", "openmpi", "--num_nodes", 2, "--hostfile", cluster.hostfile()]
    run = start(cluster, "chosen", "train", *chosen, *run_flags, "--run_dir", "runs/none")
    assert run.wait(timeout=60) == 2
    assert "--num_nodes: DeepSpeed's --launcher openmpi" in output_of(cluster, "chosen").read_text()


def test_a_cancelled_job_ends_and_a_preempted_one_is_requeued_once(cluster):
    slurm = Slurm(cluster)
    script = cluster.directory / "job"
    rank = "trap 'sleep 1; exit 75' TERM; echo started; while true; do sleep 0.2; done"
    script.write_text(
        "#!/usr/bin/env bash\n#SBATCH --requeue --open-mode=append --nodes=2 --exclusive\n"
        f"exec {PYTHON} -m launch supervise --requeue -- srun bash -c {json.dumps(rank)} "
        f"pretrain.py --run_dir {cluster.directory}/slurm-$SLURM_JOB_ID\n"
    )

    def submitted(name: str, *options: str) -> tuple[str, Path]:
        log = output_of(cluster, name)
        job = slurm.submit(script, f"--output={log}", *options)
        slurm.wait(
            lambda: log.exists() and log.read_text().splitlines().count("started") == 2, name
        )
        return job, log

    job, log = submitted("cancelled")
    slurm.command("scancel", job)
    slurm.wait(lambda: slurm.state(job) == "CANCELLED", "the job to end")
    assert f"supervise: job {job} is not requeued: it was cancelled" in log.read_text()

    job, log = submitted("preempted")
    urgent = cluster.directory / "urgent"
    urgent.write_text("#!/bin/sh\nsleep 2\n")
    slurm.submit(urgent, "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    slurm.wait(lambda: slurm.state(job) == "PENDING", "the job to be queued again")
    slurm.wait(lambda: "requeued" in log.read_text(), "the supervisor's line")
    assert f"supervise: Slurm itself has requeued job {job}" in log.read_text()
    assert "Restarts=1 " in slurm.command("scontrol", "show", "job", "--oneliner", job)
    slurm.command("scancel", job)
