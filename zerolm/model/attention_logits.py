"""Finds each head's largest attention logit, and the projections that compute queries and keys.

Fused kernels do not return logits, so `AttentionLogits` recomputes them in blocks of queries from
the arguments of transformers' attention functions: after rotary embeddings, before softmax.
`attention_layers` finds the layers and the layout of their projections in a forward pass on the
meta device. Must not depend on how the logits are used.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerolm.engine.qk_clip import QUERY_AND_KEY, QUERY_ONLY, UNCHANGED, HeadOutputs
from zerolm.model.activation_memory import fused_kernels
from zerolm.model.architecture import ConfigKey, layer_configs, meta_model
from zerolm.model.forward import token_losses

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CPU_BLOCK_VALUES, BLOCK_VALUES = 1 << 20, 1 << 25  # number of logits in memory at a time
# Other modules in attention layers that do not change queries or keys after the projection.
OTHERS = (
    "v_proj o_proj out_proj dense Wo c_proj gate_proj g_proj attn_sub_norm rotary_emb q_a_proj "
    "q_a_layernorm kv_a_proj_with_mqa kv_a_layernorm attn_dropout resid_dropout out_drop "
    "attention_dropout dropout"
)
Pieces = tuple[tuple[int, float, int], ...]


@dataclass(frozen=True)
class AttentionLayer:
    """A layer with softmax attention.

    Attributes:
        name: the layer's module in the model.
        num_heads: number of query heads.
        head_dim: number of values in a query.
        outputs: outputs of the projections that contain queries or keys.
    """

    name: str
    num_heads: int
    head_dim: int
    outputs: tuple[HeadOutputs, ...]


class _Unsupported(Exception):
    """The queries and keys of a model cannot be rescaled by head; the message states why."""


def attention_layers(config: "PretrainedConfig") -> tuple[AttentionLayer, ...]:
    """Return a model's layers with softmax attention; `unsupported_reason` must be None for the
    model.
    """
    layers, reason = _layers(ConfigKey.of(config))
    assert reason is None, reason
    return layers


def unsupported_reason(config: "PretrainedConfig") -> str | None:
    """Return why a model's queries and keys cannot be rescaled by head, or None if they can."""
    return _layers(ConfigKey.of(config))[1]


@lru_cache(maxsize=16)
def _layers(key: ConfigKey) -> tuple[tuple[AttentionLayer, ...], str | None]:
    name = key.config.model_type
    try:
        if any(getattr(each, "clip_qkv", None) for each in layer_configs(key.config)):
            raise _Unsupported("already limits queries and keys (clip_qkv)")
        layers = _traced_layers(meta_model(key.config))
    except _Unsupported as reason:
        return (), f"{name} {reason}"
    except Exception as error:  # any exception type, if the model class depends on values
        return (), f"the attention of {name} cannot be traced ({type(error).__name__})"
    return layers, None


def _traced_layers(model: Any) -> tuple[AttentionLayer, ...]:
    names = {module: name for name, module in model.named_modules()}
    layers: dict[str, AttentionLayer] = {}

    def add(module: Any, query: torch.Tensor, *others: Any) -> None:
        heads, width = query.shape[1], query.shape[3]
        outputs = tuple(_outputs(module, names[module], heads, width))
        layers[names[module]] = AttentionLayer(names[module], heads, width, outputs)

    ids = torch.empty((1, 8), dtype=torch.long, device="meta")
    batch = dict.fromkeys(("input_ids", "targets", "document_ids", "position_ids"), ids)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    with torch.no_grad(), fused_kernels(model, False), intercepted_attention(model, add):
        token_losses(model, batch)
    if not layers:
        raise _Unsupported("does not use the attention functions of transformers")
    parameters = dict(model.named_parameters())
    used = [id(parameters.get(each.parameter)) for one in layers.values() for each in one.outputs]
    if len(set(used)) < len(used) or id(None) in used:
        raise _Unsupported("shares projections between layers")
    return tuple(layers.values())


def _outputs(module: nn.Module, name: str, heads: int, width: int) -> Iterator[HeadOutputs]:
    """Yield the outputs of an attention module's projections that contain queries or keys."""
    children, known = dict(module.named_children()), OTHERS.split()
    projections = next((each for each in LAYOUTS if set(each) <= set(children)), ())
    for child in children:
        if "norm" in child and child not in known:
            raise _Unsupported(f"normalizes queries and keys ({child}), which bounds their logits")
        if child not in known and child not in projections:
            raise _Unsupported(
                f"has an attention module with {child}, which qk-clip does not support"
            )
    if not projections:
        raise _Unsupported("has projections to queries and keys that qk-clip does not support")
    layout = LAYOUTS[projections]
    for projection, pieces in zip(projections, layout(children, module, heads, width), strict=True):
        weight = getattr(children[projection], "weight", None)
        outputs_last = type(children[projection]).__name__ == "Conv1D"  # GPT-2's
        num_outputs = sum(count for *_, count in pieces)
        if weight is None or weight.shape[-1 if outputs_last else 0] != num_outputs:
            raise _Unsupported(f"has a {projection} that qk-clip does not support")
        if all(power == UNCHANGED for _, power, _ in pieces):
            continue
        yield HeadOutputs(f"{name}.{projection}.weight", pieces, outputs_last)
        if getattr(children[projection], "bias", None) is not None:
            yield HeadOutputs(f"{name}.{projection}.bias", pieces)


def _grouped(num_keys: int, heads: int, width: int) -> tuple[Pieces, Pieces]:
    """Return the pieces for queries and for keys; keys shared by several heads are left unchanged.

    In the same way, K2 does not scale the rotary key that all heads share, because other heads must
    not change.
    """
    own = num_keys == heads * width
    power = QUERY_AND_KEY if own else QUERY_ONLY
    queries = tuple((head, power, width) for head in range(heads))
    return queries, queries if own else ((0, UNCHANGED, num_keys),)


def _separate(
    children: Mapping[str, Any], module: Any, heads: int, width: int
) -> tuple[Pieces, ...]:
    return _grouped(children["k_proj"].weight.shape[0], heads, width)


def _latent(children: Mapping[str, Any], module: Any, heads: int, width: int) -> tuple[Pieces, ...]:
    """Return the pieces for multi-head latent attention, where all heads share the rotary key (K2,
    algorithm 1).
    """
    rotary = width - module.qk_nope_head_dim
    parts = ((QUERY_AND_KEY, module.qk_nope_head_dim), (QUERY_ONLY, rotary))
    queries = tuple((head, power, count) for head in range(heads) for power, count in parts)
    parts = ((QUERY_AND_KEY, module.qk_nope_head_dim), (UNCHANGED, module.v_head_dim))
    return queries, tuple((head, power, count) for head in range(heads) for power, count in parts)


def _side_by_side(
    children: Mapping[str, Any], module: Any, heads: int, width: int
) -> tuple[Pieces, ...]:
    """Return the pieces if all queries are followed by all keys and all values, as in GPT-2's
    `c_attn` and Phi-3's `qkv_proj`; CodeGen has query, value and key of one shard after another.
    """
    if hasattr(module, "mp_num"):
        return (_in_shards(module.mp_num, heads, width),)
    weight = (children.get("c_attn") or children["qkv_proj"]).weight
    total = weight.shape[-1 if "c_attn" in children else 0]
    num_keys = (total - heads * width) // 2
    queries, keys = _grouped(num_keys, heads, width)
    return ((*queries, *keys, (0, UNCHANGED, num_keys)),)


def _in_shards(num_shards: int, heads: int, width: int) -> Pieces:
    """Return the pieces if each shard's queries are followed by its values and its keys; a head may
    be in several shards.
    """
    values = heads * width // num_shards
    size, found = math.gcd(values, width), []
    for start in range(0, heads * width, values):
        own = [
            (place // width, QUERY_AND_KEY, size) for place in range(start, start + values, size)
        ]
        found += [*own, (0, UNCHANGED, values), *own]
    return tuple(found)


def _by_head(
    children: Mapping[str, Any], module: Any, heads: int, width: int
) -> tuple[Pieces, ...]:
    """Return the pieces if each head's query, key and value are adjacent, as in GPT-NeoX."""
    parts = ((QUERY_AND_KEY, 2 * width), (UNCHANGED, width))
    return (tuple((head, power, count) for head in range(heads) for power, count in parts),)


# {names of projections: function that returns the pieces for each of them}
LAYOUTS: dict[tuple[str, ...], Callable[..., tuple[Pieces, ...]]] = {
    ("q_b_proj", "kv_b_proj"): _latent,
    ("q_proj", "kv_b_proj"): _latent,
    ("q_proj", "k_proj"): _separate,
    ("c_attn",): _side_by_side,
    ("qkv_proj",): _side_by_side,
    ("query_key_value",): _by_head,
}


@contextmanager
def intercepted_attention(model: Any, observe: Callable[..., None]) -> Iterator[None]:
    """Inside this context, call `observe` before each attention function.

    Args:
        observe: called with module, query (B, H, T, D), key (B, K, T, D), mask, and a dict of the
            other arguments.
    """
    import sys

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kernel = model.config._attn_implementation
    registered = ALL_ATTENTION_FUNCTIONS.get(kernel)

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any
    ) -> Any:
        observe(module, query, key, attention_mask, more)
        # The table does not contain the eager function, which is in the model's Python module.
        function = registered or sys.modules[type(module).__module__].eager_attention_forward
        return function(module, query, key, value, attention_mask, **more)

    ALL_ATTENTION_FUNCTIONS[kernel] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[kernel]


class AttentionLogits:
    """Measures each head's largest logit over a step's micro-batches, on one rank.

    Every rank must make the same calls in each step: `begin`, `observing` around each forward
    pass, and `largest`. Forward passes that gradient checkpointing recomputes are outside
    `observing`.

    Args:
        model: the engine's module, not compiled.
        layers: the layers to measure, some of which may be on other pipeline stages; if empty, all
            methods do nothing.
    """

    def __init__(self, model: Any, layers: tuple[AttentionLayer, ...], device: torch.device):
        modules = dict(model.named_modules())
        self._model, self.layers = model, layers
        numbers = ((number, modules.get(layer.name)) for number, layer in enumerate(layers))
        self._numbers = {module: number for number, module in numbers if module is not None}
        self._largest = [torch.empty(layer.num_heads, device=device) for layer in layers]
        self._documents: torch.Tensor | None = None

    def begin(self) -> None:
        """Start a step."""
        for largest in self._largest:
            largest.fill_(-torch.inf)

    @contextmanager
    def observing(self, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Measure a micro-batch's forward pass inside this context.

        `document_ids` (B, T) in the batch confine attention to documents.
        """
        if not self.layers:
            yield
            return
        self._documents = batch.get("document_ids")
        with intercepted_attention(self._model, self._observe):
            yield

    def largest(self) -> list[list[float]]:
        """Return the largest logit over all ranks, for each layer and head. Every rank must call
        this.
        """
        if not self.layers:
            return []
        figures = torch.cat(self._largest)
        torch.distributed.all_reduce(figures, op=torch.distributed.ReduceOp.MAX)
        return [each.tolist() for each in figures.cpu().split([len(one) for one in self._largest])]

    def _observe(self, module: Any, query: Any, key: Any, mask: Any, more: Mapping[str, Any]):
        scaling = more.get("scaling")
        found = largest_logits(
            query,
            key,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            mask,
            documents_BT=self._documents,
            window=more.get("sliding_window"),
        )
        largest = self._largest[self._numbers[module]]
        torch.maximum(largest, found, out=largest)


def flops_per_token(layers: Sequence[AttentionLayer], seq_len: int) -> float:
    """Return the FLOPs of the measurement: half of all query-key products, because of causality."""
    return float(sum(layer.num_heads * layer.head_dim for layer in layers) * seq_len)


def block_values(
    layers: Sequence[AttentionLayer], micro_batch_size: int, seq_len: int, device: str
) -> int:
    """Return the number of logits in memory at a time on a type of device."""
    of_query = micro_batch_size * max(layer.num_heads for layer in layers) * seq_len
    return of_query * min(seq_len, _block_rows(of_query, device))


def _block_rows(values_of_query: int, device: str) -> int:
    limit = CPU_BLOCK_VALUES if device == "cpu" else BLOCK_VALUES
    return max(1, limit // values_of_query)


@torch.no_grad()
def largest_logits(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    *,
    documents_BT: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return each head's largest logit over the query-key pairs that attend, as float32 of shape
    (H,).

    Args:
        scaling: factor for query-key products.
        mask: (B or 1, H or 1, T, T). Pairs that attend are True or, in a float mask, not the lowest
            number. If None, a query attends to its own and earlier keys in the same document and
            window.
        window: number of keys per query; None for all.
    """
    batch, heads, length, width = query_BHTD.shape
    groups = key_BKTD.shape[1]
    rows = _block_rows(batch * heads * length, query_BHTD.device.type)
    keys_BKDT = key_BKTD.transpose(2, 3)
    positions = torch.arange(length, device=query_BHTD.device)
    found = []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        queries = (query_BHTD[:, :, start:stop] * scaling).reshape(batch, groups, -1, width)
        logits = (queries @ keys_BKDT[..., :stop]).view(batch, heads, stop - start, stop)
        hidden = _hidden_pairs(mask, documents_BT, window, positions, start, stop)
        # Without a mask, documents or a window, only pairs near the diagonal need hiding.
        logits[..., stop - hidden.shape[-1] :].masked_fill_(hidden, -torch.inf)
        found.append(logits.amax((0, 2, 3)))
    return torch.stack(found).amax(0).float()


def _hidden_pairs(
    mask: torch.Tensor | None,
    documents_BT: torch.Tensor | None,
    window: int | None,
    positions: torch.Tensor,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Return a mask of the pairs that do not attend, for the queries from `start` to `stop` and the
    last keys before `stop`.
    """
    if mask is not None:
        mask = mask[..., start:stop, :stop]
        return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    if documents_BT is None and window is None:
        return positions[start:stop, None] < positions[start:stop]
    distance = positions[start:stop, None] - positions[:stop]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    if documents_BT is None:
        return hidden
    return (hidden | (documents_BT[:, start:stop, None] != documents_BT[:, None, :stop]))[:, None]
