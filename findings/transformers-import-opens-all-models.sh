#!/usr/bin/env bash
# transformers 5.23.0: importing one model class opens the source files of all models, twice: the
# package's two tables of lazy imports come from the same cached function, but one calls it with a
# Path and the other with the text of a file in it, so nothing is found in the cache. On a shared
# file system each process of a job does that.
# Seen: over 1500 source files of other models opened, over 1500 of them twice
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6 transformers==5.23.0
cat >"$folder/count.py" <<'PY'
import sys
from collections import Counter

opened = Counter()


def count(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = arguments[0].replace("\\", "/")
        if "/transformers/models/" in path and path.endswith(".py") and "/llama/" not in path:
            opened[path] += 1


sys.addaudithook(count)
from transformers import LlamaForCausalLM

assert LlamaForCausalLM
twice = sum(number >= 2 for number in opened.values())


def shown(number):
    return "over 1500" if number > 1500 else number


print(f"{shown(len(opened))} source files of other models opened, {shown(twice)} of them twice")
sys.exit(min(len(opened), twice) <= 1500)
PY
"$folder/venv/bin/python" "$folder/count.py"
