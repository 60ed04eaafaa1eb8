"""Web pages: extraction, encodings and limits, from files and from archives."""

import gzip
import io
import os
import signal
import zlib

import brotli
import pytest
import trafilatura
import zstandard
from warcio.archiveiterator import ArchiveIterator
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from data_prep.files.documents import InputRules
from data_prep.formats import pages, warc
from data_prep.formats.content_coding import decode_content
from data_prep.formats.format import package_versions
from data_prep.read.bad_input import summary_lines
from data_prep.read.discovery import find_inputs
from data_prep.read.work_units import plan_units
from tests.data_prep.read.small_inputs import find, read_resuming
from tests.web_pages import DATE, page, topic_pages, write_warc
from zerolm.common.errors import ConfigError

KEEP = InputRules(keep_records=True)
SKIP = InputRules(keep_records=True, on_bad_input="skip", max_bad_fraction=1)
PAGES = topic_pages(16)
FOX = "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Maß und Übermut."


def read(path, rules=KEEP, unit_bytes=None, chunk_bytes=20_000):
    """Return (documents, tally), after a check that reading resumes after any batch."""
    inputs = find([path], rules)
    documents, tally = read_resuming(inputs, rules, unit_bytes, chunk_bytes)
    assert tally.input_bytes + tally.lost_bytes == sum(each.size_bytes for each in inputs)
    return documents, tally


def extracted(content):
    """Return the text that trafilatura gives for a page, in this process."""
    return trafilatura.extract(content.decode(), favor_precision=True, include_comments=False)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return write_warc(tmp_path_factory.mktemp("warc") / "a.warc.gz", PAGES)


def test_pages_of_an_archive_are_those_of_warcio_and_trafilatura(archive, tmp_path):
    documents, tally = read(archive)
    expected = []
    with archive.open("rb") as stream:
        records = ArchiveIterator(stream)
        for record in records:
            if record.rec_type == "response":
                url = record.rec_headers.get_header("WARC-Target-URI")
                content = record.content_stream().read()
                expected.append((extracted(content), url, records.get_record_offset()))
    assert [(each.text, each.record["url"], each.start) for each in documents] == expected
    assert len(documents) == 16 == tally.num_documents and not tally.bad and not tally.skipped
    first = documents[0].record
    assert set(first) == {"text", "id", "url", "date", "title"} and first["date"] == DATE
    assert first["id"].startswith("<urn:uuid:0000") and first["title"].endswith("(0)")
    assert "cookies" not in first["text"] and "About us" not in first["text"]
    plain = write_warc(tmp_path / "a.warc", PAGES)
    assert [each.text for each in read(plain)[0]] == [each.text for each in documents]


def test_an_archive_is_read_in_units_of_any_size(archive):
    whole, tally = read(archive)
    for unit_bytes in (5_000, 12_345):
        documents, again = read(archive, unit_bytes=unit_bytes)
        assert documents == whole and again.record() == tally.record()
    inputs, _ = find_inputs([str(archive)], "text")
    assert len(plan_units(inputs, 5_000)) > 5


def offsets(path):
    with path.open("rb") as stream:
        records = ArchiveIterator(stream)
        return [
            (records.get_record_offset(), records.get_record_length())
            for record in records
            if record.rec_type == "response"
        ]


@pytest.mark.parametrize("unit_bytes", [None, 7_000])
def test_a_damaged_record_costs_only_itself(archive, tmp_path, unit_bytes):
    """It is named with its byte; also if its gzip header is damaged, and with several workers."""
    data = bytearray(archive.read_bytes())
    whole, _ = read(archive)
    places = offsets(archive)
    start, length = places[7]
    data[start + length // 2] ^= 16
    data[places[11][0]] ^= 255
    damaged = tmp_path / "damaged.warc.gz"
    damaged.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read(damaged)
    (first, second) = caught.value.problems
    assert f"{damaged} (byte {start:,}): " in first and "record is damaged" in first
    assert f"(byte {places[11][0]:,}): " in second and "restore the file" in second
    documents, tally = read(damaged, SKIP, unit_bytes)
    bad = {each.start for each in whole} - {each.start for each in documents}
    assert bad == {start, places[11][0]} and len(documents) == 14
    assert tally.bad == {"damaged": 2} and tally.lost_bytes == length + places[11][1]


def test_a_truncated_archive_and_one_gzip_member_for_all_are_named(archive, tmp_path):
    cut = tmp_path / "cut.warc.gz"
    cut.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="the compressed data ends too early"):
        read(cut)
    assert read(cut, SKIP)[1].bad == {"cut": 1}
    plain = write_warc(tmp_path / "a.warc", PAGES[:3])
    cut = tmp_path / "cut.warc"
    cut.write_bytes(plain.read_bytes()[:-3000])
    assert read(cut, SKIP)[1].bad == {"cut": 1}
    single = tmp_path / "single.warc.gz"
    single.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(ConfigError, match="warcio recompress"):
        read(single)
    changed = bytearray(plain.read_bytes())
    changed[offsets(plain)[1][0] + 900] ^= 1
    plain.write_bytes(changed)
    with pytest.raises(ConfigError, match="differs from its WARC-Block-Digest"):
        read(plain)


def test_what_is_not_a_page_is_counted(tmp_path):
    """WET records are text already; what describes other records is not counted."""
    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=True)

    def add(status, content_type, content, kind="response", **more):
        sent = [("Content-Type", content_type), *more.items()]
        headers = StatusAndHeaders(status, sent, protocol="HTTP/1.1")
        writer.write_record(
            writer.create_warc_record(
                "https://a.example/x", kind, payload=io.BytesIO(content),
                http_headers=headers if kind == "response" else None,
                warc_content_type=content_type,
            )
        )  # fmt: skip

    add("200 OK", "text/html; charset=iso-8859-1", page("t", FOX, "cp1252", declared=False))
    add("200 OK", "application/pdf", b"%PDF-1.4")
    add("200 OK", "", page("t", FOX))
    add("404 Not Found", "text/html", page("t", FOX))
    add("200 OK", "text/html", b"<html><body><script>1</script></body></html>")
    packed = gzip.compress(page("t", FOX))
    add("200 OK", "text/html", packed, **{"Content-Encoding": "gzip"})
    add("", "text/plain", FOX.encode(), "conversion")
    add("", "application/json", b"{}", "metadata")
    add("", "text/dns", b"a.example A 192.0.2.1", "resource")
    path = tmp_path / "a.warc.wet.gz"
    path.write_bytes(stream.getvalue())
    documents, tally = read(path)
    assert [FOX in each.text for each in documents] == [True] * 4
    assert tally.skipped == {
        "not_a_page.application/pdf": 1, "not_a_page.text/dns": 1, "http_error": 1,
        "no_main_text": 1,
    }  # fmt: skip
    line = "WARC records whose content is not a page (1 application/pdf, 1 text/dns)"
    assert f"skipped: 2 {line}" in summary_lines([], tally, KEEP)
    broken = packed[:30] + b"0000" + packed[34:]
    for coding, content in (("gzip", broken), ("zstd", b"\xffabc"), ("lzma", b"\xffabc")):
        add("200 OK", "text/html", content, **{"Content-Encoding": coding})
    add("200 OK", "text/html", packed[:-20], **{"Content-Encoding": "gzip"})
    add("", "text/plain", b"caf\xe9", "conversion")
    path.write_bytes(stream.getvalue())
    _, tally = read(path, SKIP)
    assert tally.bad == {"failed_page": 4, "not_utf8": 1}


RAW_DEFLATE = zlib.compressobj(wbits=-15)
PAGE = page("t", FOX)
CHUNKED = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (99, PAGE[:99], len(PAGE) - 99, PAGE[99:])
ZSTD = zstandard.ZstdCompressor().compress
SKIPPED_FRAME = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a zstd frame without content
CODED = {
    "several gzip members": (b"".join(map(gzip.compress, (PAGE[:99], PAGE[99:], b""))), "gzip"),
    "members and padding": (gzip.compress(PAGE[:99]) + gzip.compress(PAGE[99:]) + b"\0\n", "gzip"),
    "several zstd frames": (ZSTD(b"") + ZSTD(PAGE[:9]) + SKIPPED_FRAME + ZSTD(PAGE[9:]), "zstd"),
    "chunks with trailers": (CHUNKED[:-2] + b"Expires: never\r\n\r\n", "", "chunked"),
    "chunks with extensions": (b"%x ;a=b\n%b\n0\n\n" % (len(PAGE), PAGE), "", "chunked"),
    "br": (brotli.compress(PAGE), "br"),
    "BR, in capitals": (brotli.compress(PAGE), "BR"),
    "zstd": (zstandard.ZstdCompressor().compress(PAGE), "zstd"),
    "an alias": (gzip.compress(PAGE), "x-gzip"),
    "zlib": (zlib.compress(PAGE), "Deflate"),
    "deflate": (RAW_DEFLATE.compress(PAGE) + RAW_DEFLATE.flush(), "deflate"),
    "two codings": (gzip.compress(brotli.compress(PAGE)), "br, gzip"),
    "none": (PAGE, "identity"),
    "undone by the crawler": (PAGE, "br"),
    "not a coding": (PAGE, "UTF-8"),
    "chunks": (CHUNKED, "", "Chunked"),
    "a coding of the transfer": (gzip.compress(PAGE), "", "gzip"),
    "chunks, undone": (PAGE, "", "chunked"),
}


@pytest.mark.parametrize("content_type", ["text/html", "Text/HTML; Charset=UTF-8", "TEXT/HTML , x"])
def test_header_values_are_read_in_any_spelling(tmp_path, content_type):
    """Of types and codings, as browsers do: each page gives the text that it has uncoded."""
    stream = io.BytesIO()
    writer = WARCWriter(stream, gzip=True)
    for content, coding, *transfer in CODED.values():
        sent = [("content-TYPE", content_type), ("Content-encoding", coding)]
        sent += [("Transfer-Encoding", each) for each in transfer]
        headers = StatusAndHeaders("200 OK", sent, protocol="HTTP/2")
        record = writer.create_warc_record(
            "https://a.example/x", "response", payload=io.BytesIO(content), http_headers=headers
        )
        writer.write_record(record)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(stream.getvalue())
    documents, tally = read(path)
    assert [each.text for each in documents] == [extracted(PAGE)] * len(CODED), tally
    (tmp_path / "a.warc").write_bytes(gzip.decompress(stream.getvalue()).replace(
        b"WARC-Type: response", b"WARC-Type: Response"))  # fmt: skip
    assert len(read(tmp_path / "a.warc")[0]) == len(CODED)


CHUNK = b"5\r\n<html\r\n"
UNREAD = {  # content, coding, and how many bytes are not read
    "after a member": (gzip.compress(PAGE) + b"PAGE", "gzip", "4 bytes follow"),
    "after members": (gzip.compress(PAGE) * 2 + b"x" * 5000, "gzip", "5,000 bytes follow"),
    "after a frame": (ZSTD(PAGE) + b"rest", "zstd", "4 bytes follow"),
    "after deflate": (
        zlib.compress(PAGE) * 2,
        "deflate",
        f"{len(zlib.compress(PAGE))} bytes follow",
    ),
    "after br": (brotli.compress(PAGE) * 2, "br", "decoder failed"),
    "half a member": (gzip.compress(PAGE) + gzip.compress(PAGE)[:20], "gzip", "ends too early"),
    "half a frame": (ZSTD(PAGE) + ZSTD(PAGE)[:9], "zstd", "ends too early"),
    "after chunks": (CHUNK + b"0\r\n\r\n" + CHUNK, "chunked", "10 bytes follow"),
    "no chunk": (CHUNK + b"<p>text\r\n", "chunked", "the last 9 bytes are not a chunk"),
    "half a chunk": (CHUNK[:6], "chunked", "ends too early"),
    "no last chunk": (CHUNK, "chunked", "ends too early"),
}


@pytest.mark.parametrize(("content", "coding", "message"), UNREAD.values(), ids=UNREAD)
def test_coded_content_that_is_not_read_to_its_end_is_refused(content, coding, message):
    headers = [("Transfer-Encoding" if coding == "chunked" else "Content-Encoding", coding)]
    with pytest.raises(ValueError, match=f"encoding {coding}: .*{message}"):
        decode_content(content, headers, 1 << 20, is_truncated=False)
    if message == "ends too early":
        decode_content(content, headers, 1 << 20, is_truncated=True)


def test_a_record_that_differs_from_its_length_is_damaged(tmp_path):
    """In two gzip members, or with more bytes: neither half of a page becomes a document."""
    plain = write_warc(tmp_path / "a.warc", PAGES[:1]).read_bytes()
    for cut, end, bad in ((len(plain) // 2, b"", 2), (len(plain), b"more", 1)):
        parts = [gzip.compress(part) for part in (plain[:cut], plain[cut:] + end)]
        (tmp_path / "b.warc.gz").write_bytes(
            b"".join(parts) if not end else gzip.compress(plain + end)
        )
        documents, tally = read(tmp_path / "b.warc.gz", SKIP)
        assert not documents and tally.bad == {"damaged": bad}


@pytest.mark.parametrize("coding", ["br", "gzip", "zstd"])
def test_content_that_expands_is_cut_soon(coding):
    packed = {
        "br": lambda content: brotli.compress(content, quality=1), "gzip": gzip.compress,
        "zstd": zstandard.ZstdCompressor().compress,
    }[coding](bytes(1 << 27))  # fmt: skip
    content = decode_content(packed, [("Content-Encoding", coding)], 1 << 20, False)
    assert 1 << 20 < len(content) < 1 << 26


@pytest.mark.parametrize("suffix", [".html", ".htm.gz"])
def test_a_page_is_decoded_as_it_declares(tmp_path, suffix):
    """UTF-8 wherever it is valid; by its content if it declares nothing."""
    cases = {
        "utf8": page("t", FOX, declared=False),
        "declared": page("t", FOX, "cp1252"),
        "undeclared": page("t", FOX, "cp1252", declared=False),
        "utf16": "\ufeff".encode("utf-16-le") + page("t", FOX).decode().encode("utf-16-le"),
        "russian": page("t", "Съешь ещё этих мягких французских булок, выпей чаю.", "koi8-r"),
        "japanese": page("t", "今日は天気がいいので、公園へ散歩に行きました。", "iso-2022-jp"),
    }
    for name, content in cases.items():
        pack = gzip.compress if suffix.endswith(".gz") else bytes
        (tmp_path / f"{name}{suffix}").write_bytes(pack(content))
    documents, _ = read(tmp_path)
    texts = {sorted(cases)[number]: each.text for number, each in enumerate(documents)}
    assert "Съешь ещё этих" in texts.pop("russian") and "公園へ散歩" in texts.pop("japanese")
    assert all(FOX in text for text in texts.values()) and len(texts) == 4
    assert documents[0].record["title"] == "t"


def test_a_page_that_takes_too_long_or_crashes_the_parser_is_counted(tmp_path, monkeypatch):
    """And the pages after it are read by a new child."""
    for number in range(4):
        (tmp_path / f"{number}.html").write_bytes(page(str(number), FOX))
    (tmp_path / "1.html").write_bytes(page("slow", "z" * 50))
    (tmp_path / "2.html").write_bytes(page("crash", "z" * 60))
    monkeypatch.setattr(pages, "CHILD", SLOW + pages.CHILD)
    monkeypatch.setattr(pages, "_extractor", pages._Extractor())
    rules = InputRules(on_bad_input="skip", max_bad_fraction=1, max_page_seconds=0.5)
    documents, tally = read(tmp_path, rules)
    assert len(documents) == 2 and tally.bad == {"slow_page": 1, "failed_page": 1}
    slow, crash = tally.examples
    assert slow.name.endswith("1.html") and "within 0.5 s of CPU time" in slow.detail
    assert crash.name.endswith("2.html") and "signal 11" in crash.detail


SLOW = """
import os, trafilatura
extract = trafilatura.extract
def replacement(tree, **options):
    text = tree.text_content()
    if "slow" in text:
        (lambda n: sum(i * i for i in range(n)))(10**12)
    if "crash" in text:
        os.kill(os.getpid(), 11)
    return extract(tree, **options)
trafilatura.extract = replacement
"""


def test_a_page_that_is_too_large_is_named(tmp_path):
    (tmp_path / "a.html").write_bytes(b"<html>" + b" " * pages.MAX_PAGE_BYTES)
    with pytest.raises(ConfigError, match="20,000,006 bytes are more than"):
        read(tmp_path)


def test_the_child_ends_with_its_worker(tmp_path):
    """Even if that is killed: nothing stays behind."""
    (tmp_path / "a.html").write_bytes(page("t", FOX))
    ours, theirs = os.pipe()
    worker = os.fork()
    if not worker:
        read(tmp_path)
        os.write(theirs, str(pages._extractor.process.pid).encode())
        signal.pause()
    child = int(os.read(ours, 100))
    held = os.pidfd_open(child)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    import select

    assert select.select([held], [], [], 30)[0]
    for descriptor in (ours, theirs, held):
        os.close(descriptor)


def test_missing_packages_are_named_with_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.warc").write_bytes(b"")
    for number in range(3):
        (tmp_path / f"{number}.html").write_bytes(page("t", FOX))
    monkeypatch.setattr("data_prep.formats.format.installed_version", lambda name: None)
    package_versions.cache_clear()
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    (problem,) = caught.value.problems
    assert "0.html needs trafilatura" in problem and "launch/setup.sh inputs" in problem


def test_search_finds_members_across_blocks(archive, monkeypatch):
    monkeypatch.setattr(warc, "SEARCH_BYTES", 64)
    with archive.open("rb") as raw:
        for start, _ in offsets(archive)[:5]:
            assert warc._find_member(raw, start - 70) in (start, *range(start - 70, start))
            assert warc._find_member(raw, start) == start
