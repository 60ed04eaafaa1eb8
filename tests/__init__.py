"""The tests, in a tree that mirrors the source tree."""

from pathlib import Path

ROOT = Path(__file__).parent.parent  # the repository
