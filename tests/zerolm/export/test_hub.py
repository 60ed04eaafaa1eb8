"""Models are pushed to a local hub server through huggingface_hub."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from zerolm.common.errors import ConfigError
from zerolm.export import hub

TOKEN = "hf_" + "a" * 34


class Hub(ThreadingHTTPServer):
    """A hub that accepts uploads of small files; `models` is its content."""

    def __init__(self, models: dict[str, dict]):
        super().__init__(("127.0.0.1", 0), Answers)
        self.models, self.broken = models, False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def answer(self, code: int, content: object, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("/revision")[0].partition("?")[0]
        model = self.server.models.get(name)
        if model is None:
            self.answer(404, {"error": "none"}, **{"X-Error-Code": "RepoNotFound"})
        else:
            self.answer(200, {"id": name, "private": model["private"], "siblings": []})

    def do_POST(self) -> None:
        assert self.headers["Authorization"] == f"Bearer {TOKEN}"
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.server.broken:
            self.answer(403, {"error": "no room"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            private = asked.get("private") or asked.get("visibility") == "private"  # old, new
            self.server.models.setdefault(name, {"private": private, "files": {}})
            self.answer(200, {"url": f"{self.server.url}/{name}"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in files
            ]
            self.answer(200, {"files": modes})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit")[0]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.server.models[name]["files"][entry["value"]["path"]] = content
            url = f"{self.server.url}/{name}/commit/1"
            self.answer(200, {"commitUrl": url, "commitOid": "1", "pullRequestUrl": None})
        else:
            self.answer(200, {"errors": [], "warnings": []})

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    server = Hub({"us/public": {"private": False, "files": {}}})
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path):
    (tmp_path / "README.md").write_text("---\nlibrary_name: transformers\n---\n# first\n")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_model_is_private_unless_public_is_given(server, model):
    for name, public in (("us/first", False), ("us/second", True)):
        hub.check(name, public)
        assert hub.push(model, name, public) == f"{server.url}/{name}"
        sent = server.models[name]
        assert sent["private"] is not public
        assert sent["files"] == {path.name: path.read_bytes() for path in model.iterdir()}
    hub.check("us/first", False)  # may be pushed again


def test_problems_are_reported_before_anything_is_sent(server, monkeypatch):
    with pytest.raises(ConfigError, match="already public"):
        hub.check("us/public", False)
    hub.check("us/public", True)
    with pytest.raises(ConfigError, match="Write user/name"):
        hub.check("not a/good/name", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        hub.check("us/first", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="no token found"):
        hub.check("us/first", False)


def test_a_failed_push_keeps_the_export_and_shows_how_to_push_it(server, model):
    server.broken = True
    with pytest.raises(hub.PushError, match="is complete: push it with `hf upload us/first"):
        hub.push(model, "us/first", False)
    assert (model / "README.md").is_file()
