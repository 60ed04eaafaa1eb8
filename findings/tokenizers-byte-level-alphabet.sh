#!/usr/bin/env bash
# tokenizers 0.23.3: a byte-level BPE that is trained without initial_alphabet knows only the bytes of
# its training text. Other characters are dropped by encode without an error: there is no unknown
# token, and the text that decode returns is shorter.
# Seen: zebra becomes era, née becomes e; with the alphabet zebra and née
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def trained(alphabet: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator(["there are more"] * 10, trainer)
    return made


texts = ["zebra", "née"]
short, full = trained([]), trained(sorted(pre_tokenizers.ByteLevel.alphabet()))
lost = [short.decode(short.encode(text).ids) for text in texts]
kept = [full.decode(full.encode(text).ids) for text in texts]
print(f"{texts} become {lost}; with the alphabet {kept}")
sys.exit(kept != texts or all(len(a) == len(b) for a, b in zip(lost, texts, strict=True)))
PY
