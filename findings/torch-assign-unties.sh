#!/usr/bin/env bash
# torch 2.13.0: load_state_dict(assign=True), the way to fill a model built on the meta device, makes
# of one tied parameter two Parameters with the same memory, so an optimizer updates the weight twice
# per step, each time with a part of its gradient, and parameters() counts it twice. With a
# checkpoint that has the weight in two tensors (safetensors, to_empty), the tie is gone altogether.
# Seen: tied: True before, False after, same memory True; parameters 1 before, 2 after; AdamW's first
# update of the weight with lr 0.1: -0.1 before, -0.2 after
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PY'
import sys

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(2, 2)
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def update(model):
    """Return AdamW's first change of a weight that both places use."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
    before = model.head.weight.detach().clone()
    model(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    return round((model.head.weight.detach() - before)[0, 0].item(), 3)


original = Model()
torch.nn.init.ones_(original.embedding.weight)
with torch.device("meta"):
    model = Model()
tied_before = model.embedding.weight is model.head.weight
model.load_state_dict(original.state_dict(), assign=True)
tied_after = model.embedding.weight is model.head.weight
same = model.embedding.weight.data_ptr() == model.head.weight.data_ptr()
counts = [len(list(each.parameters())) for each in (original, model)]
saved = {name: tensor.clone() for name, tensor in original.state_dict().items()}
after, before = update(model), None
original.load_state_dict(saved)
before = update(original)
print(f"tied before {tied_before}, after {tied_after}, same memory {same};", end=" ")
print(f"parameters {counts[0]}, then {counts[1]}; first update {before}, then {after}")
sys.exit(tied_after or not (tied_before and same) or counts != [1, 2] or after != 2 * before)
PY
