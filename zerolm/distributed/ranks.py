"""Determines which rank this process is, from the environment variables of its starter program.

DeepSpeed's launcher and torchrun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
`mpirun` and `srun` use their own names, even under DeepSpeed's launchers openmpi, mvapich and
slurm, which set no others. If these names were not read, every process would train alone as if it
were the only rank.
"""

import re
import subprocess
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from zerolm.engine.launcher_options import DEFAULT_PORT

HOST_SECONDS = 30.0
# Ports for jobs that may share a host, below Linux's ephemeral ports, which start at 32768.
FIRST_PORT, NUM_PORTS = 20000, 10000
TASKS_OF_NODES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class Starter(NamedTuple):
    """A program that starts ranks, and the names of the environment variables that it sets.

    Attributes:
        identity: name of a variable with a job number, which is the same on all ranks.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    identity: str = ""


OPEN_MPI = Starter(
    "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid",
)  # fmt: skip
MVAPICH = Starter(
    "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
MPICH = Starter("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
CRAY = Starter("Cray PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
SLURM = Starter(
    "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_JOB_ID",
)  # fmt: skip
# The first starter whose variables are all set is used: mpirun starts its daemons with srun, and
# srun also sets PMI variables.
STARTERS = (OPEN_MPI, MVAPICH, MPICH, CRAY, SLURM)


class Ranks(NamedTuple):
    """A rank's index among all ranks and among those on its host, with the number of both."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def of_environment(environment: Mapping[str, str]) -> Ranks:
    """Return which rank this process is: the only one, if no variables are set."""
    if "RANK" not in environment and (found := _started(environment)):
        return found[1]
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "")
    return Ranks(
        int(environment.get("RANK", 0)),
        int(environment.get("WORLD_SIZE", 1)),
        int(environment.get("LOCAL_RANK", 0)),
        max(1, int(local)) if local.isdigit() else 1,
    )


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set the variables that DeepSpeed's launcher sets, if `mpirun` or `srun` started this rank.

    Call this before any code reads these variables. `problems` then reports what is missing.
    """
    if "RANK" in environment or not (found := _started(environment)):
        return
    starter, ranks = found
    node, nodes = ranks.rank // ranks.local_size, ranks.size // ranks.local_size
    environment.update(
        RANK=str(ranks.rank), WORLD_SIZE=str(ranks.size), LOCAL_RANK=str(ranks.local_rank),
        LOCAL_SIZE=str(ranks.local_size), CROSS_RANK=str(node), CROSS_SIZE=str(nodes),
    )  # fmt: skip
    address = "127.0.0.1" if ranks.local_size == ranks.size else None
    if address is None and starter is SLURM:
        address = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if address is not None:
        environment.setdefault("MASTER_ADDR", address)
    job = environment.get(starter.identity, "")
    port = FIRST_PORT + int(job) % NUM_PORTS if job.isdigit() else DEFAULT_PORT
    environment.setdefault("MASTER_PORT", str(port))


def problems(environment: Mapping[str, str]) -> list[str]:
    """Return why this process cannot run as one of the started ranks, after `adopt`."""
    found = _started(environment)
    if found is None:
        return _unnumbered(environment)
    starter, ranks = found
    if environment.get("RANK") != str(ranks.rank) or ranks.size == 1:
        return []  # a launcher that the starter runs has set the variables
    lines = []
    if ranks.size % ranks.local_size:
        lines.append(
            f"environment: {starter.size}: {ranks.size} ranks, {ranks.local_size} of them on this "
            "host. Start the same number on each host."
        )
    if "MASTER_ADDR" not in environment:
        how = "-genv MASTER_ADDR HOST -genv MASTER_PORT 29500"
        if starter is OPEN_MPI:
            how = "-x MASTER_ADDR=HOST -x MASTER_PORT=29500"
        lines.append(
            f"environment: MASTER_ADDR is not set, and {starter.name} does not state which host "
            f"runs rank 0. Set it for all ranks: mpirun {how} (deepspeed: --launcher_args '{how}')."
        )
    if starter is SLURM and ranks.rank == 0 and environment.get("SLURM_NODEID", "0") != "0":
        lines.append(
            f"environment: SLURM_NODEID: {environment['SLURM_NODEID']}, but rank 0 must be on the "
            f"first host of the list. Use srun --distribution=block."
        )
    return lines


def _unnumbered(environment: Mapping[str, str]) -> list[str]:
    """Return a problem if there seem to be other processes, but this one's rank is unknown."""
    if "RANK" in environment:
        return []
    for size in [*(starter.size for starter in STARTERS), "SLURM_NTASKS"]:
        number = environment.get(size, "")
        if number.isdigit() and int(number) > 1:
            return [
                f"environment: {size}: {number}, but no variable states which of these this "
                "process is, so each would train alone in the same --run_dir. Start them with "
                "`srun python pretrain.py ...`, with mpirun, or with the job file of `zerolm "
                "render slurm`; for a run with one process, request one task."
            ]
    return []


def _started(environment: Mapping[str, str]) -> tuple[Starter, Ranks] | None:
    """Return the starter whose variables are all set, and the rank that they describe."""
    for starter in STARTERS:
        values = [environment.get(name, "") for name in starter[1:4]]
        local_size = environment.get(starter.local_size, "")
        if starter is SLURM:
            local_size = _tasks_of_node(local_size, environment.get("SLURM_NODEID", ""))
        if all(value.isdigit() for value in (*values, local_size)) and local_size != "0":
            rank, size, local_rank = map(int, values)
            return starter, Ranks(rank, size, local_rank, int(local_size))
    return None


def _tasks_of_node(tasks: str, node: str) -> str:
    """Return the number of tasks on a node, given Slurm's list for all nodes, such as "2(x3),1"."""
    counts: list[str] = []
    for part in tasks.split(","):
        if match := TASKS_OF_NODES.fullmatch(part):
            counts += [match[1]] * int(match[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else ""


def _first_host(nodes: str) -> str | None:
    """Return the first host in a Slurm host list such as "node[1-3]"."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True,
            timeout=HOST_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(shown.stdout.split()), None)
