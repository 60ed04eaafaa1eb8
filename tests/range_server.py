"""An HTTP server for a directory, with range requests, that makes some requests fail."""

import gzip
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer:
    """Serves the files of a directory over HTTP.

    Attributes:
        fail_every: answer every n-th request with 503; 0: none.
        cut_every: close the connection of every n-th request in the middle of the body.
        shorten_every: answer every n-th request with only half of the content.
        corrupt_every: change one byte in the answer to every n-th request.
        seconds: delay before every answer.
        ignores_ranges: send the complete file even if a range is requested.
        compresses: send complete files, in two gzip members, to clients that accept gzip.
        requests: {file name: number of requests}.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.fail_every = self.cut_every = self.shorten_every = self.corrupt_every = 0
        self.seconds = 0.0
        self.ignores_ranges = self.compresses = False
        self.requests: Counter[str] = Counter()
        self.server = _QuietServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return sum(self.requests.values())

    def due(self, every: int, number: int) -> bool:
        return bool(every) and number % every == 0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._lock:
            name = request.path.lstrip("/")
            self.requests[name] += 1
            number = self.count
        time.sleep(self.seconds)
        path = self.directory / name
        if self.due(self.fail_every, number) or not path.is_file():
            request.send_response(503 if path.is_file() else 404)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        content, status = path.read_bytes(), 200
        requested = request.headers.get("Range")
        coded = self.compresses and "gzip" in request.headers.get("Accept-Encoding", "gzip")
        if coded:
            content = gzip.compress(content[:9]) + gzip.compress(content[9:])
        elif requested and not self.ignores_ranges:
            first, last = requested.removeprefix("bytes=").split("-")
            content, status = content[int(first) : int(last) + 1], 206
        if self.due(self.shorten_every, number):
            content = content[: len(content) // 2]
        if self.due(self.corrupt_every, number):
            content = bytes([content[0] ^ 64]) + content[1:]
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        if coded:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        if self.due(self.cut_every, number):
            content = content[: len(content) // 2]
            request.close_connection = True
        request.wfile.write(content)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def _handler(server: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler


@contextmanager
def range_server(directory: Path) -> Iterator[RangeServer]:
    server = RangeServer(directory)
    threading.Thread(target=server.server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
