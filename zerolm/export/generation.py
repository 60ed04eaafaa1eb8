"""The generation config of an exported model: its special ids, and values of its source.

The ids are those of the run's tokenizer. A run that began with existing weights keeps the further
ids and the sampling values of their `generation_config.json`. Must not depend on weights.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerolm.common.errors import reason
from zerolm.shards.tokenizer import TIKTOKEN_FILE, load_auto_tokenizer

FORCED = ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")


def set_special_ids(
    config: Any,
    eos_id: int,
    tokenizer_dir: Path | None = None,
    source: Mapping[str, Any] | None = None,
) -> list[str]:
    """Set the ids that begin and end generation, in place; return lines about ids left out.

    Without a source they are the tokenizer's, because a class's default `bos_token_id` is an
    ordinary token of the run's tokenizer. Some classes accept only a number, and keep theirs.
    `pad_token_id` stays: the positions of RoBERTa begin after it. Default ids that a class forces
    or suppresses are ordinary tokens too.

    Args:
        source: ids of the weights that the run began with; kept if they are special tokens.
    """
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    bos_id, special = _of_tokenizer(tokenizer_dir)
    source = source or {}
    further = [each for each in id_list(source.get("eos_token_id")) if each != eos_id]
    kept = [each for each in further if each in special]
    if bos_id is None and source.get("bos_token_id") in special:
        bos_id = source["bos_token_id"]
    for part in _parts(config):
        part.eos_token_id = eos_id
        with suppress(StrictDataclassFieldValidationError):
            part.eos_token_id = [eos_id, *kept] if kept else eos_id
        with suppress(StrictDataclassFieldValidationError):  # cwm, modernbert-decoder
            part.bos_token_id = bos_id
        for key in FORCED:
            if getattr(part, key, None) is not None:
                setattr(part, key, None)
    left_out = [("eos_token_id", each) for each in further if each not in special]
    if source.get("bos_token_id") not in (None, bos_id):
        left_out.append(("bos_token_id", source["bos_token_id"]))
    return [
        f"{key} {each} of --init_from: left out, because it is not one of the run's tokenizer"
        for key, each in left_out
    ]


def set_for_inference(config: Any) -> list[str]:
    """Turn off outputs that a model needs in training only; return a line about router losses.

    With `output_router_logits`, `.loss` includes the loss of the routers, and `generate` of
    transformers 4 fails.
    """
    notices = []
    for part in _parts(config):
        part.output_attentions = part.output_hidden_states = False
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
            notices = [
                "config.json has output_router_logits false, for inference. Set it to true to "
                "train the model with its router loss again"
            ]
    return notices


def position_notices(model: Any) -> list[str]:
    """Return a line if `generate` counts positions otherwise than the model does in training.

    That of transformers 4 and 5 counts from 0, RoBERTa and its like from after `pad_token_id`.
    """
    counts = (hasattr(each, "create_position_ids_from_input_ids") for each in model.modules())
    if not any(counts):
        return []
    first = model.config.pad_token_id + 1
    return [
        f"generate() of transformers counts positions from 0, but this model was trained with "
        f"{first} as the first, so it would continue texts badly. Give it position_ids="
        f"torch.arange({first}, {first} + input_ids.shape[1])[None]"
    ]


def zeroes_padding_row(model: Any) -> bool:
    """Return whether `from_pretrained` overwrites the row of the padding token with zeros.

    transformers 5.23 does so for youtu.
    """
    import torch

    table = torch.nn.Embedding(2, 2, padding_idx=0)
    with torch.no_grad():
        table.weight.fill_(1.0)
        setattr(table.weight, "_is_hf_initialized", True)  # noqa: B010 - no attribute of a Tensor
        with suppress(AttributeError):  # xlstm's finds its embedding in another place
            model._init_weights(table)
    return not bool(table.weight[0].any())


def with_values_of(source: Mapping[str, Any], generation: Any) -> tuple[Any, list[str]]:
    """Return a generation config with the values of a source, and lines about those left out.

    Args:
        generation: the exported model's; its special ids stay.
    """
    from transformers import GenerationConfig

    ids = {key: getattr(generation, key) for key in ("bos_token_id", "eos_token_id")}
    try:
        merged = GenerationConfig.from_dict({**generation.to_dict(), **source, **ids})
        merged.validate(strict=True)
    except ValueError as error:
        why = reason(error, named=False)
        return generation, [f"generation_config.json of --init_from: left out ({why})"]
    return merged, []


def id_list(value: int | list[int] | None) -> list[int]:
    """Return the ids of a key that may have one, several or none."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _parts(config: Any) -> list[Any]:
    """Return a config and its text part, of which generation takes what the config has not."""
    return list({id(each): each for each in (config, config.get_text_config())}.values())


def _of_tokenizer(directory: Path | None) -> tuple[int | None, set[int]]:
    """Return the BOS id of a tokenizer, and all its special ids."""
    if directory is None or not directory.is_dir() or (directory / TIKTOKEN_FILE).is_file():
        return None, set()
    tokenizer = load_auto_tokenizer(str(directory), local=True)
    added = tokenizer.added_tokens_decoder.items()
    return tokenizer.bos_token_id, {
        *tokenizer.all_special_ids, *(number for number, token in added if token.special)
    }  # fmt: skip
