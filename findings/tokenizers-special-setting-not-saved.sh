#!/usr/bin/env bash
# tokenizers 0.23.3: encode_special_tokens = True, with which "</s>" in a document is text, is not in
# tokenizer.json, and also missing after copy.deepcopy and pickle, hence in the worker processes of a
# tokenizing pipeline: there the same document has an end-of-text token in the middle.
# Seen: a </s> b: 6 tokens; to_str and from_str: 3; deepcopy: 3; pickle: 3; in a worker process: 3
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
cat >"$folder/encode.py" <<'PY'
import copy
import multiprocessing
import pickle
import sys

from tokenizers import Tokenizer, models, pre_tokenizers

TEXT = "a</s>b"


def count(tokenizer):
    return len(tokenizer.encode(TEXT).ids)


if __name__ == "__main__":
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(set(TEXT)))}, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.encode_special_tokens = True
    found = {
        "set": count(tokenizer),
        "from_str": count(Tokenizer.from_str(tokenizer.to_str())),
        "deepcopy": count(copy.deepcopy(tokenizer)),
        "pickle": count(pickle.loads(pickle.dumps(tokenizer))),
    }
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["worker process"] = pool.apply(count, (tokenizer,))
    print(f"tokens of {TEXT}:", ", ".join(f"{name} {number}" for name, number in found.items()))
    sys.exit(list(found.values()) != [6, 3, 3, 3, 3])
PY
"$folder/venv/bin/python" "$folder/encode.py"
