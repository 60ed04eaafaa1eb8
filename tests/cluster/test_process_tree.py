"""The processes of a launch, as zerolm/common/process_tree.py draws them, under each real launcher.

Skipped without root or the packages, which the reason names.
"""

import json

import pytest

from tests import ROOT
from tests.cluster.hosts import Cluster, missing
from tests.cluster.slurm import Slurm
from tests.launching import free_port
from zerolm.common.process_tree import RUNNER
from zerolm.common.shipped import RUN_MODULE

PYTHON = f"{ROOT}/.venv/bin/python"
# Writes what a rank sees: the processes above it, from the nearest, and its `Launch`.
RANK = """\
import json, os, sys
from pathlib import Path
from zerolm.common import process_tree, processes
from zerolm.distributed import ranks

def name(pid):
    words = Path("/proc", str(pid), "cmdline").read_text().split(chr(0))
    known = {"-c": "zerolm", process_tree.RUNNER: "runner", process_tree.NODE_LAUNCHER: "launch"}
    found = next((known[word] for word in words if word in known), "")
    return found or Path("/proc", str(pid), "comm").read_text().strip()

ranks.adopt(os.environ)
launch, above, process = process_tree.Launch.of_this_rank(), [], os.getpid()
while process := processes.inspect_process(process).parent:
    above.append(process)
seen = {kind: each and above.index(each.pid) for kind, each in launch._asdict().items()
        if kind != "node_launcher"}
seen["names"], seen["node launcher"] = list(map(name, above)), above.index(launch.node_launcher)
Path(sys.argv[-1], os.environ["RANK"]).write_text(json.dumps(seen))
"""
TRAIN = "import sys, launch.command.train as one; sys.exit(one._run_launcher(sys.argv[1:]))"
NODE = """\
import pathlib, sys, launch.render.node as one
run = one.Attempt(sys.argv[1:], "mark", pathlib.Path(sys.argv[-1]))
sys.exit(run.process.wait())
"""
MPI = "--allow-run-as-root -x MASTER_ADDR=node1 -x MASTER_PORT=29500 -x PYTHONPATH"
LAUNCH = [PYTHON, RUN_MODULE, RUNNER]
BELOW_SSH = (["launch", "sshd"], None, 1)
# {way to start the ranks: (words before the script, then for rank 0 and for the last rank: what is
# above it, and which of that are the runner and the ssh session)}.
WAYS = {
    "deepspeed": ([*LAUNCH, "--num_gpus", 2], *[(["launch", "runner"], 1, None)] * 2),
    "zerolm train": (
        [PYTHON, "-c", TRAIN, *LAUNCH, "--num_gpus", 2],
        *[(["launch", "runner", "zerolm"], 1, None)] * 2,
    ),
    "zerolm node": (
        [PYTHON, "-c", NODE, *LAUNCH, "--num_gpus", 2],
        *[(["launch", "runner", "zerolm"], 1, None)] * 2,
    ),
    "pdsh": ([*LAUNCH, "--hostfile", "HOSTS"], BELOW_SSH, BELOW_SSH),
    "openmpi": (
        [*LAUNCH, "--hostfile", "HOSTS", "--launcher", "openmpi", f"--launcher_args={MPI}"],
        (["mpirun", "runner"], 1, None),
        (["orted", "sshd"], None, 1),
    ),
    "slurm": (
        [*LAUNCH, "--hostfile", "HOSTS", "--launcher", "slurm", "--num_nodes", 2],
        *[(["slurmstepd"], None, None)] * 2,
    ),
    "srun": (["srun", "-N2", "-n2", PYTHON], *[(["slurmstepd"], None, None)] * 2),
}

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(reason := missing()), reason=reason or "there is a cluster"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster") / "hosts", 2) as made:
        (made.directory / "rank.py").write_text(RANK)
        Slurm(made)
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_the_processes_above_the_ranks_are_those_of_the_drawing(cluster, way):
    words, *expected = WAYS[way]
    found = cluster.directory / f"under-{list(WAYS).index(way)}"
    found.mkdir()
    command = [cluster.hostfile() if word == "HOSTS" else word for word in words]
    if "--num_gpus" in words or way == "pdsh":
        command += ["--master_port", free_port()]
    script = [cluster.directory / "rank.py", found]
    done = cluster.run("node1", *command, *script, timeout=120, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    seen = [json.loads((found / str(rank)).read_text()) for rank in range(2)]
    for rank, (above, runner, session) in zip(seen, expected, strict=True):
        assert rank["names"][: len(above)] == above
        assert (rank["node launcher"], rank["runner"], rank["session"]) == (0, runner, session)
