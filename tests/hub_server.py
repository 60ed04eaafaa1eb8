"""A server with the requests of the Hugging Face hub that reading a public data set makes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = f"{7:040x}"


@contextmanager
def hub_server(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve data sets `directory/namespace/name/`; yield the endpoint and the requests."""
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())

        def answer(self, body: str = "") -> None:
            url = urlsplit(self.path)
            requested.append(f"{self.command} {url.path}")
            path = unquote(url.path).strip("/")
            is_api = path.startswith("api/")
            _, space, name, *rest = path.removeprefix("api/").split("/")
            kind, rest = "".join(rest[:1]), rest[2:]  # without the revision
            top = directory / space / name
            if not top.is_dir():
                self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif not is_api:
                self.file(top.joinpath(*rest))
            elif kind == "tree" and not top.joinpath(*rest).is_dir():
                self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            elif kind == "tree":
                self.json(self.listing(top, top.joinpath(*rest), parse_qs(url.query)))
            elif kind == "paths-info":
                paths = self.paths(body)
                self.json([entry(top, top / path) for path in paths if (top / path).exists()])
            else:
                files = [{"rfilename": str(each.relative_to(top))} for each in top.rglob("*")
                         if each.is_file()]  # fmt: skip
                self.json({"id": f"{space}/{name}", "sha": COMMIT, "siblings": files, "tags": [],
                           "private": False, "downloads": 0, "likes": 0})  # fmt: skip

        def paths(self, body: str) -> list[str]:
            try:
                paths = json.loads(body)["paths"]
            except ValueError:
                paths = parse_qs(body)["paths"]
            return [paths] if isinstance(paths, str) else paths

        def listing(self, top: Path, below: Path, query: dict[str, list[str]]) -> list[dict]:
            is_deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            found = below.rglob("*") if is_deep else below.iterdir()
            return [entry(top, each) for each in sorted(found)]

        def json(self, content: object) -> None:
            self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def file(self, path: Path) -> None:
            if not path.is_file():
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content, status, size = path.read_bytes(), 200, path.stat().st_size
            headers = {"ETag": f'"{size}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if requested_range := self.headers.get("Range"):
                first, last = requested_range.removeprefix("bytes=").split("-")
                content, status = content[int(first) : int(last or size) + 1], 206
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{size}"
            self.send(status, content, headers)

        def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requested
    finally:
        server.shutdown()
        server.server_close()


def entry(top: Path, path: Path) -> dict:
    kind = "directory" if path.is_dir() else "file"
    size = 0 if path.is_dir() else path.stat().st_size
    return {"type": kind, "path": str(path.relative_to(top)), "size": size, "oid": f"{size:040x}"}
