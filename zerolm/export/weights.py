"""Writes weights to safetensors files under their published names, one file in memory at a time.

A checkpoint stores weights under the names in the model's code. Some architectures are published
with other names and shapes (Mixtral: one matrix per expert), which `from_pretrained` expects.
Transformers converts complete state dicts; here it converts one decoder block at a time, if a
conversion of meta tensors shows that the result is the same. Must not depend on checkpoints: a
function passed in loads weights by name.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from zerolm.common.errors import ConfigError
from zerolm.common.files import sync_file, write_json
from zerolm.routers.biased_routers import biased_routers

BLOCK = re.compile(r"(.*?\.\d+)\.")  # model.layers.3, transformer.h.3
INDEX = "model.safetensors.index.json"

# Names written by transformers 5.23 that differ from published files, for one type of layer or for
# all weights: (type, pattern, published name). transformers reads both.
MISNAMED = {
    "bailing_hybrid": [("linear_attention", r"\.attention\.dense\.", ".attention.o_proj.")],
    "hy_v4": [
        ("", r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre."),
        ("", r"\.hc_pre\.hc_head\.", ".hc_head."),
        ("", r"(\.mlp\.(?:\w+\.)?)linear_gate\.", r"\1gate_proj."),
    ],
    "kimi_linear": [("dense", r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.")],
}

State = dict[str, torch.Tensor]


def write_weights(
    skeleton: Any,
    load_weight: Callable[[str], torch.Tensor],
    release: Callable[[], None],
    directory: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> int:
    """Write a model's weights, and an index if there are several files.

    Needs memory for the file being filled, one decoder block, and one weight in float32.

    Args:
        skeleton: a model on the meta device.
        load_weight: takes a name in the model's state dict; returns the tensor.
        release: called after each block, whose weights are not loaded again.
        directory: must exist.
        dtype: dtype of the parameters; buffers and expert-selection biases keep their own dtype.
        max_shard_bytes: maximum size of a file; a larger tensor gets its own file.

    Returns:
        The total size of the weights in bytes.
    """
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    parameters -= {router.name for router in biased_routers(skeleton)}
    meta = {
        name: tensor.to(dtype) if name in parameters else tensor
        for name, tensor in skeleton.state_dict().items()
        if name not in skeleton.all_tied_weights_keys
    }
    planned = {  # copies, because a view would count as its base's size
        name: torch.empty_like(tensor) for name, tensor in published(skeleton, dict(meta)).items()
    }
    split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_bytes)
    filling: dict[str, State] = {name: {} for name in split.filename_to_tensors}
    for block in _blocks(skeleton, meta, list(planned)):
        loaded = {name: fitting(name, load_weight(name), meta[name]) for name in block}
        release()
        for name, tensor in published(skeleton, loaded).items():
            assert tensor.shape == planned[name].shape, f"{name}: {tensor.shape}"
            file = split.tensor_to_filename[name]
            filling[file][name] = tensor.contiguous()
        del loaded
        for file, tensors in list(filling.items()):
            if len(tensors) == len(split.filename_to_tensors[file]):
                save_file(filling.pop(file), directory / file, metadata={"format": "pt"})
                sync_file(directory / file)
    assert not filling, f"incomplete files: {sorted(filling)}"
    if split.is_sharded:
        num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        index = {
            "metadata": {"total_parameters": num_parameters, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        write_json(directory / INDEX, index)
    return sum(tensor.nbytes for tensor in planned.values())


def fitting(name: str, weight: Any, expected: torch.Tensor) -> torch.Tensor:
    """Return a weight converted to the dtype of the model's weight.

    Raises:
        ConfigError: the shape differs from the model's.
    """
    if not isinstance(weight, torch.Tensor) or weight.shape != expected.shape:
        found = list(getattr(weight, "shape", [])) or type(weight).__name__
        raise ConfigError(
            f"{name}: has shape {found}, but the model's config implies "
            f"{list(expected.shape)}. Use another checkpoint, or a copy of this one."
        )
    return weight.to(expected.dtype)


def published(skeleton: Any, state: State) -> State:
    """Convert weights from the model code's names and shapes to the published ones."""
    config = skeleton.config
    state = revert_weight_conversion(skeleton, state)
    for kind, pattern, name in MISNAMED.get(config.model_type, []):
        kinds = [*zip(config.layer_types, config.mlp_layer_types, strict=True)] if kind else []
        renamed = {}
        for key, tensor in state.items():
            layer = re.search(r"\.layers\.(\d+)\.", key)
            wanted = not kind or (layer and kind in kinds[int(layer[1])])
            renamed[re.sub(pattern, name, key) if wanted else key] = tensor
        state = renamed
    return state


def _blocks(skeleton: Any, meta: State, planned: Sequence[str]) -> Iterator[list[str]]:
    """Yield groups of names to convert together, in the order in which files are filled."""
    blocks: dict[str, list[str]] = {}
    for name in meta:
        match = BLOCK.match(name)
        blocks.setdefault(match[1] if match else name, []).append(name)
    converted = {
        key: list(published(skeleton, {name: meta[name] for name in names}))
        for key, names in blocks.items()
    }
    if sorted(name for names in converted.values() for name in names) != sorted(planned):
        yield list(meta)  # a published weight combines several blocks, so all are converted at once
        return
    position = {name: number for number, name in enumerate(planned)}
    for key in sorted(converted, key=lambda key: min(position[name] for name in converted[key])):
        yield blocks[key]
