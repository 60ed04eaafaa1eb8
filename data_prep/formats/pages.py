"""Extracts the main text of web pages with trafilatura, in a child process of each worker.

A page that takes too much CPU time or crashes the parser terminates only the child process, and is
counted as bad input. The limit is CPU time rather than wall-clock time, so the result does not
depend on the load of the machine.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any, NamedTuple

from data_prep.files.documents import Chunk, Document, InputRules, Problem
from data_prep.files.encodings import AUTO, UTF8, decode_page
from data_prep.files.inputs import END, Input, InputRange
from data_prep.files.parse import Parsed
from data_prep.files.streams import COMPRESSIONS
from data_prep.formats.format import Format
from data_prep.formats.text import read_file
from zerolm.common.errors import reason

PACKAGES = ("trafilatura", "lxml", "w3lib", "chardet")
MAX_PAGE_BYTES = 20_000_000  # trafilatura returns nothing for a larger page
CHILD = "import sys; sys.path[:] = {path!r}; from data_prep.formats.pages import serve; serve({fd})"


class Page(NamedTuple):
    """A web page, or another archive record, which is skipped."""

    start: int  # like Chunk.start
    content: bytes
    content_type: str = ""  # header as sent by the server
    keys: Mapping[str, str] = {}  # for the document
    is_html: bool = True  # otherwise plain text
    skipped: str = ""  # the reason, followed by the content type if it is not a page


def read_pages(chunk: Chunk, rules: InputRules) -> Parsed:
    """Return the documents of a chunk of pages; see `parse.read_documents`."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []
    for page in chunk.data:
        if page.skipped:
            skipped[page.skipped] += 1
            continue
        where = chunk.name, chunk.input, page.start
        if page.is_html:
            answer = _extractor.extract(page.content, page.content_type, rules.max_page_seconds)
        else:
            try:
                answer = {"text": page.content.decode()}
            except UnicodeDecodeError as error:
                detail = f"the record's text is not UTF-8 ({error.reason}). Remove the record."
                answer = {"reason": "not_utf8", "detail": detail}
        if "reason" in answer:
            problems.append(Problem(answer["reason"], *where, False, answer["detail"]))
        elif not answer["text"]:
            skipped["no_main_text"] += 1
        else:
            record = None
            if rules.keep_records:
                title = {"title": answer["title"]} if answer.get("title") else {}
                record = {rules.text_field: answer["text"], **page.keys, **title}
            documents.append(Document(answer["text"], chunk.input, page.start, record))
    return documents, skipped, problems


class _Extractor:
    """The child process, which is started on first use and restarted whenever it has exited."""

    def __init__(self) -> None:
        self.pid = -1
        self.process: subprocess.Popen
        self.connection: Connection

    def extract(self, content: bytes, content_type: str, seconds: float) -> dict[str, str]:
        """Extract a page: return its `text` and `title`, or a problem's `reason` and `detail`."""
        if self.pid != os.getpid():
            self._start()
        try:
            self.connection.send((content, content_type, seconds))
            return self.connection.recv()
        except (EOFError, OSError):
            self.pid = -1
            self.connection.close()
            code = self.process.wait()
        if code == -signal.SIGPROF:
            detail = (
                f"its text was not extracted within {seconds:g} s of CPU time. Remove the page, or "
                f"raise --max_page_seconds."
            )
            return {"reason": "slow_page", "detail": detail}
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return {
            "reason": "failed_page",
            "detail": f"the extraction of its text crashed ({how}). Remove the page.",
        }

    def _start(self) -> None:
        ours, theirs = socketpair()
        with theirs:
            program = CHILD.format(path=sys.path, fd=theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self.pid = os.getpid()


_extractor = _Extractor()


def serve(descriptor: int) -> None:
    """Process extraction requests until the parent closes the connection or exits."""
    import logging

    import trafilatura

    assert trafilatura  # imported now, so that no page's CPU time includes it
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    connection = Connection(descriptor)
    while True:
        try:
            content, content_type, seconds = connection.recv()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, even in C code
        answer: dict[str, Any]
        try:
            answer = extract_text(content, content_type)
        except Exception as error:  # the parser may raise any exception on malformed pages
            detail = f"its text cannot be extracted ({reason(error)}). Remove the page."
            answer = {"reason": "failed_page", "detail": detail}
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            connection.send(answer)
        except OSError:
            return


def extract_text(content: bytes, content_type: str = "") -> dict[str, str]:
    """Return the main text of an HTML page ("" if there is none) as `text`, and the page's `title`.

    trafilatura's option `deduplicate` is off: it remembers earlier pages, so a page's text would
    depend on where a stopped task resumed.
    """
    import trafilatura

    tree = trafilatura.load_html(decode_page(content, content_type))
    if tree is None:
        return {"text": "", "title": ""}
    title = " ".join((tree.findtext(".//title") or "").split())
    text = trafilatura.extract(
        tree, favor_precision=True, include_comments=False, deduplicate=False
    )
    return {"text": text or "", "title": title}


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Read a file as one page, which declares its own encoding."""
    rules = replace(rules, max_document_bytes=min(rules.max_document_bytes, MAX_PAGE_BYTES))
    chunk = read_file(replace(source, encoding=UTF8), part, rules)
    if chunk.kind == "text":
        declared = "" if source.encoding in (UTF8, AUTO) else f"charset={source.encoding}"
        chunk = chunk._replace(kind="pages", data=[Page(0, chunk.data, f"text/html; {declared}")])
    yield chunk, END


PAGES = Format(
    (".html", ".htm", ".xhtml"),
    _read,
    read_pages,
    compressions=COMPRESSIONS,
    shown=(".html",),
    help=".html (one document)",
    places="file",
    packages=PACKAGES,
    cost=16,
    reasons={
        "slow_page": "pages whose extraction took more than --max_page_seconds",
        "failed_page": "pages whose text cannot be extracted",
        "no_main_text": "pages without main text",
    },
)
