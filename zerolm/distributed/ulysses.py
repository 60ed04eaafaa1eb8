"""Sequence parallelism: shards each sequence over several ranks with DeepSpeed's Ulysses attention.

Each rank holds all weights and a slice of each sequence. For attention, the ranks of a replica
exchange their slices of the sequence for complete sequences of a few heads, and then exchange back;
everything else is computed token by token. This applies only to training. In evaluation mode, each
rank processes its own complete sequences, of any length.

Source: Jacobs et al. 2023 (arXiv 2309.14509); Bekman et al. 2025 (arXiv 2506.13996); DeepSpeed
0.19.8, runtime/sequence_parallel/ulysses_sp.py.
"""

from typing import Any

import torch

from zerolm.distributed.layout import Layout

Batch = dict[str, torch.Tensor]
PER_TOKEN_KEYS = ("input_ids", "targets")  # tensors with a sequence dimension


def register_attention(model: Any, layout: Layout, micro_batch_size: int, seq_len: int) -> Any:
    """Replace a new model's attention with DeepSpeed's Ulysses attention. All ranks call this.

    Changes this process's table of attention functions in transformers.

    Args:
        micro_batch_size: number of sequences in a training micro-batch; evaluation may use any
            shape.
        seq_len: number of tokens in a training sequence; evaluation may use any length.

    Returns:
        The object to pass to `deepspeed.initialize` as `mpu`; None without sequence parallelism.
    """
    if layout.sequence == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=model.config._attn_implementation,
        sequence_parallel_size=layout.sequence,
        micro_batch_size=micro_batch_size,
        seq_length=seq_len,
        seq_length_is_variable=False,
        disable_in_eval=True,
    )


def shard_batch(batch: Batch, layout: Layout, rank: int) -> Batch:
    """Return this rank's slice of its replica's micro-batch, with the positions of its tokens.

    Args:
        batch: `input_ids` and `targets`, (M, T); no `document_ids`.

    Returns:
        The batch itself without sequence parallelism; otherwise tensors of shape (M, T / degree),
        with `position_ids` counted from the start of the complete sequence.
    """
    if layout.sequence == 1:
        return batch
    assert "document_ids" not in batch, "preflight refuses it"
    length, remainder = divmod(batch["input_ids"].shape[1], layout.sequence)
    assert remainder == 0, "preflight refuses it"
    first = layout.axis("sequence", rank).index * length
    shard = {name: batch[name][:, first : first + length].contiguous() for name in PER_TOKEN_KEYS}
    positions = torch.arange(first, first + length, device=batch["input_ids"].device)
    shard["position_ids"] = positions.expand(len(batch["input_ids"]), length).contiguous()
    return batch | shard
