"""The run directory: who may write to it, and `run.json`, which says what this run is.

`run.json` holds everything that is needed to run it again: `--settings runs/first/run.json`.
"""

import fcntl
import platform
from pathlib import Path
from typing import Any, TextIO

from zerolm import distributed, mixture
from zerolm.errors import ConfigError
from zerolm.files import write_json
from zerolm.provenance import git_commit, versions

RECORD = "run.json"


def claim(run_dir: str | Path) -> TextIO:
    """Create the run directory and lock it; the lock lasts while the returned file is open.

    Rank 0 alone calls. The lock is the kernel's, so a killed run leaves none behind.

    Raises:
        ConfigError: another process trains into this directory now.
    """
    run_dir = Path(run_dir)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    lock = open(run_dir / "lock", "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"--run_dir {run_dir}: another run is writing to it now. Stop that one, or choose "
            f"another directory."
        ) from error
    except OSError as error:  # Lustre and NFS may be mounted without locks
        print(f"note: {run_dir}: its file system has no locks ({error}); start only one run in it")
    return lock


def record(plan: Any) -> dict[str, Any]:
    """Return the content of `run.json`: resolved settings and configs, data, versions, figures.

    Args:
        plan: what preflight decided.
    """
    return {
        "settings": plan.settings.to_json(),
        "model_config": plan.model_config.to_diff_dict(),
        "ds_config": plan.ds_config,
        "data_fingerprint": plan.data_fingerprint,
        "mixture": mixture.record(plan.mixture, plan.source_names),
        "world_size": plan.world_size,
        "zero_stage": plan.zero_stage,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).parent),
        "host": platform.node(),
        "derived": plan.derived,
    }


def write(run_dir: Path, content: dict[str, Any], rank: int) -> None:
    """Write `run.json`, and make sure that every host sees it. Every rank must call.

    Raises:
        ConfigError: on every rank: a host has another file system there.
    """
    path = run_dir / RECORD
    if rank == 0:
        write_json(path, content)
    distributed.barrier()  # rank 0 has written
    distributed.agree(
        path.is_file(),
        f"--run_dir {run_dir}: not every node sees it. Use a file system that all nodes share.",
    )
