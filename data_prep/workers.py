"""An ordered map over worker processes that cannot hang and leaves no process behind.

Each worker has a pipe of its own, whose other end only it holds: the kernel reports its death at
once, even in the middle of a message, and tells a worker in the same way that its parent is gone.
(`ProcessPoolExecutor` shares one pipe, and waits forever for the rest of a message whose sender was
killed.) Knows nothing of documents and tokens.
"""

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from zerolm.errors import ConfigError, ZerolmError

AHEAD_PER_WORKER = 4  # items read but not given out yet, so that one slow item idles nobody
STOP_SECONDS = 5

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    prepare: Callable[[], Callable[[Item], Result]], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    """Yield `prepare()(item)` for every item, in the order of the items.

    `prepare` is sent to every worker and called once there. At most `AHEAD_PER_WORKER` items for
    each worker exist at a time, whether as items or as results.

    Raises:
        ConfigError: as raised in a worker.
        ZerolmError: a worker died.
        RuntimeError: any other exception in a worker, with its traceback.
    """
    workers: list[_Worker] = []
    try:
        for index in range(num_workers):
            workers.append(_Worker(prepare, index))
        yield from _feed(workers, enumerate(items), AHEAD_PER_WORKER * num_workers)
    finally:
        for worker in workers:
            worker.stop()


def _feed(
    workers: list["_Worker"], items: Iterator[tuple[int, Any]], max_ahead: int
) -> Iterator[Any]:
    idle = deque(workers)
    busy: dict[Connection, _Worker] = {}
    ready: deque[tuple[int, Any]] = deque()  # read, and waiting for a worker
    results: dict[int, Any] = {}
    num_read = next_result = 0
    more = True
    while True:
        while ready and idle:  # an idle worker takes its item at once: sending cannot deadlock
            worker = idle.popleft()
            worker.give(*ready.popleft())
            busy[worker.connection] = worker
        if more and len(ready) < len(workers) and num_read - next_result < max_ahead:
            item = next(items, None)
            if item is None:
                more = False
            else:
                ready.append(item)
                num_read += 1
            if idle:
                continue
        reading = more and len(ready) < len(workers) and num_read - next_result < max_ahead
        if not busy and not reading:
            return
        for connection in wait(list(busy), timeout=0 if reading else None):
            assert isinstance(connection, Connection)
            worker = busy.pop(connection)
            results[worker.number] = worker.take()
            idle.append(worker)
        while next_result in results:
            yield results.pop(next_result)
            next_result += 1


class _Worker:
    def __init__(self, prepare: Callable[[], Callable], index: int):
        # spawn, not fork: no copies of the other workers' pipes, of threads, or of CUDA contexts
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, prepare), name=f"worker-{index}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.number = -1

    def give(self, number: int, item: Any) -> None:
        self.number = number
        try:
            self.connection.send(item)
        except OSError as error:
            raise self._died() from error

    def take(self) -> Any:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:  # OSError: in the middle of a message
            raise self._died() from error
        if kind == "refused":
            raise ConfigError(value)
        if kind == "bug":
            raise RuntimeError(f"in a worker process:\n{value}")
        return value

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


def _work(connection: Connection, prepare: Callable[[], Callable]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    function = None
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            function = function or prepare()
            answer = ("done", function(item))
        except ConfigError as error:
            answer = ("refused", error.problems)
        except Exception:
            answer = ("bug", traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:  # the parent is gone
            return
