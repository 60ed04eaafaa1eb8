"""Compares the ids between the documents of token shards with a model config and initial weights.

`zerolm.shards.boundaries` compares them with the shards' own tokenizer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.records import read_json
from zerolm.common.shipped import find_config
from zerolm.export.generation import id_list
from zerolm.shards import boundaries
from zerolm.shards.reader import Source


def config_notices(name: str | None, source: Source) -> list[str]:
    """Return a line for each id in a model config's file that separates no documents in the data.

    An export replaces these ids.
    """
    try:
        config = read_json(find_config(name), "") if name else {}
    except ConfigError:  # reported with the model
        return []
    text = {**config, **(config.get("text_config") or {})}
    expected = {"eos_token_id": source.eos_id, "bos_token_id": source.bos_id}
    return [
        f"{name}: {key}: {text[key]}, but documents in {source.directory} "
        f"{'end' if key.startswith('e') else 'begin'} with id {number}, which an export has instead"
        for key, number in expected.items()
        if number is not None and text.get(key) is not None and number not in id_list(text[key])
    ]


def weights_notices(
    name: str,
    generation: Mapping[str, Any],
    theirs: Source | None,
    tokenizer: Path | None,
    source: Source,
) -> list[str]:
    """Return a line for each difference between the ids around the documents of a run and those
    that its initial weights know.

    Args:
        name: the initial weights, for messages.
        generation: their generation config.
        theirs: the shards that they were trained on, if known.
        tokenizer: directory of their tokenizer, if known.
        source: the run's shards.
    """
    before: Sequence[int] = []
    try:
        ours = boundaries.read_boundaries(source.tokenizer_directory())
        if theirs is not None:
            before = [] if theirs.bos_id is None else [theirs.bos_id]
        elif tokenizer is not None:
            before = boundaries.read_boundaries(tokenizer).template.before
            if before and source.bos_id is None and before == ours.template.before:
                before = []  # `boundaries.notices` has reported the same template
    except ConfigError:  # reported with the tokenizers
        return []
    ends = id_list(generation.get("eos_token_id"))
    ends = ends if theirs is None else [theirs.eos_id]
    lines = []
    if ends and source.eos_id not in ends:
        lines.append(
            f"{name}: its eos_token_id is {', '.join(map(ours.shown, ends))}, but documents in "
            f"{source.directory} end with {ours.shown(source.eos_id)}, which the weights may not "
            "know as an end. Tokenize with their EOS token, unless you want to change it"
        )
    begins = [] if source.bos_id is None else [source.bos_id]
    if begins != before and (before or theirs is not None):
        lines.append(
            f"{name}: begins texts with {' '.join(map(ours.shown, before)) or 'no BOS'}, but "
            f"documents in {source.directory} begin with "
            f"{' '.join(map(ours.shown, begins)) or 'no BOS'}. Tokenize "
            f"{'with' if before else 'without'} --bos, unless you want to change it"
        )
    return lines
