"""Published checkpoints and runs without training, for the tests of uploads and restores."""

import json
import random
from pathlib import Path

from tests.manifests import WRITTEN
from zerolm.checkpoint import directory as checkpoint_directory
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress
from zerolm.common.files import sha256_file
from zerolm.run_dir.files import checkpoint_name


def publish(run_dir: Path, step: int, size: int = 1000, **progress: int) -> Path:
    """Publish a checkpoint of two files of `size` random bytes, and log its step."""
    temporary = run_dir / "checkpoints" / f".tmp-{checkpoint_name(step)}"
    temporary.mkdir(parents=True)
    files = []
    for name in ("model.pt", "optimizer.pt"):
        path = temporary / name
        path.write_bytes(random.randbytes(size))
        files.append({"file": name, "size_bytes": size, "sha256": sha256_file(path)})
    manifest = {
        **WRITTEN,
        "format": FORMAT,
        "version": VERSION,
        "world_size": 2,
        "zero_stage": 2,
        "progress": vars(Progress(step=step, position=8 * step, **progress)),
        "files": files,
    }
    (run_dir / "run.json").write_text(json.dumps({"settings": {"seed": step}}))
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "tokens": step, "train/loss": 1 / step}) + "\n")
    return checkpoint_directory.publish(temporary, manifest)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def events(run_dir: Path, name: str) -> list[dict]:
    path = run_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]
