"""A headless Chromium for tests, controlled through its debugging pipe.

The pipe needs no port and no library: JSON messages that end in a zero byte, on file descriptors 3
and 4 of the browser. https://chromedevtools.github.io/devtools-protocol/
"""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_SECONDS = 60.0
FRAME = "requestAnimationFrame"


class Browser:
    """A page in a browser. Skips the test if no Chromium is installed.

    Attributes:
        requests: URLs that the page requested.
        messages: console messages, exceptions, and violations of its security policy.
    """

    def __init__(self, profile: Path):
        binary = next(filter(None, map(shutil.which, NAMES)), None)
        if binary is None:
            pytest.skip("no Chromium here")
        self.requests: list[str] = []
        self.messages: list[str] = []
        self._number, self._buffer = 0, b""
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()

        def set_descriptors() -> None:
            first, second = os.dup(to_browser), os.dup(from_browser)
            os.dup2(first, 3)
            os.dup2(second, 4)

        argv = [binary, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
        argv += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
        argv += ["--disable-background-networking", "--disable-component-update"]
        argv += ["--disable-extensions", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            argv, preexec_fn=set_descriptors, close_fds=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        (target,) = [one["targetId"] for one in targets if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._record(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _record(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Open a file on a screen of this size, and wait until it is drawn."""
        self._screen(width, height)
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.evaluate("window.earlierPage = true")
        self.call("Page.navigate", url=page.as_uri())
        loaded = "!window.earlierPage && document.readyState === 'complete'"
        self.wait(f"{loaded} && document.querySelector('svg path')")
        self.evaluate(f"new Promise((drawn) => {FRAME}(() => {FRAME}(() => drawn(true))))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def _screen(self, width: int, height: int) -> None:
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._to)
        os.close(self._from)
