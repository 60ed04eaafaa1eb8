"""Attention within documents only: the required model inputs, and which models support it.

The inputs depend on the model's attention implementation:

    eager, sdpa        if all layers have full attention and the model has no router loss, which
                       takes only padding masks: a causal mask made here
    eager, sdpa        otherwise: positions that restart with each document and no mask;
                       transformers makes the mask of each kind of layer, which `isolating_masks`
                       limits to documents
    flex_attention     the same
    flash_attention_*  the same positions, and the document boundaries for the varlen kernel, which
                       transformers derives from the positions only for a single row
                       (modeling_flash_attention_utils.py, `_is_packed_sequence`)
    varlen             the same; without documents, the boundaries of the rows

A padding mask is never passed: even one of all ones silently disables the separation of documents
(https://github.com/huggingface/transformers/issues/46634). `zerolm.attention.mask_check` tests the
result with the engine.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from zerolm.config.settings import VARLEN
from zerolm.engine import replaced
from zerolm.model.architecture import layer_configs, router_loss_coefficient

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
WINDOW_KEYS = {SLIDING_ATTENTION: "sliding_window", "chunked_attention": "attention_chunk_size"}
# Models in which attention within a document depends on the rest of the row, whatever the mask.
NEVER_ISOLATED = {
    "blt": "forms patches of bytes that may belong to two documents",
    "doge": "selects the keys of a query among those of the whole row",
    "openai-gpt": "takes no mask that differs by query",
    "reformer": "hashes the tokens of the whole row",
}
ANY_MASK = frozenset({"eager", "sdpa"})  # implementations that accept any mask


def isolating_inputs(batch: dict[str, "torch.Tensor"], model: Any) -> dict[str, Any]:
    """Return arguments for the model's forward that separate a micro-batch's documents.

    Args:
        batch: `input_ids`; for attention within documents also `document_ids` and `position_ids`,
            (B, T) int64, and `boundaries`, (D + 1,) int32.
    """
    kernel = model.config._attn_implementation
    if "document_ids" not in batch:
        if kernel != VARLEN:
            return {}
        ids = batch["input_ids"]
        return boundary_arguments(_row_boundaries(ids), ids.shape[1])
    inputs: dict[str, Any] = {"position_ids": model_positions(batch, model)}
    if _takes_boundaries(kernel):
        return inputs | boundary_arguments(batch["boundaries"], batch["position_ids"].shape[1])
    # On the meta device, transformers cannot read the positions.
    if batch["document_ids"].is_meta or _takes_own_mask(model.config):
        inputs["attention_mask"] = document_mask(batch["document_ids"], model)
    return inputs


def _takes_boundaries(kernel: str) -> bool:
    return kernel == VARLEN or kernel.startswith("flash")


def _takes_own_mask(config: "PretrainedConfig") -> bool:
    """Return whether this module creates the model's mask."""
    full = layer_types(config) <= {FULL_ATTENTION}
    plain = router_loss_coefficient(config) is None
    return config._attn_implementation in ANY_MASK and full and plain


@contextmanager
def isolating_masks(batch: dict[str, "torch.Tensor"], model: Any) -> Iterator[None]:
    """Limit masks created by transformers inside this context to the batch's documents, if any.

    Most models create masks from the positions, but gpt_oss and afmoe do not pass the positions to
    transformers. Transformers would search the positions for document boundaries, which
    synchronises with the device. Here, the documents, or the fact that there are none, are passed
    directly. Kernels that take boundaries need no mask.
    """
    kernel, documents = model.config._attn_implementation, batch.get("document_ids")
    if documents is None and kernel != VARLEN and _positions_depend_on_ids(model):
        yield
        return
    if _takes_boundaries(kernel):
        masks = _replaced_masks(kernel, _no_mask) if kernel == VARLEN else nullcontext()
        with told_documents(None), masks:
            yield
        return
    made_by_transformers = kernel in (*ANY_MASK, "flex_attention")
    if documents is None or not made_by_transformers or _takes_own_mask(model.config):
        with told_documents(documents):
            yield
        return
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
    )

    original = ALL_MASK_ATTENTION_FUNCTIONS[kernel]
    same_document = packed_sequence_mask_function(documents)

    def mask(*arguments: Any, mask_function: Any = causal_mask_function, **more: Any) -> Any:
        more["allow_is_causal_skip"] = False
        return original(*arguments, mask_function=and_masks(mask_function, same_document), **more)

    with told_documents(documents), _replaced_masks(kernel, mask):
        yield


@contextmanager
def _replaced_masks(kernel: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside this context, make transformers call a given function to create a kernel's masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS[kernel] = function
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[kernel]


def _no_mask(*arguments: Any, **more: Any) -> None:
    return None


@contextmanager
def told_documents(documents_BT: "torch.Tensor | None") -> Iterator[None]:
    """Inside this context, make transformers use these documents instead of deriving them from
    positions.
    """
    from transformers import masking_utils

    with replaced.installed(
        masking_utils, "find_packed_sequence_indices", lambda position_ids: documents_BT
    ):
        yield


def _positions_depend_on_ids(model: Any) -> bool:
    """Return whether position counting skips padding ids, as in RoBERTa-style families."""
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    return hasattr(embeddings, "create_position_ids_from_input_ids")


def model_positions(batch: dict[str, "torch.Tensor"], model: Any) -> "torch.Tensor":
    """Return the positions (int64, (B, T)) that a model would assign to each document alone.

    They start at 0. In RoBERTa-style models they start at the padding id + 1, and padding ids in a
    document are not counted: their position is the padding id itself.
    """
    if not _positions_depend_on_ids(model):
        return batch["position_ids"]
    import torch

    places, padding = batch["position_ids"], model.base_model.embeddings.padding_idx
    counted = (batch["input_ids"] != padding).long()
    counts = counted.cumsum(1)
    starts = torch.arange(places.shape[1], device=places.device) - places
    before = (counts - counted).gather(1, starts)  # earlier in the document
    return (counts - before) * counted + padding


def document_mask(ids_BT: "torch.Tensor", model: Any) -> "torch.Tensor":
    """Return a causal mask within documents, (B, 1, T, T), given each token's document number, (B,
    T).

    The mask is boolean for `sdpa`. `eager` adds it to the scores, so there it contains 0 or the
    lowest number of the model's dtype.
    """
    import torch

    allowed = (ids_BT[:, None, :, None] == ids_BT[:, None, None, :]).tril()
    if model.config._attn_implementation == "sdpa":
        return allowed
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(allowed.shape, dtype=dtype, device=ids_BT.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def boundary_arguments(boundaries: "torch.Tensor", length: int) -> dict[str, Any]:
    """Return arguments for a model's forward with kernels that take document boundaries.

    The data loader computes the boundaries on the host, so no step waits for the device.

    Args:
        boundaries: (D + 1,) int32: the start of each document in the concatenated rows, and the
            end of the last one.
        length: number of tokens per row, an upper bound on document lengths. The kernels need the
            upper bound as a number. The longest document's length would differ between
            micro-batches, and blocks would have to be compiled for each value.
    """
    if compiler := sys.modules.get("torch._dynamo"):
        # makes one graph work for any number of documents
        compiler.maybe_mark_dynamic(boundaries, 0)
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": length,
        "max_length_k": length,
    }


def _row_boundaries(ids_BT: "torch.Tensor") -> "torch.Tensor":
    """Return the document boundaries for rows that each consist of one document."""
    import torch

    stop, length = ids_BT.numel() + 1, ids_BT.shape[1]
    return torch.arange(0, stop, length, dtype=torch.int32, device=ids_BT.device)


def layer_types(config: "PretrainedConfig") -> set[str]:
    """Return the types of a model's layers, under transformers' names."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types is None:  # all layers are alike
        types = [name for name, key in WINDOW_KEYS.items() if _window(config, key)]
    return set(types or [FULL_ATTENTION])


def _window(config: "PretrainedConfig", key: str) -> int | None:
    """Return the largest window over all layers; None if no layer has one."""
    found = [getattr(layer, key, None) for layer in layer_configs(config)]
    return max((width for width in found if isinstance(width, int)), default=None)


def chunks_restart_at_documents() -> bool:
    """Return whether attention chunks restart at each document, unlike in transformers 5.17."""
    from transformers import masking_utils

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def unsupported_reason(
    config: "PretrainedConfig", model_class: type["PreTrainedModel"], kernel: str
) -> str | None:
    """Return why a model cannot separate documents with a given attention kernel, or None if it
    can.
    """
    text, name = config.get_text_config(), model_class.__name__
    parameters = signature(model_class.forward).parameters
    if getattr(model_class, "_is_stateful", False):
        return f"{name} carries state from one document to the next"
    if "position_ids" not in parameters or getattr(text, "alibi", False) is True:
        return f"{name} takes no positions that restart with each document"
    if config.model_type in NEVER_ISOLATED:
        return f"{name} {NEVER_ISOLATED[config.model_type]}"
    types = layer_types(config)
    for layer_type in sorted(types - {FULL_ATTENTION}):
        key = WINDOW_KEYS.get(layer_type)
        if key is None or not _window(config, key):
            return f"the model has {layer_type} layers, to which no document mask applies"
    if "chunked_attention" in types and not chunks_restart_at_documents():
        return (
            "this release of transformers counts attention chunks from the start of the row, not "
            "from each document's start: update transformers"
        )
    if kernel.startswith("flash"):
        if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            return f"{name} does not pass document boundaries to {kernel}"
        if "chunked_attention" in types:
            return f"{kernel} does not support chunked attention"
    return None
