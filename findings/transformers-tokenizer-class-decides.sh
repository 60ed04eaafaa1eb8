#!/usr/bin/env bash
# transformers 5.24.0: for some model types AutoTokenizer rebuilds the pre-tokenizer by the name in
# tokenizer_config.json and drops the one in tokenizer.json. The same file gives other ids when the
# class is Qwen2Tokenizer or GemmaTokenizer than with GPT2Tokenizer, LlamaTokenizer or the tokenizers
# library, without a word (for LlamaTokenizer the class is ignored, with a message).
# Seen: equal to the file's ids: GPT2Tokenizer True, LlamaTokenizer True, Qwen2Tokenizer False,
# GemmaTokenizer False
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
made.train_from_iterator(
    ["it costs 123 or 45 pounds"] * 20,
    trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>", "<unk>"],
    ),
)
expected = made.encode("it costs  123").ids
equal = {}
for name in ("GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer"):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "<unk>"}))
    ids = AutoTokenizer.from_pretrained(folder).encode("it costs  123", add_special_tokens=False)
    equal[name] = ids == expected
print("equal to the file's ids:", ", ".join(f"{name} {same}" for name, same in equal.items()))
sys.exit(list(equal.values()) != [True, True, False, False])
PY
