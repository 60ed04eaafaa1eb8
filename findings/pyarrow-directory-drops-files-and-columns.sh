#!/usr/bin/env bash
# pyarrow 26.0.1: reading a directory of Parquet files drops, without a message, every file whose name
# begins with an underscore, and every column that the first file (by name) does not have.
# Seen: 3 files of 3 rows, 3 columns; read 2 rows, columns ['text', 'id']
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
from pathlib import Path

import pyarrow
from pyarrow import parquet

folder = Path(sys.argv[1], "table")
folder.mkdir()
parquet.write_table(pyarrow.table({"text": ["a"], "id": [1]}), folder / "a.parquet")
parquet.write_table(pyarrow.table({"text": ["b"], "language": ["en"]}), folder / "b.parquet")
parquet.write_table(pyarrow.table({"text": ["c"], "id": [3]}), folder / "_c.parquet")
read = parquet.read_table(folder)
print(f"3 files of 3 rows, 3 columns; read {read.num_rows} rows, columns {read.column_names}")
sys.exit(read.num_rows != 2 or read.column_names != ["text", "id"])
PY
