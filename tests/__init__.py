"""The tests, in a tree that mirrors the source tree."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent  # the repository


@cache
def tracked(*patterns: str) -> tuple[Path, ...]:
    """Return the project's files that match, sorted: `docs/*.md`, `zerolm/**/*.py`.

    Those that git tracks, so that no stray file in a checkout is tested; without git all of them.
    """
    command = ["git", "ls-files", "-z", "--cached", "--", *(f":(glob){each}" for each in patterns)]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:  # no git
        names = ""
    else:
        names = listed.stdout  # empty in a directory that is not a checkout
    found = {ROOT / name for name in names.split("\0") if name}
    found = found or {
        path for each in patterns for path in ROOT.glob(re.sub(r"\*\*$", "**/*", each))
    }
    return tuple(sorted(path for path in found if path.is_file()))
