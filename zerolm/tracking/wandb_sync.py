"""Make W&B runs from a run directory, whatever W&B has got: `python -m zerolm wandb-sync RUN`.

One W&B run has `metrics.jsonl`, with checkpoints as references and samples; what each rollback went
back over is a run of its own, in the same group. The run may be going on.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zerolm.errors import ConfigError, ZerolmError
from zerolm.machine import has_wandb_key
from zerolm.mirror import Tail
from zerolm.wandb_tracker import MEMORY, Identity, WandbTracker, close, identity, mode_of


def wandb_sync(
    run_dir: Path,
    *,
    mode: str = "auto",
    project: str | None = None,
    entity: str | None = None,
    same_id: bool = False,
    say: Callable[[str], object] = print,
) -> list[str]:
    """Send a run directory to W&B as it is now.

    Args:
        mode: auto, online or offline.
        project, entity: instead of those in run.json.
        same_id: take the id of the run's own W&B run, which is overwritten over there.

    Returns:
        The ids of the W&B runs.

    Raises:
        ConfigError: this is not a run directory; online without a key; the id is in use.
        ZerolmError: W&B failed.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "run.json").is_file():
        raise ConfigError(f"{run_dir}: no run.json in it, so this is not a run directory.")
    if mode == "online" and not has_wandb_key():
        raise ConfigError(
            "--mode: online, but no key is configured. Run wandb login, set WANDB_API_KEY, or use "
            "--mode offline."
        )
    settings = json.loads((run_dir / "run.json").read_text())["settings"]
    own_id = uuid.uuid4().hex[:8]
    if same_id:
        memory = run_dir / "wandb" / MEMORY
        if not memory.is_file():
            raise ConfigError(f"--same_id: {memory} is not there: the run has no W&B run yet.")
        with open(run_dir / "wandb" / "lock", "a") as lock:  # NFS locks only what may be written
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"--same_id: {run_dir} is going on and writes to that W&B run. Wait for its "
                    f"end, or leave --same_id out."
                ) from error
            except OSError:  # a file system without locks
                pass
        own_id = json.loads(memory.read_text())["id"]

    def named(suffix: str) -> Identity:
        name = identity(run_dir, settings, suffix)
        return replace(
            name,
            mode=mode_of(mode),
            project=project or name.project,
            entity=entity or name.entity,
        )

    parts = [("", "metrics.jsonl", own_id)]
    for path in sorted(run_dir.glob("metrics-rolled-back-*.jsonl")):
        suffix = path.stem.removeprefix("metrics")
        parts.append((suffix, path.name, f"{own_id}{suffix}"))
    for suffix, file, run_id in parts:
        try:
            _send(run_dir, file, named(suffix), run_id, whole=not suffix, say=say)
        except Exception as error:  # whatever of network, key or disk W&B finds wanting
            close()
            reason = " ".join(str(error).split())[:300]
            raise ZerolmError(
                f"{run_dir / file}: W&B did not take it: {reason}. Try again, or write it into "
                f"the run directory with --mode offline."
            ) from error
    return [run_id for _, _, run_id in parts]


def _send(
    run_dir: Path, file: str, name: Identity, run_id: str, whole: bool, say: Callable[[str], object]
) -> None:
    """Make one W&B run of one file of metrics; `whole`: with all else that W&B gets."""
    os.environ["WANDB_MODE"] = name.mode
    target = WandbTracker(run_dir, fresh=name, fresh_id=run_id)
    target.open()
    rows = Tail(run_dir / file).read()
    if whole:
        target.samples(Tail(run_dir / "samples.jsonl").read())
    for row in rows:
        if target.wants(row):
            target.log(row)
    if whole:
        for event in Tail(run_dir / "events.jsonl").read():
            target.event(event)
    target.finish(0)
    say(f"{name.name} ({run_id}): {len(rows)} rows of {file}, {target.where}")
