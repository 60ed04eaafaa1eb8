#!/usr/bin/env bash
# transformers 5.23.0, tokenizers 0.23.3: "add_bos_token": true in tokenizer_config.json has no
# effect beside a tokenizer.json without a post-processor, for LlamaTokenizer neither: the loaded
# tokenizer's add_bos_token is False and texts get no BOS. Nothing is printed.
# Seen: PreTrainedTokenizerFast False [2, 3]; LlamaTokenizer False [2, 3]
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3 numpy==2.2.6
cd "$folder" && "$folder/venv/bin/python" - <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

found = []
for name in ("PreTrainedTokenizerFast", "LlamaTokenizer"):
    vocabulary = {"<s>": 0, "</s>": 1, "▁a": 2, "▁b": 3, "▁": 4, "a": 5, "b": 6, "<unk>": 7}
    model = models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    Path(name).mkdir()
    tokenizer.save(f"{name}/tokenizer.json")
    config = {"tokenizer_class": name, "bos_token": "<s>", "add_bos_token": True}
    Path(name, "tokenizer_config.json").write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(name)
    found.append((name, loaded.add_bos_token, loaded.encode("a b")))
    print(*found[-1])
expected = [("PreTrainedTokenizerFast", False, [2, 3]), ("LlamaTokenizer", False, [2, 3])]
sys.exit(found != expected)
PY
