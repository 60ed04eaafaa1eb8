"""The console script `zerolm`: Ctrl-C ends it without a traceback, also while it imports."""

import os
import sys

from zerolm.common import processes


def console_script() -> int:
    processes.end_on_interrupt()
    from zerolm.__main__ import main
    from zerolm.common.shipped import shield

    shield(os.environ)
    return main(sys.argv[1:], "zerolm")
