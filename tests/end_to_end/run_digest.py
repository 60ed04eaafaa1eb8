"""The oracle: everything that training left behind, as figures that two runs can be compared by.

An interrupted run is right when nothing tells it from one that never was: "BIT" in the tests. What
is read here is read from the files, by plain torch, not by the code that wrote or resumes them.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

from zerolm import ledger


def digest(run_dir: Path, ledger_dir: Path | None = None) -> dict[str, Any]:
    """Return what a run has learned, and from what.

    Args:
        run_dir: of a run that has saved a checkpoint.
        ledger_dir: where `ZEROLM_LEDGER` pointed, or None.

    Returns:
        `losses`: {step: train/loss in hex}; `ledger`: {step: sequence numbers}; `progress`: of the
        newest checkpoint's manifest; `tensors`: {file and place: SHA-256, shape and type of a
        tensor, or a number in hex} of that checkpoint's weights and optimizer states.
    """
    newest = newest_checkpoint(run_dir)
    return {
        "losses": losses(run_dir),
        "ledger": ledger.read(ledger_dir) if ledger_dir is not None else {},
        "progress": json.loads((newest / "MANIFEST.json").read_text())["progress"],
        "tensors": tensors(newest),
    }


def differences(run: dict[str, Any], oracle: dict[str, Any]) -> list[str]:
    """Return one line for each thing that tells two digests apart; none: equal in every bit."""
    found = []
    for part in sorted(set(run) | set(oracle)):
        ours, theirs = run.get(part, {}), oracle.get(part, {})
        found += [
            f"{part}: {key}: {ours.get(key, 'absent')}, the oracle has {theirs.get(key, 'absent')}"
            for key in sorted(set(ours) | set(theirs), key=str)
            if ours.get(key) != theirs.get(key)
        ]
    return found


def losses(run_dir: Path) -> dict[int, str]:
    """Return {step: train/loss in hex}; a step that stands there twice is a failure."""
    found: dict[int, str] = {}
    for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/loss" in row:
            loss = row["train/loss"]
            assert row["step"] not in found, f"step {row['step']} is there twice"
            found[row["step"]] = float(math.nan if loss is None else loss).hex()
    return found


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the published checkpoint of the latest step; a directory without manifest is none."""
    published = sorted(Path(run_dir).glob("checkpoints/step-*/MANIFEST.json"))
    assert published, f"{run_dir} has no checkpoint"
    return published[-1].parent


def tensors(checkpoint: Path) -> dict[str, str]:
    """Return a line for each tensor and number in a checkpoint's `.pt` files."""
    found: dict[str, str] = {}
    for path in sorted(checkpoint.rglob("*.pt")):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # DeepSpeed pickles objects of its own; the files are ours
            content = torch.load(path, map_location="cpu", weights_only=False)
        _collect(content, str(path.relative_to(checkpoint)), found)
    assert found, f"{checkpoint} has no tensors"
    return found


def _collect(value: Any, place: str, found: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        sha256 = hashlib.sha256(data.tobytes()).hexdigest()
        found[place] = f"{sha256} {tuple(value.shape)} {value.dtype}"
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in ("ds_config", "param_shapes"):  # the manifest and run.json have these
                _collect(item, f"{place}: {key}", found)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _collect(item, f"{place}: {number}", found)
    elif isinstance(value, (bool, int, float)):
        found[place] = float(value).hex()
