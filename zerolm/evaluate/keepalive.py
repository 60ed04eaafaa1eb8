"""`KeepAlive`: makes rank 0 signal progress while it works alone and the other ranks wait.

While lm-eval builds requests, tokenizes or scores, or a hub answers slowly, no rank may take a
step or run the model for minutes. Meanwhile a thread on rank 0 signals progress to the watchdog
and to the other ranks, which would otherwise appear to hang in their collective. The thread stops
after an hour, so a hang of rank 0 is still detected. Must not depend on the kind of work that rank
0 does.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zerolm.distributed.collectives import broadcast_object

STILL_WORKING = "still working"  # sent to the other ranks in place of the result
TICK_SECONDS = 2.0
MESSAGE_SECONDS = 60.0  # interval of the messages to the other ranks
MAX_SECONDS = 3600.0


class KeepAlive:
    """A context in which rank 0 may work for a long time while the other ranks wait in `receive`.

    Used only on rank 0.

    Args:
        tick: signals this rank's progress to the watchdog; called from a thread.
        send: sends `STILL_WORKING` to the other ranks.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        has_peers: bool,
        device: Any = "cpu",
        send: Callable[[Any], Any] = broadcast_object,
    ):
        self._tick, self._has_peers = tick, has_peers
        self._device, self._send = str(device), send
        self._started_at = time.monotonic()
        self._lock = threading.Lock()  # only its holder may send
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepalive", daemon=True)

    def __enter__(self) -> "KeepAlive":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._quit.set()
        self._thread.join()  # from here on, only the main thread sends

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the messages while all ranks compute and signal their own progress.

        Restarts the one-hour limit.
        """
        with self._lock:
            try:
                yield
            except BaseException:
                if self._has_peers:
                    self._quit.set()  # the peers may be in another collective
                raise
            finally:
                self._started_at = time.monotonic()

    def _run(self) -> None:
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.set_device(self._device)  # a new thread starts on device 0
        sent_at = time.monotonic()
        while not self._quit.wait(TICK_SECONDS):
            with self._lock:
                now = time.monotonic()
                if self._quit.is_set():
                    return
                if now - self._started_at > MAX_SECONDS:
                    continue
                self._tick()
                if self._has_peers and now - sent_at > MESSAGE_SECONDS:
                    self._send(STILL_WORKING)
                    sent_at = now


def receive(
    tick: Callable[[], None], receive_object: Callable[[Any], Any] = broadcast_object
) -> Any:
    """Return the object that rank 0 broadcasts when it is ready. Every rank except rank 0 must call
    this.

    Args:
        tick: called for each signal from rank 0.
    """
    while isinstance(message := receive_object(None), str) and message == STILL_WORKING:
        tick()
    return message
