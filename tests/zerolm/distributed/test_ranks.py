"""Which rank a process is, by the variables that Open MPI 4.1, MPICH 4 and Slurm 22.05 set."""

import pytest

from tests.launch.supervise.fake_run import write_program
from zerolm.common import machine
from zerolm.distributed import ranks

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "1938817025",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "12345", "SLURM_NTASKS": "4",
}  # fmt: skip
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4"}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}


@pytest.fixture
def hostnames(tmp_path, monkeypatch):
    write_program(tmp_path, "scontrol", '[ "$*" = "show hostnames node[1-2]" ] && echo node1 node2')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("variables", "address", "port"),
    [
        (OPEN_MPI, None, 20000 + 1938817025 % 10000),
        (OPEN_MPI | DAEMON, None, 20000 + 1938817025 % 10000),
        (MPICH, None, 29500),
        (MVAPICH, None, 29500),
        (SLURM, "node1", 22345),
        (SLURM | PMI2, "node1", 22345),
        (SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}, "10.0.0.1", 7),
    ],
    ids=["open mpi", "open mpi in slurm", "mpich", "mvapich", "slurm", "slurm pmi2", "given"],
)
def test_a_rank_of_another_starter_gets_the_variables_of_a_launcher(
    variables, address, port, hostnames
):
    assert ranks.of_environment(variables) == (3, 4, 1, 2), "before they are adopted, too"
    environment = dict(variables)
    ranks.adopt(environment)
    adopted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert environment.items() >= {**adopted, "MASTER_PORT": str(port)}.items()
    assert environment.get("MASTER_ADDR") == address
    assert ranks.of_environment(environment) == (3, 4, 1, 2)
    assert machine.num_nodes(environment) == 2
    lines = ranks.problems(environment)
    assert (lines == []) == (address is not None)
    assert address or "MASTER_ADDR is not set" in lines[0]


def test_ranks_of_one_host_meet_there():
    environment = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    ranks.adopt(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1" and ranks.problems(environment) == []


def test_what_a_launcher_has_set_stays():
    """The tasks of a job file start a launcher, which numbers its ranks."""
    launched = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}
    environment = SLURM | launched
    ranks.adopt(environment)
    assert environment == SLURM | launched and ranks.problems(environment) == []
    assert ranks.of_environment(environment) == (9, 16, 1, 8)


def test_a_process_without_numbers_is_alone():
    assert ranks.of_environment({}) == (0, 1, 0, 1) and ranks.problems({}) == []
    one = SLURM | {
        "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }  # fmt: skip
    ranks.adopt(one)
    assert one["WORLD_SIZE"] == "1" and ranks.problems(one) == [], "srun --ntasks=1"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"SLURM_NTASKS": "8"}, "SLURM_NTASKS: 8, but no variable states which"),  # no srun
        (PMI2, "PMI_SIZE: 4, but no variable states which"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "5"}, "5 ranks, 2 of them on this host"),
        (
            SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            "SLURM_NODEID: 1, but rank 0 must be on the first host",
        ),
    ],
    ids=["batch script", "no local rank", "uneven", "not the first host"],
)
def test_ranks_that_cannot_be_numbered_are_refused(variables, text, hostnames):
    environment = dict(variables)
    ranks.adopt(environment)
    assert text in ranks.problems(environment)[0]
