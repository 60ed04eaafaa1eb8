#!/usr/bin/env bash
# datatrove 0.10.1, tokenizers 0.23.3: a tokenizing step (PipelineStepWithTokenizer, which
# DocumentTokenizer and MegatronDocumentTokenizer are) with an eos_token replaces the tokenizer's
# post-processor. The BOS that the tokenizer itself puts before each text is then missing in the
# written documents; nothing is printed.
# Seen: tokenizer [0, 2, 3], step without eos_token [0, 2, 3], step with eos_token [2, 3, 1]
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datatrove==0.10.1 tokenizers==0.23.3 numpy==2.2.6
cd "$folder" && "$folder/venv/bin/python" - <<'PY'
import sys

from datatrove.utils.tokenization import PipelineStepWithTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="</s>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.add_special_tokens(["<s>", "</s>"])
tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
tokenizer.save("tokenizer.json")


class Step(PipelineStepWithTokenizer):
    def run(self, data, rank=0, world_size=1):
        pass


own = tokenizer.encode("a b").ids
without = Step("tokenizer.json").tokenizer.encode("a b").ids
with_eos = Step("tokenizer.json", eos_token="</s>").tokenizer.encode("a b").ids
print(f"tokenizer {own}, step without eos_token {without}, step with eos_token {with_eos}")
sys.exit((own, without, with_eos) != ([0, 2, 3], [0, 2, 3], [2, 3, 1]))
PY
