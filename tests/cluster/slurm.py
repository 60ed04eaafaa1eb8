"""Slurm on the hosts of a cluster: its controller on the first one, a daemon on each.

With accounting, which `sacct` reads, also its database daemon and MariaDB on the first one.
"""

import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = 60.0
# Preemption as in many clusters, and short times so that tests do not wait.
CONFIG = """\
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
KillWait=20
SchedulerParameters=sched_interval=2,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=grace Nodes=ALL State=UP PriorityTier=1 GraceTime=15
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={first}
JobAcctGatherType=jobacct_gather/linux
"""
DATABASE = """\
AuthType=auth/munge
DbdHost={first}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=accounts
PidFile=/run/slurmdbd.pid
LogFile={directory}/slurmdbd.log
"""


def missing_accounting() -> str:
    """Return why there can be no accounting here; an empty text if there can."""
    names = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
    absent = [name for name in names if shutil.which(name) is None]
    return f"{', '.join(absent)} not found: apt-get install {ACCOUNTING_PACKAGES}" * bool(absent)


def write_config(directory: Path, addresses: Mapping[str, str]) -> None:
    """Write what will be /etc/slurm of all hosts, with two devices on each that no job opens."""
    first = next(iter(addresses))
    for part in ("state", "munge", *(f"spool-{name}" for name in addresses)):
        (directory / part).mkdir(parents=True)
    key = directory / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    nodes = "".join(
        f"NodeName={name} NodeAddr={address} CPUs=2 RealMemory=1000 Gres=gpu:2\n"
        for name, address in addresses.items()
    )
    head = CONFIG.format(first=first, address=addresses[first], directory=directory)
    (directory / "slurm.conf").write_text(head + nodes + PARTITIONS)
    (directory / "gres.conf").write_text("Name=gpu File=/dev/tty[0-1]\n")


class Slurm:
    """Starts the daemons; they end with their hosts.

    Args:
        cluster: a `hosts.Cluster` that has started.
        accounting: with `sacct`; needs `ACCOUNTING_PACKAGES`.
    """

    def __init__(self, cluster: Any, accounting: bool = False):
        self.cluster, self.first = cluster, cluster.names[0]
        self.directory = cluster.directory / "slurm"
        munge = self.directory / "munge"
        for name in cluster.names:
            files = [f"--{kind}-file=/run/munge/{kind}" for kind in ("log", "pid", "seed")]
            self._on(name, "munged", "--force", f"--key-file={munge / 'key'}", *files)
        if accounting:
            self._start_accounting()
        self._on(self.first, "slurmctld")
        for name in cluster.names:
            self._on(name, "slurmd", "-N", name)
        self.wait(lambda: self._idle() == len(cluster.names), "all nodes to be idle")

    def _start_accounting(self) -> None:
        first, directory, data = self.first, self.directory, self.directory / "database"
        socket = "/run/mysqld/mysqld.sock"  # the one that slurmdbd expects
        self._on(first, "mkdir", "-p", data, "/run/mysqld")
        options = ("--no-defaults", f"--datadir={data}", "--user=root")
        self._on(first, "mariadb-install-db", *options, "--skip-test-db",
                 "--auth-root-authentication-method=normal")  # fmt: skip
        with open(directory / "mariadbd.log", "w") as log:
            command = ["mariadbd", *options, f"--socket={socket}", "--skip-networking"]
            self.cluster.start(first, command, stdout=log, stderr=log)
        client = ("mariadb", "--no-defaults", f"--socket={socket}", "-e")
        self.wait(
            lambda: self.cluster.run(first, *client, "create database accounts").returncode == 0,
            "MariaDB",
        )
        config = directory / "slurmdbd.conf"
        config.write_text(DATABASE.format(first=first, directory=directory))
        config.chmod(0o600)
        with open(directory / "slurm.conf", "a") as file:
            file.write(ACCOUNTING.format(first=first))
        self._on(first, "slurmdbd")
        self.wait(
            lambda: self.cluster.run(first, "sacctmgr", "-n", "list", "cluster").returncode == 0,
            "slurmdbd",
        )

    def submit(self, script: Path, *options: str) -> str:
        """Submit a job script; return the number of the job."""
        return self._on(self.first, "sbatch", "--parsable", *options, script).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as `RUNNING` or `COMPLETED`."""
        shown = self._on(self.first, "scontrol", "show", "job", "--oneliner", job)
        return shown.partition(" JobState=")[2].split()[0]

    def command(self, *words: str) -> str:
        """Run a command of Slurm on the first host."""
        return self._on(self.first, *words)

    def wait(self, condition: Any, what: str, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.2)

    def _idle(self) -> int:
        done = self.cluster.run(self.first, "sinfo", "-h", "-N", "-p", "main", "-o", "%T")
        return str(done.stdout).split().count("idle")

    def _on(self, name: str, *words: object) -> str:
        done = self.cluster.run(name, *words)
        assert done.returncode == 0, f"{name}: {' '.join(map(str, words))}: {done.stderr}"
        return str(done.stdout)
