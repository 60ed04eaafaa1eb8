#!/usr/bin/env bash
# warcio 1.8.1: the payload of a chunked HTTP response gets the length of the last chunk and most of
# its trailers (RFC 9112, 7.1.2), and a Content-Encoding of two gzip members (RFC 1952) ends after
# the first. Neither is reported.
# Seen: trailers b'HELLO0\r\npires: never\r\n\r\n', members b'HELLO'
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q warcio==1.8.1
"$folder/venv/bin/python" - <<'PY'
import gzip
import io
import sys

from warcio.archiveiterator import ArchiveIterator


def payload(headers: str, body: bytes) -> bytes:
    http = f"HTTP/1.1 200 OK\r\n{headers}\r\n\r\n".encode() + body
    warc = (
        "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://example.com/\r\n"
        "WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000001>\r\n"
        "WARC-Date: 2026-01-01T00:00:00Z\r\nContent-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(http)}\r\n\r\n"
    ).encode()
    (record,) = (
        each.content_stream().read()
        for each in ArchiveIterator(io.BytesIO(warc + http + b"\r\n\r\n"))
    )
    return record


trailers = payload("Transfer-Encoding: chunked", b"5\r\nHELLO\r\n0\r\nExpires: never\r\n\r\n")
members = payload("Content-Encoding: gzip", gzip.compress(b"HELLO") + gzip.compress(b" WORLD"))
print(f"trailers {trailers}, members {members}")
sys.exit(trailers == b"HELLO" or members == b"HELLO WORLD")
PY
