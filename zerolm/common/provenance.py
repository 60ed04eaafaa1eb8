"""Identifies the code that produced a result: package versions and the source's git commit."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("zerolm", "torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy")
OPTIONAL_PACKAGES = ("wandb", "flash-attn", "flash-attn-3", "flash-attn-4", "triton")
SHOWN_PACKAGES = ("zerolm", "torch", "DeepSpeed", "transformers")  # by `--version`


def versions() -> dict[str, str]:
    """Return {name: version} for Python and the installed packages that influence results."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *OPTIONAL_PACKAGES):
        if (version := installed_version(package)) is not None:
            found[package] = version
    return found


def version_text() -> str:
    """Return the text for `--version`, without importing the packages, which would take seconds."""
    lines = [
        f"{package} {installed_version(package.lower()) or 'is not installed'}"
        for package in SHOWN_PACKAGES
    ]
    return "\n".join([*lines, f"Python {platform.python_version()}"])


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed.

    The metadata is usually in a directory with the package's name. Only if it is not,
    importlib.metadata is imported, which takes 15 ms.
    """
    start, end = re.sub(r"[-_.]+", "_", package) + "-", ".dist-info"
    for directory in filter(os.path.isdir, sys.path):
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(start) and entry.name.endswith(end):
                    metadata = Path(entry.path, "METADATA").read_text(errors="replace")
                    if found := re.search(r"^Version: (\S+)", metadata, re.MULTILINE):
                        return found[1]
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(directory: Path) -> str | None:
    """Return the git commit of a source tree, or None if git does not track its files.

    Args:
        directory: any directory in the tree.

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
                # Fails if the files are only inside another project's checkout.
                ["ls-files", "--error-unmatch", "."],
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "-uno"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changes else "")
