"""Vocabularies around 65,536, the largest whose ids fit in two bytes: tokenized and trained on."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data_prep.encode.tokenized import run_here
from tests.end_to_end.recipe import profile, recipe
from tests.launching import LLAMA, rows, run_ranks, write_json

EOS, LAST = "<|endoftext|>", "z"


def write_tokenizer(directory: Path, vocab_size: int) -> Path:
    """Write a tokenizer of bytes, in which the letter z has the largest id."""
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {LAST})
    words = [EOS, *letters]
    words += [f"unused {number}" for number in range(vocab_size - len(words) - 1)]
    vocabulary = {word: number for number, word in enumerate([*words, LAST])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.save_pretrained(directory)
    return directory


@pytest.mark.soak
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_largest_id_is_stored_and_trained_on(tmp_path, vocab_size, dtype) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", vocab_size)
    (source,) = run_here(["zebra puzzle " * 20] * 20, tmp_path / "text", tokenizer)
    shards = tmp_path / "text" / "train"
    assert source.vocab_size == vocab_size
    (path,) = shards.glob("*.bin")
    ids = np.fromfile(path, dtype)
    assert ids.max() == vocab_size - 1
    assert len(ids) == 20 * (20 * len("zebra puzzle ") + 1)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = {**LLAMA, **small, "vocab_size": vocab_size}
    model = write_json(tmp_path / "model.json", config)
    ds_json = profile(tmp_path / "ds.json", 2, bf16=False)
    done = run_ranks(
        1, *recipe(model, shards, tmp_path / "run", ds_json, 2, micro=8), "--wandb", "off",
        timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert all(loss > 0 for loss in rows(tmp_path / "run", "train/loss").values())
    too_small = write_json(tmp_path / "small.json", {**config, "vocab_size": vocab_size - 1})
    refused = run_ranks(
        1, *recipe(too_small, shards, tmp_path / "refused", ds_json, 2, micro=8), timeout=550
    )
    assert refused.returncode == 2 and str(vocab_size) in refused.stdout, refused.stdout[-4000:]
