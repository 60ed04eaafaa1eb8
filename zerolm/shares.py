"""Splitting a number into shares. Pure."""

from collections.abc import Sequence


def split_evenly(total: int, available: Sequence[int]) -> list[int]:
    """Split a number into parts as even as their caps allow; the largest caps have the rest."""
    parts = [0] * len(available)
    smallest_first = sorted(range(len(available)), key=lambda index: (available[index], -index))
    for done, index in enumerate(smallest_first):
        parts[index] = min(available[index], total // (len(available) - done))
        total -= parts[index]
    return parts
