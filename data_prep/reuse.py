"""What a command may take over from the one before that did not end: only what is whole.

`phases` compares the sizes of files; here they are read, several at a time.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from data_prep.phases import Phase, Record, completed

CHECKING_THREADS = 4


def keep_whole(phase: Phase, is_whole: Callable[[int, Record], bool]) -> list[int]:
    """Return the tasks whose records may be used, and let all others run again.

    Args:
        is_whole: reads what a task has written; called from several threads.
    """

    def check(task: int, record: Record | None) -> bool:
        if record is None:
            return False
        if is_whole(task, record):
            return True
        phase.path(task).unlink()
        return False

    records = completed(phase)
    if not any(records):
        return []
    with ThreadPoolExecutor(CHECKING_THREADS) as threads:
        kept = list(threads.map(check, range(phase.num_tasks), records))
    return [task for task, whole in enumerate(kept) if whole]
