"""Packed rows train like plain PyTorch; with a document mask like separate documents."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from data_prep.encode.pack import pack
from tests.end_to_end import plain_pytorch
from tests.end_to_end.recipe import BATCH, CLIPPING, PEAK, SEED, SEQ_LEN, profile, recipe
from tests.launching import EOS, LLAMA, events, rows, run_ranks, write_shards
from tests.ledger import read_sequences
from zerolm.data.order import Order
from zerolm.data.packing import PIECE
from zerolm.model.loss import IGNORED
from zerolm.shards.reader import open_source

STEPS, SAVE, KILLED = 8, 3, 5


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    directory = write_shards(tmp_path_factory.mktemp("packed") / "counting", 300, seed=4)
    pack(open_source(directory), SEQ_LEN)
    return directory


@pytest.fixture(scope="module")
def separately(shards):
    """Train with plain PyTorch on each document separately, without mask and padding."""
    return plain_training(shards, is_masked=True)


def plain_training(shards, is_masked: bool) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms; without mask, tokens attend to all before in their row."""
    tokens = plain_pytorch.read_tokens(shards)
    ends = np.fromfile(shards / f"packing-{SEQ_LEN}.rows", "<u8").astype(int).tolist()
    pieces = np.fromfile(shards / f"packing-{SEQ_LEN}.pieces", PIECE).tolist()
    order = Order([len(ends)], [1.0], SEED)
    model = plain_pytorch.initial_model(LLAMA, SEED)
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for row in order(np.arange(step * BATCH, (step + 1) * BATCH)).window.tolist():
            documents = [
                torch.from_numpy(tokens[start : start + length])
                for start, length in pieces[ends[row - 1] if row else 0 : ends[row]]
            ]
            for ids in documents if is_masked else [torch.cat(documents)]:
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
                targets = ids[1:].where(ids[:-1] != EOS, IGNORED)
                total = total + functional.cross_entropy(logits, targets, reduction="sum")
                count += int((targets != IGNORED).sum())
        (total / count).backward()
        losses.append(total.item() / count)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_packed_run_equals_training_on_separate_documents(
    tmp_path, llama, shards, separately, stage
) -> None:
    run_dir, ledger = tmp_path / "run", tmp_path / "ledger"
    ledger.mkdir()
    json_file = profile(tmp_path / "ds.json", stage, bf16=False)
    flags = recipe(llama, shards, run_dir, json_file, STEPS, micro=2)
    flags += ["--packing", "best_fit", "--document_mask", "--schedule", "constant"]
    flags += ["--warmup_tokens", 0, "--wandb", "off", "--checkpoint_interval", SAVE]
    more = {"ZEROLM_LEDGER": str(ledger)}
    killed = run_ranks(
        2, *flags, "--no-async_checkpoint", FAULT=f"step.end:*:{KILLED}:kill", **more
    )
    assert killed.returncode != 0 and "documents are kept apart by sdpa" in killed.stdout
    again = run_ranks(2, *flags, **more)
    assert again.returncode == 0, again.stdout[-4000:]
    assert [event["step"] for event in events(run_dir, "resume")] == [SAVE]
    losses, norms = separately
    np.testing.assert_allclose(list(rows(run_dir, "train/loss").values()), losses, rtol=2e-5)
    np.testing.assert_allclose(list(rows(run_dir, "train/grad_norm").values()), norms, rtol=2e-4)
    trained = read_sequences(ledger)
    for step in range(1, STEPS + 1):
        expected = list(range((step - 1) * BATCH, step * BATCH))
        times = 2 if SAVE < step <= KILLED else 1  # steps before the kill were repeated
        assert sorted(trained[step]) in (sorted(expected * times), expected)


def test_a_packed_run_without_a_document_mask_has_the_mean_gradient_per_target(
    tmp_path, llama, shards
) -> None:
    json_file = profile(tmp_path / "ds.json", 2, bf16=False)
    flags = recipe(llama, shards, tmp_path / "run", json_file, STEPS, micro=2)
    flags += ["--packing", "best_fit", "--schedule", "constant", "--warmup_tokens", 0]
    done = run_ranks(2, *flags, "--wandb", "off")
    assert done.returncode == 0, done.stdout[-4000:]
    losses, norms = plain_training(shards, is_masked=False)
    found = tmp_path / "run"
    np.testing.assert_allclose(list(rows(found, "train/loss").values()), losses, rtol=2e-5)
    np.testing.assert_allclose(list(rows(found, "train/grad_norm").values()), norms, rtol=2e-4)
