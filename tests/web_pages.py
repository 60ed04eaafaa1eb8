"""Web pages made of Python's own documentation topics, as HTML files and WARC archives."""

import html
import importlib
import inspect
import io
import pkgutil
from pathlib import Path
from pydoc_data.topics import topics

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

PACKAGES = ("asyncio", "concurrent", "email", "html", "http", "json", "unittest", "xml")
DATE = "2024-02-03T04:05:06Z"


def page(title: str, text: str, charset: str = "utf-8", *, declared: bool = True) -> bytes:
    """Return a page with a menu and a footer around a text."""
    paragraphs = "".join(f"<p>{html.escape(part)}</p>\n" for part in text.split("\n\n"))
    meta = f'<meta charset="{charset}">' if declared else ""
    return (
        f"<!DOCTYPE html><html><head>{meta}<title>{html.escape(title)}</title></head><body>"
        f'<nav><ul><li><a href="/">Home</a></li><li><a href="/about">About us</a></li></ul></nav>'
        f"<article><h1>{html.escape(title)}</h1>\n{paragraphs}</article>"
        f"<footer>Copyright. Accept all cookies.</footer></body></html>"
    ).encode(charset)


def topic_pages(count: int) -> list[tuple[str, bytes]]:
    """Return (URL, page) of documentation topics of at most 20,000 characters."""
    chosen = [name for name in sorted(topics) if 800 < len(topics[name]) < 20_000]
    return [
        (f"https://docs.example/{number}/{name}", page(f"{name} ({number})", topics[name]))
        for number in range(1 + count // len(chosen))
        for name in chosen
    ][:count]


def docstring_pages(count: int) -> list[tuple[str, bytes]]:
    """Return (URL, page) of modules of Python's own library, with their docstrings."""
    pages: list[tuple[str, bytes]] = []
    for name in PACKAGES:
        for info in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if "__main__" in info.name or "windows" in info.name:
                continue
            module = importlib.import_module(info.name)
            parts = [inspect.getdoc(module) or ""]
            parts += [
                inspect.getdoc(member) or ""
                for key, member in sorted(vars(module).items())
                if inspect.isclass(member) or inspect.isfunction(member)
            ]
            text = "\n\n".join(part for part in parts if part)
            pages.append((f"https://docs.example/library/{info.name}", page(info.name, text)))
    return pages[:count]


def write_warc(path: Path, pages: list[tuple[str, bytes]], content_type: str = "text/html") -> Path:
    """Write an archive as a crawler does: a request, a response and metadata of each page."""
    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=path.suffix == ".gz")
    stream_info = writer.create_warcinfo_record(path.name, {"software": "test"})
    stream_info.rec_headers.replace_header("WARC-Date", DATE)
    writer.write_record(stream_info)
    for number, (url, content) in enumerate(pages):
        more = {"WARC-Date": DATE, "WARC-Record-ID": f"<urn:uuid:{number:032}>"}
        sent = [("Content-Type", content_type), ("Content-Length", str(len(content)))]
        headers = StatusAndHeaders("200 OK", sent, protocol="HTTP/1.1")
        record = writer.create_warc_record(
            url, "response", payload=io.BytesIO(content), http_headers=headers,
            warc_headers_dict=dict(more),
        )  # fmt: skip
        ask = StatusAndHeaders("GET / HTTP/1.1", [("Host", "docs.example")], is_http_request=True)
        request = writer.create_warc_record(
            url, "request", http_headers=ask, warc_headers_dict={"WARC-Date": DATE}
        )
        writer.write_request_response_pair(request, record)
    path.write_bytes(stream.getvalue())
    return path
