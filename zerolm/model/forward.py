"""All forward passes of a run: training, evaluation, probes and sampling call the model only here.

A form of parallelism in which no rank has the whole model concerns these functions alone.
"""

from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch

from zerolm.distributed.pipeline import Message
from zerolm.model.architecture import router_loss_coefficient
from zerolm.model.chunked_loss import find_chunked_head
from zerolm.model.document_mask import isolating_inputs, isolating_masks
from zerolm.model.loss import COMPILED_LOSS, IGNORED, cross_entropies
from zerolm.model.stages import Stage, stage_of

# The first name is for transformers 5.24 and later, whose Mamba accepts but ignores the older name;
# the second is for earlier versions.
CACHE_NAMES = ("cache", "past_key_values")


def token_losses(
    model: Any,
    batch: dict[str, torch.Tensor],
    observe: Callable[[Any], None] | None = None,
    received: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model on a micro-batch and return the loss of each token.

    The sum of the losses, divided once by the number of targets in the GLOBAL batch, gives the
    same loss and gradient for any split into ranks and micro-batches. A mean of means would not if
    rows have different numbers of targets. A `ChunkedHead` returns the same losses.

    Args:
        model: a causal LM or a DeepSpeed engine around one.
        batch: `input_ids` and `targets`, (B, T) int64; targets are shifted, and `IGNORED` at
            positions without loss. With `document_ids` and `position_ids` (B, T) and `boundaries`,
            attention is within documents only (`zerolm.model.document_mask`); with only
            `position_ids`, rows are slices of sequences (`zerolm.distributed.ulysses`).
        observe: called with the model's output.
        received: if the model is the last of several stages, the previous one's hidden states.
            Without them, every stage of a replica must call this, and exchanges states; the losses
            are then zeros on all stages but the last (see `on_every_stage`).

    Returns:
        The float32 cross-entropies, (B, T), 0 where ignored; and the routers' weighted auxiliary
        loss, or None if the config does not set `output_router_logits`, or for a stage, which has
        only some of the routers.
    """
    inner = getattr(model, "module", model)
    if (stage := stage_of(inner)) is not None:
        if received is None:
            received = _from_previous(stage, batch["input_ids"])
        if not stage.is_last:
            _to_next(stage, batch["input_ids"], hidden_states(model, batch, received))
            return torch.zeros(batch["targets"].shape, device=batch["targets"].device), None
        stage.received = received
    inputs = _inputs(inner, batch)
    if head := find_chunked_head(inner):  # never stores all logits of the micro-batch
        with isolating_masks(batch, inner), head.computing_losses(batch["targets"], IGNORED):
            outputs = model(**inputs)
        losses = outputs.logits[..., 0]
    else:
        with isolating_masks(batch, inner):
            outputs = model(**inputs)
        of_logits = getattr(inner, COMPILED_LOSS, cross_entropies)
        losses = of_logits(outputs.logits, batch["targets"])
    if observe is not None:
        observe(outputs)
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is not None:
        auxiliary = auxiliary * (router_loss_coefficient(inner.config) or 0.0)
    return losses, auxiliary


def hidden_states(
    model: Any,
    batch: dict[str, torch.Tensor],
    received: torch.Tensor | None,
    observe: Callable[[Any], None] | None = None,
) -> torch.Tensor:
    """Run a stage that is not the last on a micro-batch; return the states to send, (B, T, H).

    Args:
        model: see `token_losses`.
        observe: called with an object whose `router_logits` are of the stage's routers.
        received: the previous stage's hidden states; None on the first stage.
    """
    inner = getattr(model, "module", model)
    stage = stage_of(inner)
    assert stage is not None and not stage.is_last
    stage.received = received
    with isolating_masks(batch, inner):
        sent: torch.Tensor = model(**_inputs(inner, batch))
    logits, stage.router_logits = stage.router_logits, ()
    if observe is not None:
        observe(SimpleNamespace(router_logits=logits))
    return sent


def on_every_stage(model: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the last stage's values on every stage. Every stage of a replica must call this.

    Args:
        values: have the same shape on every stage; may be changed.
    """
    stage = stage_of(getattr(model, "module", model))
    if stage is None:
        return values
    assert stage.link is not None
    return stage.link.broadcast(values)


def has_losses(model: Any) -> bool:
    """Return whether `token_losses` returns losses here: on no stage but the last."""
    stage = stage_of(getattr(model, "module", model))
    return stage is None or stage.is_last


def _from_previous(stage: Stage, ids_BT: torch.Tensor) -> torch.Tensor | None:
    assert stage.link is not None
    message = stage.link.exchange(ids_BT.shape, wants_states=True).states
    return None if message is None else message.values


def _to_next(stage: Stage, ids_BT: torch.Tensor, states_BTH: torch.Tensor) -> None:
    assert stage.link is not None
    stage.link.exchange(ids_BT.shape, states=Message(states_BTH))


def _inputs(inner: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of the model's forward pass."""
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "use_cache": False}
    if router_loss_coefficient(inner.config) is not None:
        inputs["output_router_logits"] = True  # JetMoE ignores its config in transformers 5.17
    if "position_ids" in batch:  # slices of sequences, or documents
        inputs["position_ids"] = batch["position_ids"]
    return inputs | isolating_inputs(batch, inner)


def next_logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the logits of the token after each of these, (B, T, V), as an exported model does.

    Every stage of a replica must call this, and gets them, in float32: some families compute
    logits in float32 whatever their weights are.
    """
    inner, logits_BTV = getattr(model, "module", model), own_logits(model, ids_BT)
    stage = stage_of(inner)
    if stage is None:
        assert logits_BTV is not None
        return logits_BTV
    if logits_BTV is None:
        shape = *ids_BT.shape, inner.config.get_text_config().vocab_size
        logits_BTV = torch.empty(shape, device=ids_BT.device)
    return on_every_stage(model, logits_BTV.float().contiguous())


def own_logits(model: Any, ids_BT: torch.Tensor) -> torch.Tensor | None:
    """Like `next_logits`, but return None on the stages that do not compute logits."""
    stage = stage_of(getattr(model, "module", model))
    if stage is not None:
        stage.received = _from_previous(stage, ids_BT)
    found = model(input_ids=ids_BT, use_cache=False)
    if stage is None or stage.is_last:
        logits_BTV: torch.Tensor = found.logits
        return logits_BTV
    _to_next(stage, ids_BT, found)
    return None


def continued_logits(
    model: Any, ids_BT: torch.Tensor, cache: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the logits after tokens that follow the cached ones, and the cache with these tokens.

    The cache is empty before the first tokens, and always if the model has none. Every stage of a
    replica must call this; stages have no cache, and all but the last get a zero for each token.
    """
    if stage_of(getattr(model, "module", model)) is not None:
        found = own_logits(model, ids_BT)
        return torch.zeros(*ids_BT.shape, 1) if found is None else found, {}
    outputs = model(input_ids=ids_BT, use_cache=True, **cache)
    # Newer versions warn of the older name, so it is not read if the first one is there.
    kept = (name for name in CACHE_NAMES if getattr(outputs, name, None) is not None)
    return outputs.logits, {name: getattr(outputs, name) for name in islice(kept, 1)}
