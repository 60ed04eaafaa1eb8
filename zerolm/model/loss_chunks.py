"""Decides whether to compute the loss in chunks of tokens, and chooses the size of the chunks.

Used in runs and in `launch plan`, before a model exists, so torch and transformers are imported
only inside functions. Must not depend on ZeRO or devices. `ChunkedHead` computes the loss.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zerolm.common.remembered import recall
from zerolm.model.architecture import ConfigKey, meta_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Size of a micro-batch's float32 logits above which chunks are the default; with softmax and
# gradient they take three times as much. For smaller logits, chunks do not justify another product
# with the head's weight.
LARGE_LOGIT_BYTES = 16 << 30
# size of a chunk's float32 logits: 1024 tokens with a vocabulary of 128k
CHUNK_LOGIT_BYTES = 512 << 20
TRACED_TOKENS = 8


def chunk_tokens(config: "PretrainedConfig", tokens: int, requested: int | None) -> int:
    """Return the number of tokens per loss chunk, or 0 to compute the loss without chunks.

    Args:
        tokens: number of tokens in a micro-batch.
        requested: number of tokens requested; None to choose by the size of the logits and the
            model.
    """
    if requested is not None:
        return requested
    row = 4 * config.get_text_config().vocab_size
    if tokens * row <= LARGE_LOGIT_BYTES or unsupported_reason(config):
        return 0
    return 1 << max(7, (CHUNK_LOGIT_BYTES // row).bit_length() - 1)


def unsupported_reason(config: "PretrainedConfig") -> str | None:
    """Return why a model's output head cannot compute the losses itself, or None if it can.

    The model must return the head's output tensor unchanged as its logits. A trace tests this, so
    a model that scales or caps logits is detected whatever config key controls it.
    """
    return _unsupported_reason(ConfigKey.of(config))


@lru_cache(maxsize=16)
def _unsupported_reason(key: ConfigKey) -> str | None:
    return recall("loss-chunks", key.inputs(), lambda: _found_reason(key))


def _found_reason(key: ConfigKey) -> str | None:
    import torch
    from torch import nn

    from zerolm.model import chunked_loss
    from zerolm.model.activation_memory import fused_kernels
    from zerolm.model.forward import token_losses

    model = meta_model(key.config)
    name = type(model).__name__
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"the output head of {name} is not a linear layer"
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # its loss cannot use the mask below
    chunked_loss.install(model, TRACED_TOKENS)
    head_outputs: list[tuple[Any, int]] = []
    model_outputs: list[tuple[Any, int]] = []
    head = chunked_loss.find_chunked_head(model)
    assert head is not None
    head.register_forward_hook(
        lambda module, args, output: head_outputs.append((output, output._version))
    )
    model.register_forward_hook(
        lambda module, args, output: model_outputs.append((output.logits, output.logits._version))
    )
    ids = torch.empty((1, TRACED_TOKENS), dtype=torch.long, device="meta")
    batch = dict.fromkeys(("input_ids", "targets", "document_ids", "position_ids"), ids)
    try:
        with torch.no_grad(), fused_kernels(model, eager=False):
            token_losses(model, batch)
    except Exception as error:  # any exception type, if the model class depends on values
        return f"{name} cannot be traced on the meta device ({type(error).__name__})"
    if len(head_outputs) != 1 or len(model_outputs) != 1:
        return f"{name} does not call its output head exactly once"
    (from_head, version), (from_model, version_after) = head_outputs[0], model_outputs[0]
    if from_head is not from_model or version != version_after:  # changed in place
        return f"{name} changes the logits after its output head"
    return None
