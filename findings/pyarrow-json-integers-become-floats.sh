#!/usr/bin/env bash
# pyarrow 26.0.1: read_json makes a column of integers a column of doubles as soon as one value has a
# fraction or does not fit in 64 bits, so every other id above 2**53 changes. A column of texts that
# are all dates becomes timestamps, and one more text makes it texts again.
# Seen: 9007199254740993 beside 1.5 became 9007199254740992.0; dates alone timestamp[s], with a word
# string
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

import pyarrow
from pyarrow import json


def column(*values: str) -> pyarrow.ChunkedArray:
    lines = "".join(f'{{"key": {value}}}\n' for value in values)
    return json.read_json(pyarrow.BufferReader(lines.encode()))["key"]


whole = column("9007199254740993", "2").to_pylist()[0]
beside = column("9007199254740993", "1.5").to_pylist()[0]
dates = str(column('"2026-01-01"', '"2026-02-01"').type)
texts = str(column('"2026-01-01"', '"soon"').type)
print(f"{whole} beside 1.5 became {beside}; dates alone {dates}, with a word {texts}")
sys.exit(
    (whole, beside, dates, texts)
    != (9007199254740993, 9007199254740992.0, "timestamp[s]", "string")
)
PY
