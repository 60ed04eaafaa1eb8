"""Weights become safetensors files under Hugging Face's names, a file in memory at a time.

What a checkpoint calls a weight is what the model's code calls it. Some architectures are published
under other names and shapes (Mixtral: a matrix for each expert), and `from_pretrained` expects
those. Transformers turns a whole state dict around; here it turns one decoder block after the
other, after it has shown, on tensors without data, that the result is the same. Knows nothing of
checkpoints: weights are given by name.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from zerolm.common.files import sync_file, write_json

NUMBERED = re.compile(r"(.*?\.\d+)\.")  # model.layers.3, transformer.h.3
INDEX = "model.safetensors.index.json"

State = dict[str, torch.Tensor]


def write_weights(
    skeleton: Any,
    weight: Callable[[str], torch.Tensor],
    released: Callable[[], None],
    directory: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
) -> int:
    """Write a model's weights, and the index where they are several files.

    Memory is that of the file being filled, of one block, and of one weight in float32.

    Args:
        skeleton: the model on the meta device.
        weight: returns the tensor of a name of its state dict.
        released: called after each block: none of its weights is asked for again.
        directory: exists.
        dtype: of the parameters; buffers keep theirs.
        max_shard_bytes: of a file, which holds at least one tensor.

    Returns:
        The bytes of all weights.
    """
    parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    meta = {
        name: tensor.to(dtype) if name in parameters else tensor
        for name, tensor in skeleton.state_dict().items()
        if name not in skeleton.all_tied_weights_keys
    }
    planned = {  # each a tensor of its own: a view would be counted with all that it is a view of
        name: torch.empty_like(tensor)
        for name, tensor in revert_weight_conversion(skeleton, dict(meta)).items()
    }
    split = split_torch_state_dict_into_shards(planned, max_shard_size=max_shard_bytes)
    filling: dict[str, State] = {name: {} for name in split.filename_to_tensors}
    for block in _blocks(skeleton, meta, list(planned)):
        loaded = {name: weight(name).to(meta[name].dtype) for name in block}
        released()
        for name, tensor in revert_weight_conversion(skeleton, loaded).items():
            assert tensor.shape == planned[name].shape, f"{name}: {tensor.shape}"
            file = split.tensor_to_filename[name]
            filling[file][name] = tensor.contiguous()
        del loaded
        for file, tensors in list(filling.items()):
            if len(tensors) == len(split.filename_to_tensors[file]):
                save_file(filling.pop(file), directory / file, metadata={"format": "pt"})
                sync_file(directory / file)
    assert not filling, f"weights are missing in {sorted(filling)}"
    if split.is_sharded:
        counted = sum(parameter.numel() for parameter in skeleton.parameters())
        index = {
            "metadata": {"total_parameters": counted, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        write_json(directory / INDEX, index)
    return sum(tensor.nbytes for tensor in planned.values())


def _blocks(skeleton: Any, meta: State, planned: Sequence[str]) -> Iterator[list[str]]:
    """Yield names that are turned around together, in the order in which the files are filled."""
    blocks: dict[str, list[str]] = {}
    for name in meta:
        match = NUMBERED.match(name)
        blocks.setdefault(match[1] if match else name, []).append(name)
    made = {
        key: list(revert_weight_conversion(skeleton, {name: meta[name] for name in names}))
        for key, names in blocks.items()
    }
    if sorted(name for names in made.values() for name in names) != sorted(planned):
        yield list(meta)  # something is made of weights of several blocks: all at once, then
        return
    place = {name: number for number, name in enumerate(planned)}
    for key in sorted(made, key=lambda key: min(place[name] for name in made[key])):
        yield blocks[key]
