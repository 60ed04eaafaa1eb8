"""Identify the code that a result comes from: package versions and the git commit of the source."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("zerolm", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy")
OPTIONAL_PACKAGES = ("wandb", "flash-attn")


def versions() -> dict[str, str]:
    """Return {name: version} of Python and the installed packages that influence a result."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit(directory: Path) -> str | None:
    """Return the commit of a source tree, None if git does not track its files.

    Args:
        directory: any directory of the tree.

    Returns:
        The hash, with `+changes` appended if tracked files were modified.
    """
    try:
        _, commit, changes = (
            subprocess.run(
                ["git", "-C", str(directory), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout.strip()
            for arguments in (
                ["ls-files", "--error-unmatch", "."],  # fails in another project's checkout
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "-uno"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")
