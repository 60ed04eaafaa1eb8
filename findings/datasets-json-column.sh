#!/usr/bin/env bash
# datasets 5.2.0 and pandas 2.3.3: a column of strings and numbers gets the type Json, which
# to_parquet writes as JSON literals; datasets decodes them, pandas and pyarrow's to_pylist return
# the texts with quotation marks and escapes.
# Seen: datasets 'one\ntwo', pandas '"one\\ntwo"'
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1 pandas==2.3.3
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import sys
from pathlib import Path

import datasets
import pandas

datasets.disable_progress_bars()
folder = Path(sys.argv[1])
(folder / "a.jsonl").write_text('{"text": "one\\ntwo"}\n{"text": 7}\n')
rows = datasets.load_dataset("json", data_files=str(folder / "a.jsonl"), split="train")
rows.to_parquet(str(folder / "a.parquet"))
own = datasets.load_dataset("parquet", data_files=str(folder / "a.parquet"), split="train")
theirs = pandas.read_parquet(folder / "a.parquet")["text"][0]
print(f"datasets {own[0]['text']!r}, pandas {theirs!r}")
sys.exit(own[0]["text"] != "one\ntwo" or theirs == "one\ntwo")
PY
