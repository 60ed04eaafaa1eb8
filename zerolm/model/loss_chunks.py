"""Whether the loss is computed in chunks of tokens, and how large they are.

Used before anything exists, by a run and by its plan alike. Standard library at import time. It
must not know about ZeRO or devices; `chunked_head` does the work.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Float32 logits of a micro-batch above which the default is chunks: with their softmax and gradient
# three times as much. Below, the memory is not worth another product with the head's weight.
LARGE_LOGIT_BYTES = 16 << 30
CHUNK_LOGIT_BYTES = 512 << 20  # of a chunk then: 1024 tokens of a vocabulary of 128k
TRACED_TOKENS = 8


def chunk_tokens(config: "PretrainedConfig", tokens: int, wanted: int | None) -> int:
    """Return how many tokens of a micro-batch have their logits at a time; 0: all of them.

    Args:
        tokens: of a micro-batch.
        wanted: of the settings; None leaves it to the size of the logits, and to the model.
    """
    if wanted is not None:
        return wanted
    row = 4 * config.get_text_config().vocab_size
    if tokens * row <= LARGE_LOGIT_BYTES or obstacle(config):
        return 0
    return 1 << max(7, (CHUNK_LOGIT_BYTES // row).bit_length() - 1)


def obstacle(config: "PretrainedConfig") -> str | None:
    """Say why a model's losses cannot be computed in its output head, None if they can.

    What the head returns must be what the model returns as its logits, the same tensor, unchanged:
    so a model that scales or caps logits is found by what it does, whatever its config calls that.
    """
    kind: Any = type(config)
    return _obstacle(config.to_json_string(), kind)


@lru_cache(maxsize=16)
def _obstacle(text: str, kind: Any) -> str | None:
    import json

    import torch
    from torch import nn

    from zerolm.model import chunked_loss
    from zerolm.model.activation_memory import fused_kernels
    from zerolm.model.architecture import meta_model
    from zerolm.model.loss import token_losses

    model = meta_model(kind.from_dict(json.loads(text)))
    name = type(model).__name__
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"the output head of {name} is not a linear layer"
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # that loss cannot read the mask below
    chunked_loss.install(model, TRACED_TOKENS)
    returned: list[tuple[Any, int]] = []
    outputs: list[Any] = []
    head = chunked_loss.head_of(model)
    assert head is not None
    head.register_forward_hook(lambda module, words, output: returned.append(_seen(output)))
    model.register_forward_hook(lambda module, words, output: outputs.append(_seen(output.logits)))
    ids = torch.empty((1, TRACED_TOKENS), dtype=torch.long, device="meta")
    batch = dict.fromkeys(("input_ids", "targets", "document_ids", "position_ids"), ids)
    try:
        with torch.no_grad(), fused_kernels(model, eager=False):
            token_losses(model, batch)
    except Exception as error:  # whatever a class runs into that computes with values or shapes
        return f"{name} cannot be traced without values ({type(error).__name__})"
    if len(returned) != 1 or len(outputs) != 1:
        return f"{name} does not call its output head once"
    (given, before), (taken, after) = returned[0], outputs[0]
    if given is not taken or before != after:
        return f"{name} changes the logits after its output head"
    return None


def _seen(tensor: Any) -> tuple[Any, int]:
    """Return a tensor and the count of the changes that were made to it in place."""
    return tensor, tensor._version
