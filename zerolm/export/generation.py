"""Builds an exported model's generation config from special ids and its initial weights' config.

The ids come from the run's tokenizer. A run started from existing weights also keeps additional
ids and sampling values from their `generation_config.json`. Must not depend on weights.
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
    """Set the ids that begin and end generation in a config, in place; return lines about omitted
    ids.

    Without a source, the ids are the tokenizer's, because a class's default `bos_token_id` is an
    ordinary token in the run's tokenizer. Classes that accept only a number for such an id keep
    their own value. `pad_token_id` is unchanged, because RoBERTa's positions begin after it.
    A class's default ids to force or suppress are removed, because they are ordinary tokens here
    too.

    Args:
        source: generation config from the run's initial weights; its ids are kept if they are
            special tokens.
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
        f"{key} {each} of --init_from: left out, because the run's tokenizer does not have it"
        for key, each in left_out
    ]


def set_for_inference(config: Any) -> list[str]:
    """Turn off outputs that are needed only in training; return a line if these include router
    losses.

    With `output_router_logits`, `.loss` includes the router loss, and `generate` fails in
    transformers 4.
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
    """Return a line if `generate` numbers positions differently from the model in training.

    In transformers 4 and 5, `generate` numbers positions from 0, but models like RoBERTa start
    after `pad_token_id`.
    """
    counts = (hasattr(each, "create_position_ids_from_input_ids") for each in model.modules())
    if not any(counts):
        return []
    first = model.config.pad_token_id + 1
    return [
        f"generate() in transformers counts positions from 0, but this model was trained with "
        f"{first} as the first position, so it would continue texts badly. Pass position_ids="
        f"torch.arange({first}, {first} + input_ids.shape[1])[None]"
    ]


def zeroes_padding_row(model: Any) -> bool:
    """Return whether `from_pretrained` overwrites the padding token's embedding with zeros.

    transformers 5.23 does so for youtu.
    """
    import torch

    table = torch.nn.Embedding(2, 2, padding_idx=0)
    with torch.no_grad():
        table.weight.fill_(1.0)
        setattr(table.weight, "_is_hf_initialized", True)  # noqa: B010 - no attribute of a Tensor
        with suppress(AttributeError):  # xlstm's method looks for the embedding elsewhere
            model._init_weights(table)
    return not bool(table.weight[0].any())


def with_values_of(source: Mapping[str, Any], generation: Any) -> tuple[Any, list[str]]:
    """Return a generation config with a source's values, and lines about omitted values.

    Args:
        generation: the exported model's config; its special ids are kept.
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
    """Return the ids under a config key as a list; the value may be one id, several or none."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _parts(config: Any) -> list[Any]:
    """Return a config and its text part, whose generation values apply if the config lacks them."""
    return list({id(each): each for each in (config, config.get_text_config())}.values())


def _of_tokenizer(directory: Path | None) -> tuple[int | None, set[int]]:
    """Return a tokenizer's BOS id and all its special ids."""
    if directory is None or not directory.is_dir() or (directory / TIKTOKEN_FILE).is_file():
        return None, set()
    tokenizer = load_auto_tokenizer(str(directory), local=True)
    added = tokenizer.added_tokens_decoder.items()
    return tokenizer.bos_token_id, {
        *tokenizer.all_special_ids, *(number for number, token in added if token.special)
    }  # fmt: skip
