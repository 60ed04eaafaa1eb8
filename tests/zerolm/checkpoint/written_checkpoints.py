"""Small checkpoints, published as the writer publishes them."""

from pathlib import Path

import xxhash

from tests.manifests import WRITTEN
from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.manifest import (
    FORMAT,
    VERSION,
    Progress,
)
from zerolm.checkpoint.rotation import Retention, delete_own, rotate
from zerolm.common.files import sha256_file
from zerolm.ds_config import topology
from zerolm.ds_config.profile import Profile
from zerolm.run_dir.files import checkpoint_name

FILES = ("model.pt", "optimizer.pt")
ADAMW = Profile.parse({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}})


def fill(run_dir: Path, step: int, tokens: int = 0) -> tuple[Path, dict]:
    """Write a temporary directory with two files; return it and its manifest."""
    temporary = run_dir / "checkpoints" / f".tmp-{checkpoint_name(step)}"
    temporary.mkdir(parents=True)
    files = []
    for name in FILES:
        (temporary / name).write_bytes(content := f"{name} of {step}".encode())
        files.append({"file": name, "size_bytes": len(content)})
    files[0]["sha256"] = sha256_file(temporary / FILES[0])  # as earlier releases did
    files[1] |= {"xxh3_128": xxhash.xxh3_128_hexdigest(content), "rank": 1}
    return temporary, {
        "format": FORMAT,
        "version": VERSION,
        **WRITTEN,
        "world_size": 2,
        "zero_stage": 2,
        "optimizer": topology.optimizer_kind(ADAMW),
        "progress": vars(Progress(step=step, position=8 * step, tokens=tokens)),
        "files": files,
    }


def write(run_dir: Path, step: int, retention: Retention | None = None, **more) -> Path:
    """Publish a checkpoint as the writer does."""
    final = publish(*fill(run_dir, step, more.pop("tokens", 0)))
    retired, _ = rotate(final, retention or Retention(last=99), **more)
    delete_own(retired, FILES)
    return final


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())
