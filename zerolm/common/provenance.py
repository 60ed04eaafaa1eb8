"""Which code a result comes from: versions of packages, the commit of this one. Imports nothing."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("zerolm", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy")
OPTIONAL_PACKAGES = ("wandb", "flash-attn")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, absent packages left out."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(directory: Path) -> str | None:
    """Return the commit of a source tree, with `+changes` when files differ; None outside git."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(directory), *words],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")
