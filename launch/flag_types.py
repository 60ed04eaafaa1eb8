"""Types of command-line flags, for argparse."""

import argparse

from zerolm.values import CONVERTERS


def duration(text: str) -> float:
    """Read `3h50m`, in seconds."""
    try:
        return CONVERTERS["duration"](text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Read a whole number of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def count_from_zero(text: str) -> int:
    """Read a whole number of 0 or more."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)
