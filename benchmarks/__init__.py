"""The benchmarks: each module or package here is a command; README.md says what it measures."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the repository
SETUP = "bash launch/setup.sh dev"


def require(*modules: str, install: str = SETUP) -> None:
    """End with one line if a module of another package is absent, before anything is measured."""
    if absent := [name for name in modules if importlib.util.find_spec(name) is None]:
        sys.exit(f"this benchmark needs {', '.join(absent)}: {install}")
