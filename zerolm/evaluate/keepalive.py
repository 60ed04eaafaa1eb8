"""Signs of life of the first rank while it alone is at work, and the others wait for it.

lm-eval builds requests, makes ids of texts and scores; a hub answers slowly: minutes in which no
rank takes a step or runs a model. A thread of the first rank says all the while that it is at work:
to the watchdog, and to the other ranks, whose collective would come to its time limit. It does so
for an hour at most: what takes longer is taken for hung. Knows nothing of what is prepared.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zerolm.distributed.collectives import broadcast_object

AT_WORK = "at work"  # what the first rank sends the others instead of what they wait for
BEAT_SECONDS = 2.0
MESSAGE_SECONDS = 60.0  # a process group's limit is half an hour, or ten minutes
LONGEST_SECONDS = 3600.0


class Patience:
    """A context in which the first rank may take its time. It alone uses it.

    Args:
        beat: says to the watchdog that this rank is at work; called from a thread.
        others: whether there are any, each of them in `hear`.
        device: of torch, whose collectives go through it.
        send: sends the others `AT_WORK`.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        others: bool,
        device: Any = "cpu",
        send: Callable[[Any], Any] = broadcast_object,
    ):
        self._beat, self._others, self._device, self._send = beat, others, str(device), send
        self._began = time.monotonic()
        self._lock = threading.Lock()  # who has it may send
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._work, name="patience", daemon=True)

    def __enter__(self) -> "Patience":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._quit.set()
        self._thread.join()  # from here on only the main thread sends

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let all ranks compute: signs of life are then theirs to give. Restarts the hour."""
        with self._lock:
            try:
                yield
            except BaseException:
                if self._others:
                    self._quit.set()  # they may be in another collective
                raise
            finally:
                self._began = time.monotonic()

    def _work(self) -> None:
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.set_device(self._device)  # a thread begins with the first one
        sent = time.monotonic()
        while not self._quit.wait(BEAT_SECONDS):
            with self._lock:
                now = time.monotonic()
                if self._quit.is_set():
                    return
                if now - self._began > LONGEST_SECONDS:
                    continue
                self._beat()
                if self._others and now - sent > MESSAGE_SECONDS:
                    self._send(AT_WORK)
                    sent = now


def hear(beat: Callable[[], None], receive: Callable[[Any], Any] = broadcast_object) -> Any:
    """Return what the first rank has to say once it is ready. Every other rank calls.

    Args:
        beat: called for each sign of life.
    """
    while isinstance(message := receive(None), str) and message == AT_WORK:
        beat()
    return message
