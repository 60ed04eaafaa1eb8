"""The benchmarks: a module or a package here is a command; README.md says what each measures."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the repository
