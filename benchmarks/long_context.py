"""Measures losses by position and by distance, before and after a stage of longer sequences.

    python -m benchmarks.long_context --output results.md

Each document repeats one block of random tokens, so only a model that looks back a whole block can
predict them. Blocks are 8 to 1,500 tokens in the training text, and 300 to 1,500 in the text of the
tables. Trains a trunk at 512 tokens with `--later_seq_len 2048`, then a branch at 2,048 with
`rope_theta` x 8. Both losses use the exported models: losses by position are computed as in `zerolm
evaluate`, losses by distance with transformers alone.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.contenders import argv, launcher, pretrain
from benchmarks.machine import hardware
from benchmarks.tables import parser, show, table
from tests.launching import free_port
from zerolm.evaluate.held_out import HeldOut
from zerolm.evaluate.validation import validation_loss
from zerolm.shards.reader import open_source
from zerolm.shards.writer import ShardWriter

RANKS = 2
VOCAB_SIZE, EOS_ID = 64, 0
DOCUMENT_TOKENS, SHORT, LONG = 4096, 512, 2048
TRAINED, HELD_OUT = (8, 1500), (300, 1500)  # tokens in a block
DISTANCES = (300, 500, 1000, 1500)
# A convolution gives attention the previous token, so looking back is learned within few tokens.
MODEL = {
    "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2,
    "hidden_size": 64, "intermediate_size": 128, "block_auto_adjust_ff_dim": False,
    "num_attention_heads": 2, "num_key_value_heads": 2, "conv_L_cache": 3,
    "vocab_size": VOCAB_SIZE, "pad_token_id": EOS_ID, "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID, "tie_word_embeddings": False,
    "max_position_embeddings": SHORT, "rope_theta": 1e4,
}  # fmt: skip
THETAS = (MODEL["rope_theta"], 8 * MODEL["rope_theta"])
POSITIONS = [f"loss_at_{part}_quarter" for part in ("first", "middle", "last")]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--trunk_steps", type=int, default=900)
    flags.add_argument("--steps", type=int, default=200, help="of the longer stage")
    flags.add_argument("--batch_tokens", type=int, default=16384)
    flags.add_argument("--learning_rate", type=float, default=3e-3)
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        start = time.monotonic()
        train_both(scratch, arguments)
        minutes = (time.monotonic() - start) / 60
        positions, distances = measure(scratch)
    lengths = [f"{low:,} to {high:,}" for low, high in pairwise(DISTANCES)]
    tables = [
        f"{arguments.trunk_steps:,} and {arguments.steps:,} steps of {arguments.batch_tokens:,} "
        f"tokens in {minutes:.0f} minutes. A token that cannot be predicted costs "
        f"ln {VOCAB_SIZE - 1} = {math.log(VOCAB_SIZE - 1):.3f} nats.",
        table(["model", "first quarter", "middle", "last"], positions),
        table(["model", "first time", *(f"repeated after {each}" for each in lengths)], distances),
    ]
    show(tables, hardware(), arguments.output)


def train_both(scratch: Path, arguments: argparse.Namespace) -> None:
    """Train and export the trunk and its branch."""
    tokens, steps = arguments.batch_tokens, arguments.trunk_steps
    total = steps + arguments.steps
    text = write_text(scratch / "text", total * tokens // DOCUMENT_TOKENS + 64, TRAINED, seed=1)
    write_text(scratch / "held-out", 32, HELD_OUT, seed=2)
    (scratch / "short.json").write_text(json.dumps(MODEL))
    longer = MODEL | {"max_position_embeddings": LONG, "rope_theta": THETAS[1]}
    (scratch / "long.json").write_text(json.dumps(longer))
    trunk = pretrain(
        tokens, steps, scratch / "trunk", text, deepspeed_config="ds_configs/zero1.json",
        precision="fp32", model_config=scratch / "short.json", seq_len=SHORT, later_seq_len=LONG,
        micro_batch_size=tokens // SHORT // RANKS,
        schedule="constant", warmup_tokens=steps * tokens // 40,
        learning_rate=arguments.learning_rate, checkpoint_interval=steps,
    )  # fmt: skip
    branch = [
        "pretrain.py",
        *argv(branch=scratch / "trunk", model_config=scratch / "long.json", seq_len=LONG),
        *argv(micro_batch_size=tokens // LONG // RANKS, total_tokens=total * tokens),
        *argv(run_dir=scratch / "branch"),
    ]
    for name, script in (("trunk", trunk), ("branch", branch)):
        run([*launcher(RANKS, free_port()), *script])
        run([sys.executable, "-m", "zerolm", "export", scratch / name, scratch / f"{name}-model"])


def write_text(directory: Path, num_documents: int, block: tuple[int, int], seed: int) -> Path:
    generator = np.random.default_rng(seed)
    tokenizer = {"name": "repeats", "fingerprint": "repeats", "files": []}
    with ShardWriter(
        directory, vocab_size=VOCAB_SIZE, eos_id=EOS_ID, tokenizer=tokenizer
    ) as writer:
        for _ in range(num_documents):
            writer.add(np.append(document(generator, block)[0][:-1], EOS_ID))
    return directory


def document(generator: np.random.Generator, block: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return (DOCUMENT_TOKENS,) ids that repeat one block of random ids, and the block's length.

    The length is log-uniform in `block`, (shortest, longest).
    """
    length = round(math.exp(generator.uniform(*np.log(block))))
    ids = generator.integers(1, VOCAB_SIZE, length)
    return np.resize(ids, DOCUMENT_TOKENS), length


def run(command: list[object]) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True, timeout=7200)


def measure(scratch: Path) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of both tables."""
    cases = [
        (f"trunk, {SHORT} tokens", "trunk", SHORT, THETAS[0]),
        (f"trunk, {LONG:,} tokens", "trunk", LONG, THETAS[0]),
        (f"trunk, {LONG:,} tokens, theta x 8", "trunk", LONG, THETAS[1]),
        (f"branch, {LONG:,} tokens, theta x 8", "branch", LONG, THETAS[1]),
    ]
    positions, distances = [], []
    sources = [open_source(scratch / "held-out")]
    for name, run_name, seq_len, theta in cases:
        model = load(scratch / f"{run_name}-model", theta)
        options = {"seq_len": seq_len, "micro_batch_size": 4, "rank": 0, "world_size": 1}
        held_out = HeldOut(sources, ["text"], 2**16 // seq_len, options, None)
        figures = validation_loss(model, held_out.batches("cpu"), ["text"], by_position=True)
        model.eval()
        cells = [f"{figures[key]:.3f}" for key in POSITIONS]
        positions.append([name, *cells])
        if seq_len == LONG:
            distances.append([name, *(f"{each:.3f}" for each in losses_by_distance(model))])
    return positions, distances


def load(directory: Path, theta: float) -> Any:
    """Return the exported model in float32, with another base for its rotary positions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        directory, max_position_embeddings=LONG, trust_remote_code=False
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    model = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, trust_remote_code=False
    )
    return model.eval()


def losses_by_distance(model: Any) -> list[float]:
    """Return the mean loss on tokens seen for the first time, then on repeated ones by distance."""
    import torch

    generator = np.random.default_rng(3)
    found: list[list[np.ndarray]] = [[] for _ in DISTANCES]
    for _ in range(96):
        ids, length = document(generator, HELD_OUT)
        window = torch.from_numpy(ids[: LONG + 1])[None]
        with torch.no_grad():
            logits = model(input_ids=window[:, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none").numpy()
        found[0].append(losses[: length - 1])
        found[int(np.searchsorted(DISTANCES, length, side="right")) or 1].append(
            losses[length:]  # the first token of the repetition cannot be predicted
        )
    return [float(np.concatenate(each).mean()) for each in found]


if __name__ == "__main__":
    main()
