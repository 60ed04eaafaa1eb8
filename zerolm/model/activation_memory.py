"""What a micro-batch keeps for its backward pass: the real class, traced on the meta device.

The model runs forward without memory, and each tensor that autograd saves is counted once, by the
layer that saves it. So it holds for every architecture, and follows the class as it changes. What
a fused attention kernel saves is counted as FlashAttention's. Knows nothing of ZeRO or devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zerolm.config.settings import SELECTIVE, Recompute
from zerolm.model.activation_checkpointing import is_kept

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

FUSED = "zerolm_fused_on_meta"
LOGIT_GRADIENT_BYTES = 8  # float32 gradients of the log-probabilities and of the logits, at once


@dataclass(frozen=True)
class Activations:
    """Bytes that one sequence keeps in a forward pass; all grow with the sequences of a batch.

    Attributes:
        layers: inside the layers that gradient checkpointing covers.
        largest_layer: of one of them, which it computes again.
        inputs: of these layers, which is what it keeps of them.
        kept: inputs, and what `--gradient_checkpointing selective` keeps beside them.
        largest_again: of what it then computes again, in one layer.
        outside: of embeddings, the last norm and the output head.
        loss: what the cross-entropy keeps, float32 log-probabilities.
        loss_peak: what its backward pass needs beside, before anything else is given back.
        chunk: of the loss whatever the batch, where its logits come in chunks; it does not grow.
    """

    layers: int
    largest_layer: int
    inputs: int
    outside: int
    loss: int
    loss_peak: int
    chunk: int = 0
    kept: int = 0
    largest_again: int = 0

    def _of_layers(self, checkpointing: Recompute) -> tuple[int, int]:
        """Return what the layers keep, and the most that one of them computes again."""
        if checkpointing == SELECTIVE:
            return self.kept, self.largest_again
        return (self.inputs, self.largest_layer) if checkpointing else (self.layers, 0)

    def saved(self, checkpointing: Recompute) -> int:
        """Return what is kept between the forward and the backward pass."""
        return self._of_layers(checkpointing)[0] + self.outside + self.loss

    def peak(self, checkpointing: Recompute, sequences: int = 1) -> int:
        """Return the most that is there at once: as the backward pass begins, or in a layer.

        With checkpointing the layer that is computed again comes after the logits are gone.

        Args:
            sequences: of a micro-batch.
        """
        base, again = self._of_layers(checkpointing)
        kept = sequences * (base + self.outside)
        return kept + max(self.loss_bytes(sequences), sequences * again)

    def loss_bytes(self, sequences: int) -> int:
        """Return what the loss of a micro-batch needs at its peak."""
        return sequences * (self.loss + self.loss_peak) + self.chunk

    def chunked(self, tokens: int, config: "PretrainedConfig", precision: str) -> "Activations":
        """Return the same with the logits of so many tokens at a time (`chunked_head`).

        Instead of the log-probabilities the loss keeps nothing; its peak is a chunk's logits, with
        their softmax and, in 16 bits, a copy, beside the float32 sum of the weight's gradient; or
        then the gradient of a chunk in 16 bits beside that sum.
        """
        text = config.get_text_config()
        weight = text.vocab_size * getattr(text, "hidden_size", 0)
        logits = tokens * text.vocab_size
        if precision == "fp32":
            chunk = 8 * logits + 4 * weight
        else:
            chunk = max(10 * logits + 4 * weight, 2 * logits + 6 * weight)
        return replace(self, loss=0, loss_peak=0, chunk=chunk)


def trace(config: "PretrainedConfig", seq_len: int, precision: str, *, eager: bool) -> Activations:
    """Trace the forward pass and the loss of one sequence on the meta device.

    Args:
        precision: of the weights: `fp32`, `bf16` or `fp16`.
        eager: attention that keeps all its scores, instead of a fused kernel.

    Raises:
        ConfigError: the class cannot be built from these values.
        Exception: of any kind, where a class computes with values that are not there.
    """
    kind: Any = type(config)
    return _trace(config.to_json_string(), kind, seq_len, precision, eager)


@lru_cache(maxsize=64)
def _trace(text: str, kind: Any, seq_len: int, precision: str, eager: bool) -> Activations:
    import json

    import torch

    from zerolm.model.architecture import meta_model
    from zerolm.model.loss import token_losses

    model = meta_model(kind.from_dict(json.loads(text)))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    _cast(model, dtype)
    model.train()
    model.config.use_cache = False
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # that loss cannot read the mask below
    ids = torch.empty((1, seq_len), dtype=torch.long, device="meta")
    # With a mask of our own transformers does not look at values to make one.
    batch = dict.fromkeys(("input_ids", "targets", "document_ids", "position_ids"), ids)
    counter = _Counter(model)
    with fused_kernels(model, eager, counter.keep), counter, counter.products:
        losses, _ = token_losses(model, batch)
    del losses
    vocabulary = model.config.get_text_config().vocab_size
    loss = 4 * vocabulary * seq_len
    return Activations(
        layers=sum(counter.layers),
        largest_layer=max(counter.layers, default=0),
        inputs=sum(counter.inputs),
        kept=sum(counter.inputs) + sum(counter.kept),
        largest_again=max(counter.again, default=0),
        outside=max(0, counter.outside - loss),
        loss=loss,
        loss_peak=LOGIT_GRADIENT_BYTES * vocabulary * seq_len,
    )


def _cast(model: "PreTrainedModel", dtype: "torch.dtype") -> None:
    """Cast the parameters, and leave float32 buffers as `model.build_model` does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class _Counter:
    """Counts what autograd saves, each storage once, weights left out."""

    def __init__(self, model: "PreTrainedModel"):
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.layers: list[int] = []
        self.inputs: list[int] = []
        self.kept: list[int] = []
        self.again: list[int] = []
        self.products = _products(self.keep)
        self.outside = 0
        self._inside = False
        self._kept: list[Any] = list(model.parameters())  # holds them: no address is used again
        self._seen = {one.untyped_storage()._cdata for one in self._kept}
        self._products: set[int] = set()
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                self._handles += [before, module.register_forward_hook(self._leave)]

    def __enter__(self) -> "_Counter":
        import torch

        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _pack(self, tensor: "torch.Tensor") -> "torch.Tensor":
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(tensor)
            if self._inside:
                self.layers[-1] += storage.nbytes()
                if storage._cdata not in self._products:
                    self.again[-1] += storage.nbytes()
            else:
                self.outside += storage.nbytes()
        return tensor

    def keep(self, *outputs: Any) -> None:
        """Count outputs of matrix products and of attention in a layer."""
        for output in outputs if self._inside else ():
            if (storage := output.untyped_storage())._cdata not in self._products:
                self._products.add(storage._cdata)
                self._kept.append(output.detach())
                self.kept[-1] += storage.nbytes()

    def _enter(self, module: Any, words: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = next(one for one in (*words, *named.values()) if hasattr(one, "untyped_storage"))
        self.inputs.append(hidden.numel() * hidden.element_size())
        for figures in (self.layers, self.kept, self.again):
            figures.append(0)
        self._inside = True

    def _leave(self, module: Any, words: Any, output: Any) -> None:
        self._inside = False


def _products(keep: Callable[..., None]) -> Any:
    """Return a mode that hands each output that `selective` keeps to `keep`."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            output = func(*args, **(kwargs or {}))
            if is_kept(func):
                keep(*(one for one in tree_leaves(output) if hasattr(one, "untyped_storage")))
            return output

    return Products()


@contextmanager
def fused_kernels(
    model: "PreTrainedModel", eager: bool, keep: Callable[..., None] = lambda *outputs: None
) -> Iterator[None]:
    """Let fused kernels save on the meta device what they save elsewhere, and compute nothing.

    Args:
        keep: is given the outputs of each.
    """
    import torch
    from transformers.integrations import moe
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    class Attention(torch.autograd.Function):
        """FlashAttention (Dao et al. 2022, arXiv 2205.14135): inputs, output, sums of the rows."""

        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            batch, heads, length, _ = query.shape
            output = query.new_empty(batch, length, heads, value.shape[-1])
            rows = query.new_empty(batch, heads, length, dtype=torch.float32)
            ctx.save_for_backward(query, key, value, output, rows)
            keep(output, rows)
            return output

    class GroupedProduct(torch.autograd.Function):
        """The experts' matrix product, whose own meta version knows bf16 only."""

        @staticmethod
        def forward(ctx: Any, tokens: Any, weight: Any, offsets: Any) -> Any:
            ctx.save_for_backward(tokens, weight, offsets)
            output = tokens.new_empty(tokens.shape[0], weight.shape[-1])
            keep(output)
            return output

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any
    ) -> tuple[Any, None]:
        return Attention.apply(query, key, value), None

    ALL_ATTENTION_FUNCTIONS.register(FUSED, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FUSED, lambda *words, **more: None)
    model.config._attn_implementation = "eager" if eager else FUSED
    product = getattr(moe, "_grouped_mm", None)
    try:
        if product is not None:
            moe._grouped_mm = lambda input, weight, offs: GroupedProduct.apply(input, weight, offs)
        yield
    finally:
        if product is not None:
            moe._grouped_mm = product
