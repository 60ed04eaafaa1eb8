"""An ordered map over worker processes; it cannot hang, and it leaves no process behind.

Each worker has its own pipe, and only that worker holds the other end. Therefore the kernel
immediately reports a worker's death, even in the middle of a message, and a parent's death to its
workers. (`ProcessPoolExecutor` shares one pipe, and waits forever for the rest of a message whose
sender was killed.)

A single-threaded process is forked, so workers inherit everything that it has imported and loaded.
A process with several threads cannot be forked safely, because locks held by other threads would
stay locked in the copy. Its workers are spawned instead.
"""

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from zerolm.common.errors import ConfigError, ZerolmError

MAX_AHEAD_PER_WORKER = (
    6  # items between reading and yielding, so that a slow item does not block other workers
)
STOP_SECONDS = 5
JOINED_THREAD_SECONDS = 0.005  # seconds for which a joined thread may still be listed

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    prepare: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    num_workers: int,
    *,
    ahead_per_worker: int = MAX_AHEAD_PER_WORKER,
    on_start: Callable[[], object] | None = None,
) -> Generator[Result, None, None]:
    """Yield `prepare()(item)` for every item, in the order of the items.

    Args:
        prepare: function that is sent to every worker and called once in each.
        ahead_per_worker: maximum number of items and results in flight per worker.
        on_start: called when all workers have started, so threads that this function starts do not
            prevent forking.

    Raises:
        ConfigError, ZerolmError, OSError: as raised in a worker.
        RuntimeError: any other exception in a worker; the message contains the worker's traceback.
    """
    workers: list[_Worker] = []
    try:
        for index in range(num_workers):
            workers.append(_Worker(prepare, index))
        if on_start is not None:
            on_start()
        max_ahead = ahead_per_worker * num_workers
        yield from _schedule(workers, enumerate(items), max_ahead)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _schedule(
    workers: list["_Worker"], items: Iterator[tuple[int, Any]], max_ahead: int
) -> Iterator[Any]:
    idle, busy = deque(workers), dict[Any, _Worker]()
    ready: deque[tuple[int, Any]] = deque()  # items read, but not yet sent to a worker
    results: dict[int, Any] = {}
    num_read = next_result = 0
    has_more = True
    while True:
        while ready and idle:
            worker = idle.popleft()
            worker.send(*ready.popleft())
            busy[worker.connection] = worker
        can_read = has_more and len(ready) < len(workers) and num_read - next_result < max_ahead
        if can_read:
            item = next(items, None)
            if item is None:
                has_more = False
            else:
                ready.append(item)
                num_read += 1
        if not has_more and not ready:
            while idle:  # idle workers exit and release their memory while others are still working
                idle.popleft().connection.close()
        if not busy and not ready and not has_more:
            return
        for connection in wait(list(busy), timeout=0 if can_read else None):
            worker = busy.pop(connection)
            results[worker.number] = worker.receive()
            idle.append(worker)
        while next_result in results:
            yield results.pop(next_result)
            next_result += 1


class _Worker:
    """The parent's handle to a worker process."""

    def __init__(self, prepare: Callable[[], Callable], index: int):
        forked = _has_one_thread()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(
            target=_work,
            args=(child_connection, prepare, forked),
            name=f"worker-{index}",
            daemon=True,
        )
        self.process.start()
        child_connection.close()
        self.number = -1  # index of the item being processed

    def send(self, number: int, item: Any) -> None:
        self.number = number
        try:
            self.connection.send(item)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> Any:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:  # OSError: the message was incomplete
            raise self._death() from error
        if kind == "refused":
            raise ConfigError(value)
        if kind == "failed":
            raise ZerolmError(value)
        if kind == "system":
            raise OSError(*value)
        if kind == "bug":
            raise RuntimeError(f"in a worker process:\n{value}")
        return value

    def _death(self) -> ZerolmError:
        self.process.join(STOP_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
        else:
            cause = f"ended with exit code {code}"
        return ZerolmError(
            f"{self.process.name} (pid {self.process.pid}) {cause}. After SIGKILL, look for the "
            f"kernel's out-of-memory killer, and run the command again with fewer --workers."
        )

    def terminate(self) -> None:
        self.connection.close()
        self.process.terminate()

    def join(self) -> None:
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _has_one_thread() -> bool:
    """Return whether the process has no threads other than this one, counting library threads."""
    try:
        for _ in range(2):
            if len(list(Path("/proc/self/task").iterdir())) == 1:
                return True
            time.sleep(JOINED_THREAD_SECONDS)
    except OSError:  # not Linux
        pass
    return False


def _drop_inherited(connection: Connection) -> None:
    """Close the files inherited from the parent: locks, and the parent's ends of workers' pipes.

    The descriptors are redirected to /dev/null rather than freed, because inherited objects may
    still close them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in (connection.fileno(), null):
            with contextlib.suppress(OSError):  # the listing's own descriptor is already closed
                os.fstat(number)
                os.dup2(null, number)


def _work(connection: Connection, prepare: Callable[[], Callable], forked: bool) -> None:
    """Main function of a worker: answer each item with (kind, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if forked:
        gc.freeze()  # otherwise, garbage collection would cause the parent's memory to be copied
        _drop_inherited(connection)
    # A thread detects that the parent has exited, even while an item is being processed.
    items: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, items), daemon=True).start()
    function = None
    while True:
        item = items.get()
        try:
            function = function or prepare()
            answer = ("done", function(item))
        except ConfigError as error:
            answer = ("refused", error.problems)
        except ZerolmError as error:
            answer = ("failed", str(error))
        except OSError as error:  # such as a full disk
            answer = ("system", (error.errno, error.strerror, error.filename))
        except Exception:
            answer = ("bug", traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:  # the parent has ended
            return


def _receive(connection: Connection, items: queue.SimpleQueue) -> None:
    try:
        while True:
            items.put(connection.recv())
    except (EOFError, OSError):  # the parent has exited, so exit even while processing an item
        os._exit(0)
