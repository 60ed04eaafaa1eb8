"""What a process remembers in its modules, and has to forget when it is forked from another.

Everything else in the modules of zerolm is the same in each process of a run, or follows from a
cache's arguments and from files alone. File locks are given back by the fork itself.
"""

from zerolm.checkpoint import snapshot
from zerolm.common import interrupts, store
from zerolm.distributed import process_group
from zerolm.engine import operators
from zerolm.tracking import console_log
from zerolm.watchdog import progress, startup


def reset() -> None:
    """Make this process what a new one would be; call it in a forked rank before anything else."""
    vars(progress.CURRENT).update(vars(progress.Progress()))  # its clock starts now
    startup._ends.clear()
    process_group._stores.clear()
    process_group._first_rank = None
    console_log._log = None
    interrupts._raised = False
    operators._listeners.clear()
    store._SAID.clear()
    snapshot._say_unpinned.cache_clear()
