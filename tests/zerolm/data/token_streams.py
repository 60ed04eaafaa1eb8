"""Sources of random documents, and the content of streams of them, for the tests of batches."""

from dataclasses import dataclass

import numpy as np
import torch

from zerolm.data.loader import TokenStream, ValidationStream, make_loader
from zerolm.optim.schedule import BatchSchedule
from zerolm.shards.reader import open_source
from zerolm.shards.writer import ShardWriter

SEQ_LEN, EOS = 16, 3


def write_source(directory, num_tokens, seed, vocab_size=1000, shard_tokens=700):
    """Write documents of random lengths; windows cross the ends of its small shards."""
    generator = np.random.default_rng(seed)
    tokenizer = {"name": "none", "fingerprint": "0", "files": []}
    with ShardWriter(
        directory,
        vocab_size=vocab_size,
        eos_id=EOS,
        tokenizer=tokenizer,
        shard_tokens=shard_tokens,
    ) as writer:
        while num_tokens:
            length = min(num_tokens, int(generator.integers(1, 40)))
            document = generator.integers(4, vocab_size, length)
            document[-1] = EOS
            writer.add(document)
            num_tokens -= length
    return open_source(directory)


def write_sources(root):
    """Write two sources, one with ids of 16 bits and one with ids of 32."""
    return [
        write_source(root / "web", 5000, seed=1),
        write_source(root / "code", 1500, seed=2, vocab_size=70_000),  # uint32 beside uint16
    ]


def stream(sources, **changes):
    settings = {
        "weights": [0.7, 0.3],
        "seq_len": SEQ_LEN,
        "seed": 9,
        "batch_schedule": BatchSchedule(16),
        "micro_batch_size": 4,
        "shard": 0,
        "num_shards": 1,
        "position": 0,
        "end_position": 320,
    }
    return TokenStream(sources, **{**settings, **changes})


def all_ids(source):
    """Return all ids of a source, read without the project's reader."""
    files = sorted(source.directory.glob("*.bin"))
    return np.concatenate([np.fromfile(file, source.dtype) for file in files]).astype(np.int64)


@dataclass
class Ledger:
    """The rows that all ranks saw, per global batch, in order of sequence number."""

    ids: list
    inputs: list
    targets: list

    def __eq__(self, other):
        return self.ids == other.ids and all(
            torch.equal(mine, theirs)
            for name in ("inputs", "targets")
            for mine, theirs in zip(getattr(self, name), getattr(other, name), strict=True)
        )


def ledger(sources, num_shards=1, num_workers=0, **changes):
    """Read every shard in this process and join the global batches."""
    streams = [
        stream(sources, shard=shard, num_shards=num_shards, **changes)
        for shard in range(num_shards)
    ]
    loaders = [iter(make_loader(one, num_workers, pin_memory=False)) for one in streams]
    joined = Ledger([], [], [])
    position = streams[0].position
    while position < streams[0].end_position:
        size = streams[0].batch_schedule(position)
        micro_steps = size // (streams[0].micro_batch_size * num_shards)
        batches = [next(loader) for loader in loaders for _ in range(micro_steps)]
        ids = torch.cat([batch["sequence_ids"] for batch in batches])
        rows = torch.argsort(ids)
        joined.ids.append(ids[rows].tolist())
        joined.inputs.append(torch.cat([batch["input_ids"] for batch in batches])[rows])
        joined.targets.append(torch.cat([batch["targets"] for batch in batches])[rows])
        position += size
    assert all(next(loader, None) is None for loader in loaders)
    return joined


def validation(sources, **changes):
    settings = {
        "seq_len": SEQ_LEN,
        "num_sequences": 21,
        "micro_batch_size": 4,
        "shard": 0,
        "num_shards": 1,
    }
    return ValidationStream(sources, **{**settings, **changes})
