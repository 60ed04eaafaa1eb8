"""What a process of a run does before it imports torch, which takes seconds.

Each rank that was started by itself calls both functions. A process that forks ranks after its
imports calls `prepare_host` once, and each rank calls `become_rank`. Imports inside functions, so
that even an interrupted import ends without a traceback.
"""

from collections.abc import MutableMapping

from zerolm.common import interrupts


def become_rank(environment: MutableMapping[str, str]) -> None:
    """End quietly on Ctrl-C until the run handles signals, and set the variables that number ranks.

    May be called after a fork. `ranks.adopt` says which variables it sets.
    """
    interrupts.end_on_interrupt()
    from zerolm.distributed import ranks

    ranks.adopt(environment)


def prepare_host(environment: MutableMapping[str, str]) -> None:
    """Set the variables that libraries and other processes of this host read.

    Call this before torch is imported, with the number of this host's ranks in the environment: a
    launcher sets it, or `become_rank`.
    """
    from zerolm.common import machine, shipped

    shipped.shield(environment)
    machine.share_cores(environment)
    machine.keep_operators(environment)
