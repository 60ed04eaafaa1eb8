"""The benchmarks: each module or package here is a command; README.md says what it measures."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the repository
