"""Sequence parallelism: a sequence over several ranks, DeepSpeed's Ulysses for its attention.

Each rank has all weights and a part of each sequence. In attention the ranks of a replica exchange
parts of the sequence for heads, and back; all else is computed token by token. Only training is cut
so: in evaluation mode each rank has whole sequences of its own, whatever their lengths are.
Source: Jacobs et al. 2023 (arXiv 2309.14509); Bekman et al. 2025 (arXiv 2506.13996); DeepSpeed
0.19.8, runtime/sequence_parallel/ulysses_sp.py.
"""

from typing import Any

import torch

from zerolm.parallel import Layout

Batch = dict[str, torch.Tensor]
OF_TOKENS = ("input_ids", "targets")


def register(model: Any, layout: Layout, micro_batch_size: int, seq_len: int) -> Any:
    """Exchange a model's attention for DeepSpeed's; return what `deepspeed.initialize` has as mpu.

    transformers' table of attention kernels is changed for this process. Every rank must call.

    Args:
        model: just built.
        micro_batch_size, seq_len: of training; what is evaluated may have any shape.
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


def own_part(batch: Batch, layout: Layout, rank: int) -> Batch:
    """Return this rank's part of a micro-batch of its replica: its tokens, and where they stand.

    Args:
        batch: with `input_ids` and `targets` (M, T); without documents that are kept apart.

    Returns:
        The same where sequences are not cut; else with (M, T / degree), and with `position_ids`.
    """
    if layout.sequence == 1:
        return batch
    assert "document_ids" not in batch, "preflight refuses it"
    length, rest = divmod(batch["input_ids"].shape[1], layout.sequence)
    assert rest == 0, "preflight refuses it"
    first = layout.part(rank) * length
    own = {name: batch[name][:, first : first + length].contiguous() for name in OF_TOKENS}
    places = torch.arange(first, first + length, device=batch["input_ids"].device)
    own["position_ids"] = places.expand(len(batch["input_ids"]), length).contiguous()
    return batch | own
