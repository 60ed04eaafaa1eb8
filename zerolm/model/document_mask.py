"""Attention that stays inside each document: what a model is given for it, and which can do it.

Three ways, by the attention kernel that the model was built with:

    eager, sdpa        a causal mask of our own where every layer attends to everything before it;
                       else, and with flex_attention, positions that begin again with each document
                       and no mask, of which transformers makes the mask that each kind of layer
                       needs (masking_utils.py, `find_packed_sequence_indices`)
    flash_attention_*  the same positions, and the documents' ends for the varlen kernel, which
                       transformers would work out of the positions for a single row alone
                       (modeling_flash_attention_utils.py, `_is_packed_sequence`)

A padding mask is never passed: one of ones switches the second and third way off without a word
(https://github.com/huggingface/transformers/issues/46634). `zerolm.train.mask_check` tries the
result out on the engine at hand.
"""

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

FULL_ATTENTION = "full_attention"
WINDOW_KEYS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
MASKED = frozenset({"eager", "sdpa"})  # kernels that take any mask


def isolating_inputs(batch: dict[str, "torch.Tensor"], model: Any) -> dict[str, Any]:
    """Return what keeps a micro-batch's documents apart, as arguments of the model's forward.

    Args:
        batch: with `document_ids` and `position_ids`, (B, T) int64.
        model: a causal LM.
    """
    kernel = model.config._attn_implementation
    ids_BT = batch["document_ids"]
    inputs: dict[str, Any] = {"position_ids": batch["position_ids"]}
    if kernel.startswith("flash"):
        return inputs | document_ends(batch["position_ids"])
    # Without values, on the meta device, transformers cannot tell where documents begin.
    if ids_BT.is_meta or (kernel in MASKED and layer_kinds(model.config) <= {FULL_ATTENTION}):
        inputs["attention_mask"] = document_mask(ids_BT, model)
    return inputs


def document_mask(ids_BT: "torch.Tensor", model: Any) -> "torch.Tensor":
    """Return a causal mask, (B, 1, T, T), that keeps attention inside each document.

    `sdpa` takes it as booleans. `eager` adds its mask to the scores, where True would count as one
    and mask nothing, so it has the lowest number of the model's dtype instead.

    Args:
        ids_BT: (B, T) int64, the number of the document that each position belongs to.
    """
    import torch

    allowed = (ids_BT[:, None, :, None] == ids_BT[:, None, None, :]).tril()
    if model.config._attn_implementation == "sdpa":
        return allowed
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(allowed.shape, dtype=dtype, device=ids_BT.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def document_ends(positions_BT: "torch.Tensor") -> dict[str, Any]:
    """Return where documents end in the rows laid end to end, as varlen kernels are told it.

    Args:
        positions_BT: (B, T) int64, 0 at the first token of each document and of each row.
    """
    import torch
    from torch.nn import functional

    flat = positions_BT.reshape(-1)
    starts = torch.nonzero(flat == 0).view(-1).to(torch.int32)
    ends = functional.pad(starts, (0, 1), value=flat.numel())
    longest = int(flat.max()) + 1  # the kernels want a number, not a tensor
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def layer_kinds(config: "PretrainedConfig") -> set[str]:
    """Return the kinds of a model's layers, in transformers' words."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # all layers are alike
        kinds = [kind for kind, key in WINDOW_KEYS.items() if getattr(text, key, None)]
    return set(kinds or [FULL_ATTENTION])


def chunks_begin_again() -> bool:
    """Tell whether transformers counts chunked attention from each document on: not in 5.17."""
    from transformers import masking_utils

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def obstacle(
    config: "PretrainedConfig", model_class: type["PreTrainedModel"], kernel: str
) -> str | None:
    """Say why a model cannot keep documents apart, None if nothing speaks against it.

    Args:
        kernel: the attention implementation asked for.
    """
    text, name = config.get_text_config(), model_class.__name__
    words = signature(model_class.forward).parameters
    if getattr(model_class, "_is_stateful", False):
        return f"{name} keeps a state that runs on from document to document"
    if "position_ids" not in words or getattr(text, "alibi", False) is True:
        return f"{name} takes no positions that begin again with each document"
    kinds = layer_kinds(config)
    for kind in sorted(kinds - {FULL_ATTENTION}):
        key = WINDOW_KEYS.get(kind)
        if key is None or not isinstance(getattr(text, key, None), int):
            return f"the model has layers of {kind}, which no mask of documents reaches"
    if "chunked_attention" in kinds and not chunks_begin_again():
        return (
            "this release of transformers counts the chunks of a row of documents from the row's "
            "beginning, not from each document's: update transformers"
        )
    if kernel.startswith("flash"):
        if not any(word.kind is Parameter.VAR_KEYWORD for word in words.values()):
            return f"{name} does not hand the ends of documents on to {kernel}"
        if "chunked_attention" in kinds:
            return f"{kernel} knows no chunks"
    return None
