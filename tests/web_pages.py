"""Web pages made of the generated manual, as HTML files and WARC archives."""

import html
import io
from pathlib import Path

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from tests.manual import SEED, generate_topics, topics

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
    """Return (URL, page) of topics of the manual of at most 20,000 characters."""
    chosen = [name for name in sorted(topics) if 800 < len(topics[name]) < 20_000]
    return [
        (f"https://docs.example/{number}/{name}", page(f"{name} ({number})", topics[name]))
        for number in range(1 + count // len(chosen))
        for name in chosen
    ][:count]


def library_pages(count: int) -> list[tuple[str, bytes]]:
    """Return (URL, page) of another manual, which shares no page with the topics."""
    pages = generate_topics(count, SEED + 1).items()
    return [(f"https://docs.example/library/{name}", page(name, text)) for name, text in pages]


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
