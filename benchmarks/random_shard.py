"""A token shard of random IDs, whose values affect neither speed nor memory."""

import json
from pathlib import Path

import numpy as np

from zerolm.shards.writer import ShardWriter

NUM_TOKENS = 4_000_000
DOCUMENT_TOKENS = 600  # each starts with the id that ends the previous document


def write_random_shard(
    directory: Path, model_config: Path | str, num_tokens: int = NUM_TOKENS
) -> None:
    """Write a shard directory of IDs from the model's vocabulary: shard-00000.bin, uint16."""
    vocab_size = json.loads(Path(model_config).read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens, dtype=np.int64)
    ids[::DOCUMENT_TOKENS] = 0
    tokenizer = {"name": "random ids", "fingerprint": "random", "files": []}
    with ShardWriter(directory, vocab_size=vocab_size, eos_id=0, tokenizer=tokenizer) as writer:
        writer.add(ids)
