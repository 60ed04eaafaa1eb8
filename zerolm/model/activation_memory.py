"""Activation memory of a micro-batch, traced by running the model class on the meta device.

The forward pass allocates no memory, and each tensor saved by autograd is counted once, under the
layer that saves it, so the estimate works for any architecture. Fused attention is counted as what
FlashAttention saves. For compiled blocks, torch's partitioner is run, which takes a second per type
of block: it chooses which tensors are saved and which are recomputed. Must not depend on ZeRO or
devices.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from zerolm.common.remembered import recall
from zerolm.config.settings import SELECTIVE, Recompute
from zerolm.engine import replaced
from zerolm.model.activation_checkpointing import is_saved
from zerolm.model.architecture import ConfigKey, decoder_blocks, meta_model

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

META_ATTENTION = "zerolm_meta_attention"  # name in transformers' table of attention functions
# float32 gradients of log-probabilities and of logits, alive at the same time
LOGIT_GRADIENT_BYTES = 8


class UntraceableError(Exception):
    """A model cannot be traced."""


@dataclass(frozen=True)
class Activations:
    """Activation bytes for one sequence; all except `chunk` are proportional to the batch size.

    Attributes:
        layers: bytes saved without checkpointing in the layers to which checkpointing applies.
        largest_layer: bytes of the largest such layer; checkpointing recomputes one layer at a
            time.
        inputs: bytes of the inputs to these layers, which full checkpointing saves.
        outside: bytes saved by the embeddings, the final norm and the output head.
        loss: bytes of the float32 log-probabilities that the cross-entropy saves.
        loss_peak: additional memory in the loss's backward pass, before other activations are
            freed.
        chunk: memory of a chunked loss, independent of the batch.
        selective: bytes that selective checkpointing saves, including the inputs.
        largest_recomputed: maximum bytes that selective checkpointing recomputes in a layer.
    """

    layers: int
    largest_layer: int
    inputs: int
    outside: int
    loss: int
    loss_peak: int
    chunk: int = 0
    selective: int = 0
    largest_recomputed: int = 0

    def _of_layers(self, checkpointing: Recompute) -> tuple[int, int]:
        """Return the bytes saved in all layers, and the maximum bytes recomputed in a layer."""
        if checkpointing == SELECTIVE:
            return self.selective, self.largest_recomputed
        return (self.inputs, self.largest_layer) if checkpointing else (self.layers, 0)

    def saved(self, checkpointing: Recompute) -> int:
        """Return the bytes stored from the forward pass to the backward pass."""
        return self._of_layers(checkpointing)[0] + self.outside + self.loss

    def peak(self, checkpointing: Recompute, sequences: int = 1) -> int:
        """Return a micro-batch's peak bytes, reached in the loss or while a layer is recomputed.

        Layers are recomputed after the logits are freed, so the two peaks do not add up.
        """
        in_layers, recomputed = self._of_layers(checkpointing)
        saved = sequences * (in_layers + self.outside)
        return saved + max(self.loss_bytes(sequences), sequences * recomputed)

    def loss_bytes(self, sequences: int) -> int:
        """Return the peak bytes used by a micro-batch's loss."""
        return sequences * (self.loss + self.loss_peak) + self.chunk

    def chunked(self, tokens: int, config: "PretrainedConfig", precision: str) -> "Activations":
        """Return the activations if the loss is computed in chunks of `tokens`, saving no
        probabilities.

        The peak contains the float32 sum of the weight gradient, plus either a chunk's logits and
        softmax (and a copy in 16 bits) or the chunk's 16-bit gradient.
        """
        text = config.get_text_config()
        weight = text.vocab_size * getattr(text, "hidden_size", 0)
        logits = tokens * text.vocab_size
        if precision == "fp32":
            chunk = 8 * logits + 4 * weight
        else:
            chunk = max(10 * logits + 4 * weight, 2 * logits + 6 * weight)
        return replace(self, loss=0, loss_peak=0, chunk=chunk)


def trace(
    config: "PretrainedConfig", seq_len: int, precision: str, *, eager: bool, compiled: bool = False
) -> Activations:
    """Trace the forward pass and the loss for one sequence on the meta device.

    Args:
        precision: `fp32`, `bf16` or `fp16`, for the weights.
        eager: whether attention saves all scores instead of using a fused kernel.
        compiled: whether blocks and the loss are compiled. For selective checkpointing, the
            estimate is computed for uncompiled blocks, which is an upper bound.

    Raises:
        UntraceableError: the model cannot be built, or its class depends on values, which meta
            tensors do not have.
    """
    found = _trace(ConfigKey.of(config), seq_len, precision, eager)
    if not compiled:
        return found
    blocks = _trace(ConfigKey.of(config), seq_len, precision, eager, True)
    logits = (4 if precision == "fp32" else 2) * config.get_text_config().vocab_size * seq_len
    return replace(
        found,
        layers=blocks.layers,
        largest_layer=blocks.largest_layer,
        loss=logits + 4 * seq_len,  # `_CrossEntropies` saves the logits and log(Z)
        loss_peak=logits,  # the logits' gradient, in one kernel
    )


@lru_cache(maxsize=64)
def _trace(
    key: ConfigKey, seq_len: int, precision: str, eager: bool, compiled: bool = False
) -> Activations:
    def attempt() -> Activations | str:
        try:
            return _traced(key, seq_len, precision, eager, compiled)
        except MemoryError:
            raise
        except Exception as error:  # of any type: the class depends on values
            return f"{type(error).__name__}: {error}"

    found: Activations | str = recall(
        "activations",
        key.inputs(seq_len, precision, eager, compiled),
        attempt,
        lambda one: one if isinstance(one, str) else asdict(one),
        lambda known: known if isinstance(known, str) else Activations(**known),
    )
    if isinstance(found, str):
        raise UntraceableError(found)
    return found


def _traced(
    key: ConfigKey, seq_len: int, precision: str, eager: bool, compiled: bool
) -> Activations:
    import torch

    from zerolm.model.forward import token_losses

    model = meta_model(key.config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    _cast(model, dtype)
    model.train()
    model.config.use_cache = False
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # its loss cannot use the mask below
    ids = torch.empty((1, seq_len), dtype=torch.long, device="meta")
    # Document ids make zerolm create the mask; transformers would read values to create one.
    batch = dict.fromkeys(("input_ids", "targets", "document_ids", "position_ids"), ids)
    counter = _SavedBytes(model)
    if compiled:
        kernels, how = fused_kernels(model, eager), _compiled_blocks(model)
    else:
        kernels, how = fused_kernels(model, eager, counter.record_output), counter.dispatch_mode
    with kernels, counter, how:
        losses, _ = token_losses(model, batch)
    del losses
    vocabulary = model.config.get_text_config().vocab_size
    loss = 4 * vocabulary * seq_len
    return Activations(
        layers=sum(counter.layers),
        largest_layer=max(counter.layers, default=0),
        inputs=sum(counter.inputs),
        selective=sum(counter.inputs) + sum(counter.outputs),
        largest_recomputed=max(counter.recomputed, default=0),
        outside=max(0, counter.outside - loss),
        loss=loss,
        loss_peak=LOGIT_GRADIENT_BYTES * vocabulary * seq_len,
    )


def _cast(model: "PreTrainedModel", dtype: "torch.dtype") -> None:
    """Cast the parameters but not the float32 buffers, as in `build_model`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class _SavedBytes:
    """Counts the bytes that autograd saves: each storage once, and no weights.

    Attributes:
        layers, inputs, outputs, recomputed: for each layer, the bytes saved in total, the bytes of
            the layer's input, of the outputs that selective checkpointing saves, and of the tensors
            that it recomputes.
        outside: bytes saved outside the layers.
    """

    def __init__(self, model: "PreTrainedModel"):
        from transformers.modeling_layers import GradientCheckpointingLayer

        self.layers: list[int] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.recomputed: list[int] = []
        self.dispatch_mode = _saved_outputs_mode(self.record_output)
        self.outside = 0
        self._in_layer = False
        # References prevent storage addresses from being reused.
        self._references: list[Any] = list(model.parameters())
        self._seen = {tensor.untyped_storage()._cdata for tensor in self._references}
        self._seen_outputs: set[int] = set()
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                self._handles += [before, module.register_forward_hook(self._leave)]

    def __enter__(self) -> "_SavedBytes":
        import torch

        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
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
            self._references.append(tensor)
            if self._in_layer:
                self.layers[-1] += storage.nbytes()
                if storage._cdata not in self._seen_outputs:
                    self.recomputed[-1] += storage.nbytes()
            else:
                self.outside += storage.nbytes()
        return tensor

    def record_output(self, *outputs: Any) -> None:
        """Count the outputs in a layer that selective checkpointing would save."""
        for output in outputs if self._in_layer else ():
            if (storage := output.untyped_storage())._cdata not in self._seen_outputs:
                self._seen_outputs.add(storage._cdata)
                self._references.append(output.detach())
                self.outputs[-1] += storage.nbytes()

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        hidden = next(value for value in values if hasattr(value, "untyped_storage"))
        self.inputs.append(hidden.numel() * hidden.element_size())
        for counts in (self.layers, self.outputs, self.recomputed):
            counts.append(0)
        self._in_layer = True

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self._in_layer = False


@contextmanager
def _compiled_blocks(model: "PreTrainedModel") -> Iterator[None]:
    """Inside this context, let the partitioner of torch's compiler choose the tensors that blocks
    save, without compiling kernels.
    """
    import torch
    from torch._dynamo.utils import counters

    from zerolm.model.compile import MAX_GRAPHS, remove_output_recorders

    for block in decoder_blocks(model):
        remove_output_recorders(model, block)
        compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition")
        replaced.install(block, "forward", compiled)
    before = {name: counts.copy() for name, counts in counters.items()}
    try:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they appear in the first step instead
            yield
    finally:
        torch._dynamo.reset()  # do not affect the planned run
        counters.clear()
        counters.update(before)


def _saved_outputs_mode(record_output: Callable[..., None]) -> Any:
    """Return a dispatch mode that records the outputs that selective checkpointing saves."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class SavedOutputs(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            output = func(*args, **(kwargs or {}))
            if is_saved(func):
                leaves = tree_leaves(output)
                record_output(*(each for each in leaves if hasattr(each, "untyped_storage")))
            return output

    return SavedOutputs()


@cache
def _stand_ins() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return operators without an implementation for attention and the experts' grouped product.

    FlashAttention (Dao et al. 2022, arXiv 2205.14135) saves inputs, output and row sums. torch's
    meta version of the grouped product supports only bf16.
    """
    import torch
    from torch import Tensor, library

    def operator(name: str, function: Callable[..., Any]) -> Any:
        made = library.custom_op(f"zerolm::{name}_shapes", function, mutates_args=())
        made.register_fake(function)
        return made

    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1])
        return output, query.new_empty(batch, heads, length, dtype=torch.float32)

    def attention_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    def product(tokens: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return tokens.new_empty(tokens.shape[0], weight.shape[-1])

    def product_backward(
        grad: Tensor, tokens: Tensor, weight: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(tokens), torch.empty_like(weight)

    attend, attend_back = (
        operator("attention", attention),
        operator("attention_b", attention_backward),
    )
    multiply, multiply_back = operator("product", product), operator("product_b", product_backward)
    attend.register_autograd(
        lambda ctx, grad, _: attend_back(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )
    multiply.register_autograd(
        lambda ctx, grad: (*multiply_back(grad, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return attend, multiply


@contextmanager
def fused_kernels(
    model: "PreTrainedModel",
    eager: bool,
    record_output: Callable[..., None] = lambda *outputs: None,
) -> Iterator[None]:
    """Replace fused kernels with stand-ins for the meta device that save the same tensors.

    Args:
        record_output: called with the outputs of each kernel.
    """
    from transformers.integrations import moe
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, grouped_product = _stand_ins()

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple[Any, None]:
        outputs = attention(query, key, value)
        record_output(*outputs)
        return outputs[0], None

    def multiply(input: Any, weight: Any, offs: Any) -> Any:
        output = grouped_product(input, weight, offs)
        record_output(output)
        return output

    ALL_ATTENTION_FUNCTIONS.register(META_ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(META_ATTENTION, lambda *args, **kwargs: None)
    model.config._attn_implementation = "eager" if eager else META_ATTENTION
    with replaced.installed(moe, "_grouped_mm", multiply):
        yield
