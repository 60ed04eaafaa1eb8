#!/usr/bin/env bash
# lm_eval 0.4.13, transformers 5.23.0, torch 2.13.0: with a tokenizer that appends EOS to a text
# ($A </s>), the model `hf` takes the number of context tokens from the encoded context, EOS
# included. loglikelihood("a b", " c d") then scores the tokens d and </s>: the first token of the
# answer is never scored, and the context ends with EOS. Nothing is printed.
# Seen: context [2, 3, 1], scored [5, 1]; without the template context [2, 3], scored [4, 5]
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "lm_eval[hf]==0.4.13" transformers==5.23.0 tokenizers==0.23.3 \
    torch==2.13.0 numpy==2.2.6
cd "$folder" && "$folder/venv/bin/python" - <<'PY'
import sys

from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "d": 5}
found = []
for template in ("$A </s>", "$A"):
    backend = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=6, n_positions=16, n_embd=8, n_layer=1, n_head=1))
    hf = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu")
    context, scored = hf._encode_pair("a b", " c d")
    found.append((context, scored))
    print(f"{template}: context {context}, scored {scored}")
sys.exit(found != [([2, 3, 1], [5, 1]), ([2, 3], [4, 5])])
PY
