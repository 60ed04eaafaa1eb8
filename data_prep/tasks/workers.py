"""An ordered map over worker processes that cannot hang and leaves no process behind.

Each worker has a pipe of its own, whose other end only it holds: the kernel reports its death at
once, even in the middle of a message, and tells a worker in the same way that its parent is gone.
(`ProcessPoolExecutor` shares one pipe, and waits forever for the rest of a message whose sender was
killed.) Knows nothing of documents and tokens.

A process of one thread is copied (fork): its workers have at once what it has imported and loaded.
One that has threads cannot be copied, since what they hold locked would stay locked in the copy:
its workers are new processes (spawn).
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

from zerolm.errors import ConfigError, ZerolmError

AHEAD_PER_WORKER = 6  # items between reading and yielding, so that one slow item idles nobody
GIVEN_PER_WORKER = 2  # one at work and one at hand: a worker never waits for this process's turn
STOP_SECONDS = 5
ENDING_SECONDS = 0.005  # for which a thread that was joined may be there still

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    prepare: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    num_workers: int,
    *,
    ahead_per_worker: int = AHEAD_PER_WORKER,
    given_per_worker: int = GIVEN_PER_WORKER,
    on_start: Callable[[], object] | None = None,
) -> Generator[Result, None, None]:
    """Yield `prepare()(item)` for every item, in the order of the items.

    `prepare` is sent to every worker and called once there. At most `ahead_per_worker` items for
    each worker exist at a time, whether as items or as results. Items that take minutes want a
    `given_per_worker` of 1, so that no worker keeps one waiting that another is free for.
    `on_start` is called when all workers are there: threads that begin then cannot hinder them.

    Raises:
        ConfigError, ZerolmError, OSError: as raised in a worker.
        ZerolmError: a worker died.
        RuntimeError: any other exception in a worker, with its traceback.
    """
    workers: list[_Worker] = []
    try:
        for index in range(num_workers):
            workers.append(_Worker(prepare, index))
        if on_start is not None:
            on_start()
        max_ahead = ahead_per_worker * num_workers
        yield from _feed(workers, enumerate(items), max_ahead, given_per_worker)
    finally:
        for worker in workers:
            worker.stop()


def _feed(
    workers: list["_Worker"],
    items: Iterator[tuple[int, Any]],
    max_ahead: int,
    given_per_worker: int,
) -> Iterator[Any]:
    ready: deque[tuple[int, Any]] = deque()  # read, and not given to a worker yet
    results: dict[int, Any] = {}
    num_read = next_result = 0
    more = True
    while True:
        least = min(workers, key=lambda worker: len(worker.given))
        while ready and len(least.given) < given_per_worker:
            least.give(*ready.popleft())
            least = min(workers, key=lambda worker: len(worker.given))
        reading = more and len(ready) < len(workers) and num_read - next_result < max_ahead
        if reading:
            item = next(items, None)
            if item is None:
                more = False
            else:
                ready.append(item)
                num_read += 1
        busy = {worker.connection: worker for worker in workers if worker.given}
        if not busy and not ready and not more:
            return
        for connection in wait(list(busy), timeout=0 if reading else None):
            assert isinstance(connection, Connection)
            number, result = busy[connection].take()
            results[number] = result
        while next_result in results:
            yield results.pop(next_result)
            next_result += 1


class _Worker:
    def __init__(self, prepare: Callable[[], Callable], index: int):
        copied = _has_one_thread()
        context: Any = multiprocessing.get_context("fork" if copied else "spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, prepare, copied), name=f"worker-{index}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.given: deque[int] = deque()  # numbers of the items whose results are to come

    def give(self, number: int, item: Any) -> None:
        self.given.append(number)
        try:
            self.connection.send(item)
        except OSError as error:
            raise self._died() from error

    def take(self) -> tuple[int, Any]:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:  # OSError: in the middle of a message
            raise self._died() from error
        if kind == "refused":
            raise ConfigError(value)
        if kind == "failed":
            raise ZerolmError(value)
        if kind == "system":
            raise OSError(*value)
        if kind == "bug":
            raise RuntimeError(f"in a worker process:\n{value}")
        return self.given.popleft(), value

    def _died(self) -> ZerolmError:
        self.process.join(STOP_SECONDS)
        code = self.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return ZerolmError(
            f"{self.process.name} (pid {self.process.pid}) {how}. After SIGKILL, look for the "
            f"kernel's out-of-memory killer, and start again with fewer --workers."
        )

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _has_one_thread() -> bool:
    """Say whether this process has no thread but this one, those of libraries counted."""
    try:
        for _ in range(2):
            if len(list(Path("/proc/self/task").iterdir())) == 1:
                return True
            time.sleep(ENDING_SECONDS)
    except OSError:  # no Linux
        pass
    return False


def _drop_inherited(connection: Connection) -> None:
    """Let go of what a copy of the parent has open: its locks, and its ends of workers' pipes.

    The numbers stay taken, since objects of the parent that are here too may close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in (connection.fileno(), nothing):
            with contextlib.suppress(OSError):  # the one of the listing is closed by now
                os.fstat(number)
                os.dup2(nothing, number)


def _work(connection: Connection, prepare: Callable[[], Callable], copied: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if copied:
        gc.freeze()  # what the parent has made is not looked through, and so stays shared
        _drop_inherited(connection)
    # A thread receives, whatever this one does: the parent that sends can never wait for a worker
    # that waits, with a long answer, for the parent.
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
        except OSError as error:  # a full disk, for example
            answer = ("system", (error.errno, error.strerror, error.filename))
        except Exception:
            answer = ("bug", traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:  # the parent is gone
            return


def _receive(connection: Connection, items: queue.SimpleQueue) -> None:
    try:
        while True:
            items.put(connection.recv())
    except (EOFError, OSError):  # nobody waits for an answer: leave even in the middle of an item
        os._exit(0)
