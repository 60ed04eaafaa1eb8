#!/usr/bin/env bash
# transformers 5.24.0, tokenizers 0.23.3: a call with truncation=True leaves the truncation in the
# tokenizer's backend, and save_pretrained writes it to tokenizer.json, so every program that reads the
# file with the package tokenizers cuts all documents to that length. AutoTokenizer does not, so the
# file looks right to a check with transformers.
# Seen: 9 tokens; after one call with truncation=True, max_length=4, and save_pretrained: tokenizers
# 4, AutoTokenizer 9
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder/saved" 2>/dev/null <<'PY'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

path, text = sys.argv[1], "a b c d e f g h i"
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(text.split())}))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
before = len(tokenizer(text).input_ids)
tokenizer(text, truncation=True, max_length=4)
tokenizer.save_pretrained(path)
raw = len(Tokenizer.from_file(f"{path}/tokenizer.json").encode(text).ids)
auto = len(AutoTokenizer.from_pretrained(path)(text).input_ids)
print(f"tokens: {before}; saved after one call with max_length=4: tokenizers {raw},", end=" ")
print(f"AutoTokenizer {auto}")
sys.exit((before, raw, auto) != (9, 4, 9))
PY
