"""Cuts a causal LM into pipeline stages, each with some of its blocks.

A stage keeps the model's class, its inner forward pass and the names of its parameters. The blocks
of other stages are replaced by placeholders without parameters, so masks, windows by layer, rotary
tables and the kinds of layers stay as they are. Every stage gets the batch; only hidden states are
sent. Two rules make this work for families that do something to the embeddings, or between blocks
and head, without a list of families: the placeholder before a stage's first block returns the
received states, whatever came before it; and the one after its last block keeps the states to
send. A stage that is not the last computes no head. `zerolm.preflight.stage_proof` checks this on a
small copy. Must not depend on DeepSpeed's engine or the training loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from zerolm.distributed.collectives import gather_objects
from zerolm.engine import replaced
from zerolm.engine.stages import STAGE, mark_copy
from zerolm.model.architecture import (
    ConfigKey,
    decoder_blocks,
    meta_model,
    router_loss_coefficient,
)
from zerolm.model.document_mask import isolating_masks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerolm.distributed.pipeline import Link


class Stage:
    """What a model knows of the stage that it is; `stage_of` returns it.

    Attributes:
        index, count: number of this stage, and number of stages.
        layers: numbers of its blocks.
        link: to the neighbouring stages; set before the first pass.
        received: the previous stage's hidden states for the next pass, (B, T, H).
        kept: the hidden states to send after a pass, (B, T, H).
        router_logits: of the stage's routers in a pass, unless it is the last stage, whose model
            returns them.
        shared: the matrix that the first and last stage share, on these stages.
    """

    def __init__(self, index: int, count: int, layers: range):
        self.index, self.count, self.layers = index, count, layers
        self.link: Link | None = None
        self.received: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.router_logits: Sequence[torch.Tensor] = ()
        self.shared: nn.Parameter | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stage_of(model: Any) -> Stage | None:
    """Return the stage that a model is; None for a complete model."""
    found: Stage | None = getattr(model, STAGE, None)
    return found


def of_all_stages(model: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return {parameter: value} of all stages; the values themselves if the model is complete.

    Every rank must call this. Stages that share a matrix must have equal values for it.
    """
    if stage_of(model) is None:
        return values
    found: dict[str, Any] = {}
    for of_rank in gather_objects(values):
        for name, value in of_rank.items():
            assert found.setdefault(name, value) == value, f"{name} differs between ranks"
    return found


def blocks_path(model: Any) -> str:
    """Return the name of a causal LM's list of blocks.

    Raises:
        ValueError: the model has no such list.
    """
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    prefix = model.base_model_prefix
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            is_inner = model.base_model is not model
            return f"{prefix}.{name}" if is_inner else name
    raise ValueError(f"{type(model).__name__} has no list of {depth} blocks")


def _inner(model: Any) -> Any:
    """Return the part of a causal LM that runs the blocks, and no head.

    Llama 4's text model is not named by its `base_model_prefix`.
    """
    if model.base_model is not model:
        return model.base_model
    child = getattr(model, blocks_path(model).partition(".")[0])
    if isinstance(child, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} runs its blocks itself")
    return child


def own_blocks(model: Any) -> list[nn.Module]:
    """Return the decoder blocks that a model computes: of a stage, only its own; empty if the model
    has no list of blocks.
    """
    if (stage := stage_of(model)) is None:
        return decoder_blocks(model)
    blocks = list(model.get_submodule(blocks_path(model)))
    return blocks[stage.layers.start : stage.layers.stop]


def cut(model: Any, index: int, layers: Sequence[int], returned: int) -> Stage:
    """Drop from a model what other stages have; return the stage.

    Args:
        model: its parameters may be on the meta device.
        layers: number of blocks of each stage.
        returned: `values` of the result of `passed`.
    """
    first = sum(layers[:index])
    own = range(first, first + layers[index])
    stage = Stage(index, len(layers), own)
    path = blocks_path(model)
    head_path = _path_of(model, model.get_output_embeddings())
    shares = _shares_head(model)
    holder = model.get_submodule(path.rpartition(".")[0])
    blocks = model.get_submodule(path)
    embeddings = model.get_input_embeddings()
    before = True
    for name, child in list(holder.named_children()):
        if child is blocks:
            before = False
            continue
        is_early = before or isinstance(child, nn.Embedding)
        mine = stage.is_first if is_early else stage.is_last
        mine |= child is embeddings and shares and stage.is_last
        if not mine and any(True for _ in child.parameters()):
            setattr(holder, name, _Elsewhere(child))
    for number, block in enumerate(list(blocks)):
        if number not in own:
            blocks[number] = _OtherBlock(block, number, stage, returned)
    if shares and (stage.is_first or stage.is_last):
        stage.shared = embeddings.weight
        if not stage.is_first:
            mark_copy(stage.shared)
    if not stage.is_last:
        _replace(model, head_path, nn.Identity())
        replaced.install(model, "forward", _without_head(model, stage))
    elif router_loss_coefficient(model.config) is not None:
        replaced.install(model, "forward", _asking_for_router_logits(model, False))
        inner = _inner(model)
        replaced.install(inner, "forward", _asking_for_router_logits(inner, True))
    setattr(model, STAGE, stage)
    return stage


def _shares_head(model: Any) -> bool:
    given, head = model.get_input_embeddings(), model.get_output_embeddings()
    return getattr(head, "weight", None) is given.weight


def _path_of(model: nn.Module, module: nn.Module | None) -> str:
    for name, each in model.named_modules():
        if each is module:
            return name
    raise ValueError(f"{type(model).__name__} has no output head")


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _without_head(model: Any, stage: Stage) -> Any:
    """Return the forward pass of a stage that is not the last: it leaves its result in `kept`."""
    inner = _inner(model)

    def forward(**inputs: Any) -> torch.Tensor:
        stage.router_logits = getattr(inner(**inputs), "router_logits", None) or ()
        kept, stage.kept = stage.kept, None
        assert kept is not None
        return kept

    return forward


def _asking_for_router_logits(model: Any, wanted: bool) -> Any:
    """Return the forward pass of the last stage's model or inner model: the inner one returns
    router logits, although its causal LM is asked for none, because it would compute a router loss
    of this stage's routers alone, and fail without any.
    """
    original = model.forward

    def forward(*args: Any, **inputs: Any) -> Any:
        return original(*args, **inputs | {"output_router_logits": wanted})

    return forward


class _Elsewhere(nn.Module):
    """A module of another stage: zeros in place of embeddings, else its first argument."""

    def __init__(self, like: nn.Module):
        super().__init__()
        weight = like.weight if isinstance(like, nn.Embedding) else None
        self.width = None if weight is None else weight.shape[1]
        self.dtype = None if weight is None else weight.dtype
        self.register_buffer("no_values", torch.empty(0, dtype=self.dtype), persistent=False)

    @property
    def weight(self) -> Any:
        """A tensor without values, for models that ask for its device."""
        return self.no_values

    def forward(self, values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.width is None or values.is_floating_point():
            return values
        return torch.zeros(*values.shape, self.width, dtype=self.dtype, device=values.device)


class _OtherBlock(nn.Module):
    """A block of another stage, with the attributes that a model's loop may read of it."""

    def __init__(self, like: nn.Module, number: int, stage: Stage, returned: int):
        super().__init__()
        for key, value in vars(like).items():
            plain = isinstance(value, (str, int, bool, float)) and not key.startswith("_")
            if plain and key != "training":
                setattr(self, key, value)
        self._number, self._returned = number, returned
        self._stage = stage

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        stage = self._stage
        if self._number == stage.layers.start - 1:
            assert stage.received is not None, "no hidden states from the previous stage"
            hidden_states, stage.received = stage.received, None
        if self._number == stage.layers.stop:
            stage.kept = hidden_states
        if not self._returned:
            return hidden_states
        return (hidden_states, *[None] * (self._returned - 1))


class Passed(NamedTuple):
    """What a model's blocks return.

    Attributes:
        values: length of the tuple, with the hidden states first; 0 if they return only these.
        state_shape: of a token's hidden state, usually (H,); empty if unknown.
        in_float32: whether hidden states are float32 in a bf16 model.
    """

    values: int = 0
    state_shape: tuple[int, ...] = ()
    in_float32: bool = False

    def state(
        self, config: "PretrainedConfig", dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape of a token's hidden state, and its dtype in a model of this dtype."""
        shape = self.state_shape or (config.get_text_config().hidden_size,)
        return shape, torch.float32 if self.in_float32 else dtype


def passed(config: "PretrainedConfig") -> Passed:
    """Return what a model's blocks return, found by a forward pass without memory in bf16.

    If that fails it is unknown, in which case a stage fails or differs in the proof.
    """
    return _passed(ConfigKey.of(config))


@lru_cache(maxsize=16)
def _passed(key: ConfigKey) -> Passed:
    model = meta_model(key.config).to(torch.bfloat16)
    found: list[Any] = []
    block = model.get_submodule(blocks_path(model))[0]
    block.register_forward_hook(lambda _, __, output: found.append(output))
    try:
        with torch.no_grad(), torch.device("meta"):
            ids = torch.zeros(1, 8, dtype=torch.long)
            with isolating_masks({"input_ids": ids}, model):
                model(input_ids=ids, use_cache=False)
    except Exception:  # any class: a model's own code may read values
        pass
    if not found:
        return Passed()
    is_tuple = isinstance(found[0], tuple)
    states = found[0][0] if is_tuple else found[0]
    return Passed(
        len(found[0]) if is_tuple else 0, tuple(states.shape[2:]), states.dtype == torch.float32
    )


# -------------------------------------------------------------------------------------------------
# Building


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Construct parameters without memory inside this context; buffers get their values."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        original(module, name, parameter)

    with replaced.installed(nn.Module, "register_parameter", register):
        yield


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Replace parameters on the meta device by uninitialized ones."""
    made: dict[int, nn.Parameter] = {}
    stage = stage_of(model)
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                own = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
                    parameter.requires_grad,
                )
                vars(own).update(vars(parameter))
                made[id(parameter)] = own
            module._parameters[leaf] = made[id(parameter)]
    if stage is not None and stage.shared is not None:
        stage.shared = made[id(stage.shared)]


def stage_shapes(
    config: "PretrainedConfig", shapes: Mapping[str, tuple[int, ...]], layers: Sequence[int]
) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameter shapes of each stage; a shared matrix is on both ends.

    Args:
        shapes: of the complete model, with each tied parameter listed once.
    """
    found = []
    for index in range(len(layers)):
        model = meta_model(config)
        cut(model, index, layers, 0)
        found.append({name: tuple(each.shape) for name, each in model.named_parameters()})
    missing = set(shapes) - set().union(*found)
    assert not missing, missing
    return found
