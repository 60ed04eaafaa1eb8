"""Threads that fetch what was asked for first, first; they keep no process from ending."""

import queue
import threading
import weakref
from collections.abc import Callable

THREADS = 16  # a store answers after tens of milliseconds: 16 x 64 KiB / 50 ms is 20 MB/s


class Arrival:
    """Some bytes that are on their way, or here; `first` is the block that they begin with."""

    def __init__(self, fetch: Callable[[], bytes], first: int):
        self.first = first
        self._fetch, self._done = fetch, threading.Event()
        self._content: bytes | None = None
        self._error: BaseException | None = None
        self._begun = threading.Lock()

    def result(self) -> bytes:
        """Wait for the bytes; fetch them here if nobody has begun to.

        Raises:
            Whatever fetching raised.
        """
        self.come()
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._content is not None
        return self._content

    def come(self) -> None:
        """Fetch the bytes, unless somebody does already."""
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._content = self._fetch()
        except BaseException as error:
            self._error = error
        self._done.set()


class RangeThreads:
    """A queue of arrivals and the threads that work on it, which start with the first one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[weakref.ref[Arrival]] = queue.SimpleQueue()
        self._started = False
        self._working: set[int] = set()  # threads that fetch now

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return self._queue.empty() and not self._working

    def submit(self, arrival: Arrival) -> None:
        """Have it fetched, unless everybody has let go of it by then."""
        if not self._started:
            self._started = True
            for _ in range(THREADS):
                threading.Thread(target=self._work, daemon=True, name="ranges").start()
        self._queue.put(weakref.ref(arrival))

    def _work(self) -> None:
        while True:
            arrival = self._queue.get()()
            if arrival is not None:
                self._working.add(threading.get_ident())
                arrival.come()
                self._working.discard(threading.get_ident())
            arrival = None
