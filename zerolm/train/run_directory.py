"""The run directory: its lock, and `run.json`, which describes the run.

`run.json` is sufficient to repeat the run: `--settings runs/first/run.json`.
"""

import os
import platform
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.files import make_directories, wait_until_visible, write_json
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.provenance import git_commit, versions
from zerolm.data import mixture
from zerolm.distributed import collectives
from zerolm.distributed.collectives import print_safely
from zerolm.distributed.device import driver_version, gpu_library_versions
from zerolm.parts.inheritance import derived_settings
from zerolm.plan.plan import Plan
from zerolm.preflight import model_proof
from zerolm.run_dir.files import RunFiles, foreign_entries


def claim(run_dir: str | Path) -> FileLock:
    """Create the run directory and lock it. Only rank 0 may call this.

    Raises:
        ConfigError: another process is using the directory.
    """
    files = RunFiles(run_dir)
    make_directories(files.checkpoints)
    try:
        lock = FileLock(files.lock)
    except LockTaken as error:
        raise ConfigError(
            f"--run_dir {run_dir}: another run is writing to it now. Stop that run, or give "
            f"another directory."
        ) from error
    if lock.unsupported is not None:
        print_safely(
            f"note: {run_dir}: the file system does not support locks ({lock.unsupported}), so "
            f"nothing prevents a second run from writing here; start only one"
        )
    if foreign := foreign_entries(files.checkpoints):
        print_safely(
            f"note: {files.checkpoints}: contains entries that are not this run's checkpoints: "
            f"{', '.join(foreign[:8])}"
            f"{' ...' if len(foreign) > 8 else ''}. They are left untouched; links are never "
            f"followed"
        )
    return lock


def record(plan: Plan) -> dict[str, Any]:
    """Return the contents of `run.json`, such as resolved settings, configs, data and versions."""
    import psutil

    return {
        **({"branch": plan.branch} if plan.branch is not None else {}),
        "settings": plan.settings.to_json(),
        "derived_settings": derived_settings(plan.settings),
        "model_config": plan.model.config.to_diff_dict(),
        "ds_config": plan.ds.json,
        "data_fingerprint": plan.data_fingerprint,
        "val_fingerprints": [source.fingerprint for source in plan.val_sources],
        **({"initial_weights": plan.initial.record()} if plan.initial else {}),
        "mixture": mixture.record(plan.mixture, plan.source_names),
        "world_size": plan.world_size,
        "zero_stage": plan.ds.zero_stage,
        model_proof.RECORD_KEY: model_proof.proven_with(plan.model.config),
        "versions": versions() | gpu_library_versions() | driver_version(),
        "git_commit": git_commit(Path(__file__).parent),
        "host": platform.node(),
        "host_cores": os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "working_directory": str(Path.cwd()),
        "device": plan.device_name,
        "derived": plan.derived,
    }


def write(run_dir: Path, content: dict[str, Any], rank: int) -> None:
    """Write `run.json`, and check that it is visible on every host. Every rank must call this.

    Raises:
        ConfigError: on every rank, if not all hosts share the directory.
    """
    path = RunFiles(run_dir).record
    if rank == 0:
        write_json(path, content)
    collectives.barrier()  # wait until rank 0 has written
    collectives.require_on_all_ranks(
        wait_until_visible(path),
        f"--run_dir {run_dir}: not visible on every host. Use a file system that all hosts share.",
    )
