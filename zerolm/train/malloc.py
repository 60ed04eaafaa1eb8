"""Memory that a CPU run gives back and takes again in every step: let the process keep it.

glibc maps an allocation of more than 32 MiB anew each time, and the kernel fills its pages with
zeros as they are touched: for the logits of a micro-batch and all that is made of them that was a
sixth of the CPU time of a step (docs/speed.md). The process is told to keep what it has freed, so
that it stays at its peak between steps, which it reaches in every step anyway.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

import ctypes
import platform

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # malloc.h
LARGEST_MAPPED = 1 << 30  # allocations above it are still given back at once
NEVER = (1 << 31) - 1  # the most that an int says: 2 GiB of free memory at the end of the heap


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep what is freed; return whether it will. For CPU runs."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = mallopt(MMAP_THRESHOLD, LARGEST_MAPPED) == 1
    return mallopt(TRIM_THRESHOLD, NEVER) == 1 and kept
