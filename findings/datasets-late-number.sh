#!/usr/bin/env bash
# datasets 5.2.0: streaming JSON lines, a number in a column of strings turns the strings of its
# block (of 10 MiB) into JSON literals, with quotation marks and escapes; those of other blocks stay.
# No type is declared, and nothing is printed.
# Seen: 1600 rows, literals 573; the first of them '"text 1026\\nwords'
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

import datasets

texts = [f"text {i}\n" + "words " * 1700 for i in range(1600)]
path = Path(sys.argv[1]) / "train.jsonl"
with path.open("w") as file:
    for number, text in enumerate(texts):
        file.write(json.dumps({"text": 7 if number == 1200 else text}) + "\n")
rows = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
read = [row["text"] for row in rows]
literals = [text for text in read if isinstance(text, str) and text.startswith('"')]
first = literals[0][:17] if literals else ""
print(f"{len(read)} rows, literals {len(literals)}; the first of them {first!r}")
sys.exit(not literals)
PY
