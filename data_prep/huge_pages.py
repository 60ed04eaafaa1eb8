"""Huge pages for the encoders: what they look words up in is a few hundred MB, read at random.

Often Linux gives huge pages to programs that ask for them only, and glibc's malloc asks where
GLIBC_TUNABLES says so, which it reads before a program begins. What gigatoken gains is measured by
`raw-gigatoken-huge` of benchmarks/tokenize_speed.py.
"""

import contextlib
import os
import sys

ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"
VARIABLE, ASKING = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def ask_for_huge_pages() -> None:
    """Start this program again, in the same process, if it has to ask and does not do it yet.

    Whoever has set GLIBC_TUNABLES, to whatever, is left alone.
    """
    with contextlib.suppress(OSError):  # no Linux, or a system that does not let us
        with open(ENABLED, encoding="ascii") as file:
            if "[madvise]" not in file.read() or VARIABLE in os.environ:
                return
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, VARIABLE: ASKING})
