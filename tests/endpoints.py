"""Local servers for the tests: S3 (moto), a minimal W&B, and a proxy that fails or hangs."""

import http.client
import importlib.util
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.launching import environment, free_port

MISSING = [name for name in ("moto", "flask", "s3fs") if importlib.util.find_spec(name) is None]
NO_S3 = f"needs {', '.join(MISSING)} (bash launch/setup.sh dev)" if MISSING else ""
SECRET = "dont-write-this-secret-anywhere"
BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[int]:
    """Run moto's S3 server in a process, with one empty bucket; yield its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not _create_bucket(port):
            assert process.poll() is None and time.monotonic() < deadline, "moto does not answer"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def _create_bucket(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("PUT", f"/{BUCKET}", headers={"Host": f"127.0.0.1:{port}"})
        return connection.getresponse().status == 200
    except OSError:
        return False


def s3_environment(port: int) -> dict[str, str]:
    """Return the variables that point s3fs to a local server, and away from real credentials."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class FaultyProxy:
    """Forwards HTTP requests to a port of this host, and makes some of them fail.

    Attributes:
        status: while not None, answer every request with this status instead of forwarding it.
        fail_every: answer every n-th request with 503; 0: none.
        truncate_every: answer every n-th request for an object with half of the requested body.
        cut_every: close the connection of every n-th such request in the middle of the body.
        corrupt_every: change one byte in the answer to every n-th such request.
        delay_seconds: delay before each answer.
        hangs: accept connections and never answer.
        bytes_per_second: rate at which request bodies are read; None: unlimited.
        requests: (method, path) of all requests so far.
    """

    def __init__(self, target_port: int | None = None):
        self.target_port = target_port
        self.status: int | None = None
        self.fail_every = 0
        self.truncate_every = self.cut_every = self.corrupt_every = 0
        self.delay_seconds = 0.0
        self.hangs = False
        self.bytes_per_second: float | None = None
        self.requests: list[tuple[str, str]] = []
        self.released = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = _QuietServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]

    def __enter__(self) -> "FaultyProxy":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.requests.append((request.command, request.path))
        if self.hangs:
            self.released.wait()
            request.close_connection = True
            return
        body = self._body(request)
        failing = self.fail_every and len(self.requests) % self.fail_every == 0
        status = self.status or (503 if failing else None)
        if status is not None:
            request.send_response(status)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        assert self.target_port is not None
        connection = http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=60)
        skipped = {"transfer-encoding", "content-length"}
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in skipped
        }
        connection.request(request.command, request.path, body=body, headers=headers)
        answer = connection.getresponse()
        time.sleep(self.delay_seconds)
        content, content_length = self._damaged(request, answer.status, answer.read())
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                request.send_header(name, value)
        if request.command == "HEAD":
            request.send_header("Content-Length", answer.getheader("Content-Length") or "0")
        else:
            request.send_header("Content-Length", str(content_length))
        request.end_headers()
        request.close_connection |= content_length != len(content)
        if request.command != "HEAD":
            request.wfile.write(content)

    def _damaged(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes
    ) -> tuple[bytes, int]:
        """Return (the part of an object's body to send, its Content-Length)."""
        number, length = len(self.requests), len(content)
        if request.command != "GET" or status not in (200, 206) or b"<?xml" in content[:9]:
            return content, length
        if self.truncate_every and number % self.truncate_every == 0:
            return content[: length // 2], length // 2
        if self.cut_every and number % self.cut_every == 0:
            return content[: length // 2], length
        if self.corrupt_every and number % self.corrupt_every == 0:
            return bytes([content[0] ^ 1]) + content[1:], length
        return content, length

    def _body(self, request: BaseHTTPRequestHandler) -> bytes:
        if request.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(request.rfile.readline().split(b";")[0], 16):
                parts.append(request.rfile.read(size))
                request.rfile.readline()
            request.rfile.readline()
            return b"".join(parts)
        left, parts = int(request.headers.get("Content-Length") or 0), []
        while left:
            parts.append(request.rfile.read(min(left, 1 << 16)))
            left -= len(parts[-1])
            if self.bytes_per_second:
                time.sleep(len(parts[-1]) / self.bytes_per_second)
        return b"".join(parts)


class WandbServer:
    """The part of W&B's server that a run needs, with failures as `mode` says.

    Attributes:
        mode: "ok", "500" (the status of every answer), or "hang" (read requests, never answer).
        history: rows that were sent, each stored at the offset that the client gave, as W&B does.
    """

    def __init__(self, mode: str = "ok"):
        self.mode, self.released = mode, threading.Event()
        self.history: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if server.mode == "hang":
                    server.released.wait()
                    self.close_connection = True
                    return
                failing = server.mode == "500"
                content = json.dumps({} if failing else server.answer(self.path, body)).encode()
                self.send_response(500 if failing else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = answer

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = _QuietServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]

    def __enter__(self) -> "WandbServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online"}

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if sent:
                del self.history[sent["offset"] :]
                self.history += map(json.loads, sent["content"])
        if path != "/graphql":
            return {}
        request = json.loads(body)
        if "RunResumeStatus" in request["query"]:
            return {"data": {"model": self._resumed() if self.history else None}}
        if "upsertBucket" in request["query"]:
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
            name = request["variables"].get("name") or "first"
            bucket = {"id": "b", "name": name, "displayName": name, "config": "{}"}
            bucket |= {"project": project, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "CreateRunFiles" in request["query"]:
            url = f"http://127.0.0.1:{self.port}/files"
            files = [{"name": name, "uploadUrl": url} for name in request["variables"]["files"]]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        if "createArtifact" in request["query"]:
            return {"data": None, "errors": [{"message": "no artifacts here"}]}
        return {"data": {"serverInfo": {"features": []}}}

    def _resumed(self) -> dict[str, Any]:
        bucket = {"id": "b", "name": "b", "displayName": "first", "summaryMetrics": "{}"}
        bucket |= {"config": "{}", "wandbConfig": "{}", "tags": [], "notes": None}
        bucket |= {"historyLineCount": len(self.history), "logLineCount": 0, "eventsLineCount": 0}
        tail = json.dumps([json.dumps(row) for row in self.history[-1:]])
        bucket |= {"historyTail": tail, "eventsTail": "[]"}
        return {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client was killed, or gave up


@contextmanager
def unresponsive_port() -> Iterator[int]:
    """Yield a port on which the kernel accepts connections that nothing reads."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener.getsockname()[1]
