"""The names of all files in a run directory; docs/run_directory.md describes their content.

Every module that reads or writes a run gets its paths from `RunFiles`, and uses this module to
build and parse names of checkpoint directories. Must not depend on the content of files. Standard
library only.
"""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from zerolm.common.files import is_dir

MANIFEST = "MANIFEST.json"  # in each checkpoint, on disk and in object stores
TRACKER_STATE = "run.json"  # in a tracker's directory: identifies the tracker's run to continue
STEP = "step-"
LATEST = "latest"  # in checkpoints/: name of the newest checkpoint, for people and tools
# Prefixes of directories that are not, or no longer, checkpoints of the run:
TEMPORARY = ".tmp-"  # being written or removed
DAMAGED = "damaged-"
ROLLED_BACK = "rolled-back-"
FOREIGN = "foreign-"  # had a checkpoint's name, but does not belong to the run

CHECKPOINT_NAME = re.compile(rf"{STEP}([0-9]{{8}}|[1-9][0-9]{{8,}})")
_ASIDE_NAME = re.compile(
    rf"(?:{DAMAGED}|{ROLLED_BACK}([0-9]{{4,}})-){CHECKPOINT_NAME.pattern}(?:-[0-9]+)?"
)
_ARCHIVE_NAME = re.compile(rf"metrics-{ROLLED_BACK}[0-9]{{4,}}\.jsonl")
_RANK_FILE = re.compile(r"rank-([0-9]{5,})\.(json|stacks\.txt)")


class RunFiles:
    """Paths of the files and directories in a run directory. None of them needs to exist."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = run_dir = Path(run_dir)
        # Written by training and evaluation
        self.record = run_dir / "run.json"
        self.metrics = run_dir / "metrics.jsonl"
        self.events = run_dir / "events.jsonl"
        self.samples = run_dir / "samples.jsonl"
        self.console = run_dir / "rank0.log"
        self.earlier_console = run_dir / "rank0-earlier.log"
        self.evaluation_begun = run_dir / "evaluation_begun.json"
        self.rollbacks = run_dir / "rollbacks.json"
        self.report = run_dir / "report.html"
        self.plot = run_dir / "loss.png"
        self.lock = run_dir / "lock"
        self.memory = run_dir / "memory.json"  # token that names the checkpoints in hosts' memory
        # Written by the supervisor
        self.supervisor = run_dir / "supervisor"  # lock file with the supervisor's host and pid
        self.hostfile = run_dir / "hosts"
        self.configs = run_dir / "configs"
        # Directories
        self.checkpoints = run_dir / "checkpoints"
        self.latest = self.checkpoints / LATEST
        self.ranks = run_dir / "ranks"
        self.profile = run_dir / "profile"
        self.uploads = run_dir / "uploads"
        self.uploads_lock = self.uploads / "lock"

    def checkpoint(self, name: str) -> Path:
        return self.checkpoints / name

    def kept_config(self, setting: str) -> Path:
        """Return the path where the supervisor saves a config file's original content if the file
        changes.
        """
        return self.configs / f"{setting}.json"

    def archived_metrics(self, rollback: int) -> Path:
        """Return the path of the file for metrics of the steps that a rollback discarded."""
        return self.run_dir / f"metrics-{ROLLED_BACK}{rollback:04d}.jsonl"

    def all_archived_metrics(self) -> list[Path]:
        """Return the existing `archived_metrics` files, oldest first."""
        paths = self.run_dir.glob(f"metrics-{ROLLED_BACK}*.jsonl")
        return sorted(path for path in paths if _ARCHIVE_NAME.fullmatch(path.name))

    def outcomes(self, evaluation: str) -> Path:
        """Return the path of the file with an evaluation's newest result for each item."""
        return self.run_dir / f"{evaluation}.json"

    def record_files(self, evaluations: Iterable[str]) -> list[Path]:
        """Return the paths of the files to upload with each checkpoint.

        Any of them may be absent, except archived metrics.

        Args:
            evaluations: names of the evaluations that write `outcomes`.
        """
        return [
            *(self.record, self.rollbacks, self.metrics, self.events, self.samples),
            *map(self.outcomes, evaluations),
            *self.all_archived_metrics(),
        ]

    # ---- Ranks. In the names below, a token identifies one start of the run.

    def heartbeat(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05d}.json"

    def heartbeats(self) -> list[Path]:
        """Return the existing heartbeat files, in rank order."""
        paths = self.ranks.glob("rank-*.json")
        return sorted(path for path in paths if _RANK_FILE.fullmatch(path.name))

    def stacks(self, rank: int) -> Path:
        return self.ranks / f"rank-{rank:05d}.stacks.txt"

    def flight_recorder(self, token: str) -> Path:
        """Return the path prefix of torch's records of collectives, to which torch appends the
        rank.
        """
        return self.ranks / f"flight-recorder-{token}-"

    def flight_recorders(self) -> list[Path]:
        """Return the existing files with records of collectives, from all starts of the run."""
        return sorted(self.ranks.glob("flight-recorder-*"))

    def verdict(self, token: str) -> Path:
        """Return the path of the file that records which rank ended a start of the run, and why."""
        return self.ranks / f"verdict-{token}.json"

    def stop_request(self, token: str) -> Path:
        """Return the path of the file that, if present, asks a start of the run to save and
        stop.
        """
        return self.ranks / f"stop-{token}"

    def stale_rank_files(self, world_size: int) -> list[Path]:
        """Return files from earlier starts that no rank of the new start will overwrite."""
        stale = [*self.ranks.glob("verdict-*"), *self.ranks.glob("stop-*")]
        for path in self.ranks.glob("rank-*"):
            match = _RANK_FILE.fullmatch(path.name)
            if match and int(match[1]) >= world_size:
                stale.append(path)
        return stale

    # ---- Trackers, by name: wandb, tensorboard

    def tracker(self, name: str) -> Path:
        return self.run_dir / name

    def tracker_log(self, name: str) -> Path:
        """Return the path of the log file of a tracker's process."""
        return self.tracker(name) / "mirror.log"

    def tracker_lock(self, name: str) -> Path:
        return self.tracker(name) / "lock"


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint directory, such as step-00001000."""
    return f"{STEP}{step:08d}"


def checkpoint_step(name: str) -> int:
    """Return the step in the name of a checkpoint directory.

    Raises:
        ValueError: `name` is not the name of a checkpoint directory.
    """
    match = CHECKPOINT_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint directory")
    return int(match[1])


def split_step(reference: str | Path) -> tuple[Path, int | None]:
    """Split `RUN@STEP` into run directory and step; return any other reference as (path, None)."""
    match = re.fullmatch(r"(.+)@(?:step-)?([0-9]+)", str(reference))
    if match is None or Path(reference).exists():
        return Path(reference), None
    return Path(match[1]), int(match[2])


def run_of(reference: str | Path) -> tuple[Path, int | None]:
    """Return the run directory and step named by `RUN`, `RUN@STEP` or a checkpoint directory."""
    path, step = split_step(reference)
    if step is None and path.parent.name == "checkpoints":
        with contextlib.suppress(ValueError):
            return path.parent.parent, checkpoint_step(path.name)
    return path, step


# ---- Entries in `checkpoints/`. Names are matched exactly, and links are never followed.


def checkpoint_directories(parent: Path) -> list[Path]:
    """Return the checkpoint directories, recognized by their names and sorted by step."""
    named = [
        path
        for path in parent.glob(f"{STEP}*")
        if CHECKPOINT_NAME.fullmatch(path.name) and _is_directory(path)
    ]
    return sorted(named, key=lambda path: checkpoint_step(path.name))


def unfinished_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the entries whose names mark them as checkpoints being written or removed."""
    return [
        path
        for path in checkpoints.glob(f"{TEMPORARY}*")
        if CHECKPOINT_NAME.fullmatch(path.name.removeprefix(TEMPORARY))
    ]


def rolled_back_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return (rollback number, directory) for each checkpoint that a rollback has renamed."""
    paths = [path for path in checkpoints.glob(f"{ROLLED_BACK}*") if _is_directory(path)]
    matches = [(_ASIDE_NAME.fullmatch(path.name), path) for path in paths]
    return [(int(match[1]), path) for match, path in matches if match]


def traces_of_checkpoints(checkpoints: Path) -> list[str]:
    """Return the names of entries that prove that the run once had a checkpoint."""
    return sorted(
        name
        for name in _names(checkpoints)
        if name == LATEST or CHECKPOINT_NAME.fullmatch(name) or _ASIDE_NAME.fullmatch(name)
    )


def foreign_entries(checkpoints: Path) -> list[str]:
    """Return the names of entries that were not written by a run, such as copies, links or user
    files.
    """
    own = {LATEST, f"{LATEST}.tmp"}
    for name in _names(checkpoints):
        bare = name.removeprefix(TEMPORARY)
        named = CHECKPOINT_NAME.fullmatch(bare) or _ASIDE_NAME.fullmatch(name)
        if name.startswith(FOREIGN) or (named and _is_directory(checkpoints / name)):
            own.add(name)
    return sorted(set(_names(checkpoints)) - own)


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if is_dir(directory) else []


def _is_directory(path: Path) -> bool:
    return is_dir(path) and not path.is_symlink()


def rollback_name(archive: Path) -> str:
    """Return the rollback's name, such as `rolled-back-0001`, given the path of its archived
    metrics.
    """
    return archive.stem.removeprefix("metrics-")
