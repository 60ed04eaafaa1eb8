"""Makes glibc's malloc keep freed memory on CPU runs, to avoid page faults in every step.

glibc maps each allocation above 32 MiB separately, and the kernel zeroes its pages on first touch.
For logits and tensors of their size that took a sixth of a step's CPU time (docs/speed.md). A
process that keeps freed memory stays at its peak between steps, which it reaches in every step
anyway.

Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

import ctypes
import platform

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # malloc.h
MMAP_THRESHOLD_BYTES = 1 << 30  # larger allocations are still returned when they are freed
TRIM_THRESHOLD_BYTES = (1 << 31) - 1  # the maximum of an int


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, for CPU runs. Return whether it does."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) == 1
    return mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES) == 1 and kept
