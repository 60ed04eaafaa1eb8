"""A digest of everything that a run has learned, to compare two runs bit for bit.

An interrupted run is correct if its digest equals that of an uninterrupted run. The files are read
with plain torch, not with the code that writes and resumes them.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

from tests.ledger import read_sequences


def digest(run_dir: Path, ledger_dir: Path | None = None) -> dict[str, Any]:
    """Return what a run has learned, and from which sequences.

    Args:
        run_dir: run directory with at least one checkpoint.
        ledger_dir: directory that `ZEROLM_LEDGER` named, or None.

    Returns:
        `losses`: {step: train/loss in hex}; `ledger`: {step: sequence numbers}; `progress`: from
        the newest checkpoint's manifest; `tensors`: {file and key: SHA-256, shape and type of a
        tensor, or a number in hex} for that checkpoint's weights and optimizer states.
    """
    newest = newest_checkpoint(run_dir)
    return {
        "losses": losses(run_dir),
        "ledger": read_sequences(ledger_dir) if ledger_dir is not None else {},
        "progress": json.loads((newest / "MANIFEST.json").read_text())["progress"],
        "tensors": tensors(newest),
    }


def differences(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return one line for each difference of two digests; no line if they are equal."""
    found = []
    for part in sorted(set(run) | set(reference)):
        ours, theirs = run.get(part, {}), reference.get(part, {})
        found += [
            f"{part}: {key}: {ours.get(key, 'absent')}, expected {theirs.get(key, 'absent')}"
            for key in sorted(set(ours) | set(theirs), key=str)
            if ours.get(key) != theirs.get(key)
        ]
    return found


def losses(run_dir: Path) -> dict[int, str]:
    """Return {step: train/loss in hex}; fail if a step was logged twice."""
    found: dict[int, str] = {}
    for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/loss" in row:
            loss = row["train/loss"]
            assert row["step"] not in found, f"step {row['step']} was logged twice"
            found[row["step"]] = float(math.nan if loss is None else loss).hex()
    return found


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint; a directory without a manifest is not a checkpoint."""
    published = sorted(Path(run_dir).glob("checkpoints/step-*/MANIFEST.json"))
    assert published, f"{run_dir} has no checkpoint"
    return published[-1].parent


def tensors(checkpoint: Path) -> dict[str, str]:
    """Return {file and key: digest} for each tensor and number in a checkpoint's `.pt` files."""
    found: dict[str, str] = {}
    for path in sorted(checkpoint.rglob("*.pt")):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # DeepSpeed pickles its own classes; the files are ours
            content = torch.load(path, map_location="cpu", weights_only=False)
        _collect(content, str(path.relative_to(checkpoint)), found)
    assert found, f"{checkpoint} has no tensors"
    return found


def _collect(value: Any, key_path: str, found: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        sha256 = hashlib.sha256(data.tobytes()).hexdigest()
        found[key_path] = f"{sha256} {tuple(value.shape)} {value.dtype}"
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in ("ds_config", "param_shapes"):  # in the manifest and run.json, too
                _collect(item, f"{key_path}: {key}", found)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _collect(item, f"{key_path}: {number}", found)
    elif isinstance(value, (bool, int, float)):
        found[key_path] = float(value).hex()
