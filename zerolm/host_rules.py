"""What the machine and the launcher say of a run: how many ranks, on which device, and what is
wrong with them. Knows nothing of the model and the data.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerolm import machine, resources
from zerolm.errors import Findings
from zerolm.settings import Settings

NO_DEVICE = machine.Device("cpu", None, True)


class Host(NamedTuple):
    """What a run has: ranks in all, and the device of this one.

    Attributes:
        device: its kind is `absent` when the run's devices are not here.
    """

    world_size: int
    device: machine.Device


def look(
    settings: Settings, argv: Sequence[str], environment: Mapping[str, str], found: Findings
) -> Host:
    """Look at the launcher's environment, at the device, and at what the host has for the run.

    Args:
        argv: our own flags.
        environment: of the launcher: `WORLD_SIZE`, `LOCAL_RANK`, ...
        found: gets what is wrong.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        value = environment.get(name, "1" if name == "WORLD_SIZE" else "0")
        if not value.isdigit() or (name == "WORLD_SIZE" and value == "0"):
            found.problems.append(
                f"environment: {name}: {value!r}, must be a whole number. Start the run with "
                f"deepspeed, or unset it."
            )
            return Host(1, NO_DEVICE)
    device = machine.local_device(environment, found.problems)
    if settings.check and settings.world_size:
        if not device.is_gpu:
            device = machine.Device("absent", machine.ASSUMED_DEVICE_BYTES, True)
            gibibytes = machine.ASSUMED_DEVICE_BYTES >> 30
            found.notices.append(
                f"the devices of this run are not here: {gibibytes} GiB each are assumed"
            )
        return Host(settings.world_size, device)
    problem = machine.launcher_problem(argv, environment)
    if problem:
        found.problems.append(problem)
    _look_at_builds(environment, found)
    _look_at_what_ranks_share(environment, found)
    _look_at_trackers(settings, environment, found)
    return Host(int(environment.get("WORLD_SIZE", 1)), device)


def _look_at_builds(environment: Mapping[str, str], found: Findings) -> None:
    """Look for locks of operators that are being built, or were when the build was killed."""
    stale, fresh = machine.build_locks(environment)
    found.problems += [
        f"{lock}: left by a build that was killed: every rank would wait for it forever. Delete it."
        for lock in stale
    ]
    found.notices += [
        f"{lock}: another process builds an operator; this run waits for it. If there is no "
        f"such process, stop this run and delete the lock"
        for lock in fresh
    ]


def _look_at_what_ranks_share(environment: Mapping[str, str], found: Findings) -> None:
    """Look at what the ranks of this host share; the other hosts' ranks look at theirs."""
    ranks = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "1")
    shared = resources.shared_memory()
    if shared is not None and ranks.isdigit():
        problem = resources.shared_memory_problem(shared[0], int(ranks))
        found.notices += [problem] if problem else []
    port = environment.get("MASTER_PORT", "")
    # Where an agent of torchrun holds the store, the port is rightly in use.
    own = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    if port.isdigit() and environment.get("RANK") == "0" and own:
        problem = resources.port_problem(int(port))
        found.problems += [f"environment: MASTER_PORT: {problem}"] if problem else []


def _look_at_trackers(settings: Settings, environment: Mapping[str, str], found: Findings) -> None:
    """Look for the account and the package that the trackers need."""
    if settings.wandb == "online" and not machine.has_wandb_key(environment):
        found.problems.append(
            f"{settings.where('wandb')}: online, but no key is configured. Run wandb login, "
            f"set WANDB_API_KEY, or use --wandb offline."
        )
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        found.problems.append(
            f"{settings.where('tensorboard')}: true, needs the package tensorboard. Install "
            f"it with pip install 'zerolm[tensorboard]', or leave the flag out."
        )
