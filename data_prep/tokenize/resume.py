"""What an unfinished tokenization was made of: whether another call may go on from its parts."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from data_prep.documents import InputRules
from data_prep.phases import fingerprint
from data_prep.readers import Input
from data_prep.units import Unit
from zerolm.files import write_json
from zerolm.shard_directory import PARTS, ShardDirectory

STATE = "state.json"  # in the directory of the parts
PARTS_VERSION = 2  # of the content of parts: with another one they are made again


def settings(
    rules: InputRules, val_fraction: float | None, tokenizer_fingerprint: str
) -> dict[str, Any]:
    """Return what decides the content of parts, beside the inputs; keys are for people."""
    kept = asdict(rules)
    for key in ("on_bad_input", "max_bad_fraction"):  # without them documents are the same
        del kept[key]
    return {
        "version": PARTS_VERSION,
        "--tokenizer": tokenizer_fingerprint,
        "--val_fraction": val_fraction,
        "rules of input": kept,
    }


def unit_fingerprint(settings: dict[str, Any], inputs: Sequence[Input], unit: Unit) -> str:
    """Return what stands for everything that the parts of a unit are made of."""
    pieces = []
    for piece in unit.pieces:
        each = inputs[piece.input]
        revision = each.hub.revision if each.hub else None
        pieces.append([*piece, each.name, each.suffix, each.size_bytes, each.modified_ns, revision])
    return fingerprint([settings, pieces])


def begin(
    claims: Sequence[ShardDirectory], inputs: Sequence[Input], settings: dict[str, Any]
) -> None:
    """Go on from what another call has left, if it is of the same kind; else remove it."""
    state = {
        **settings,
        "--input": [each.name for each in inputs],
        "outputs": [
            os.fsencode(each.directory.resolve()).decode(errors="backslashreplace")
            for each in claims
        ],
    }
    output = claims[0].directory
    path = output / PARTS / STATE
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in state if before.get(key) != state[key]]
    except (OSError, ValueError, AttributeError):
        before, changed = None, []
    if before is not None and not changed:
        _say(f"{output}: goes on from what the last run of this command has left.")
        return
    if before is not None:
        _say(
            f"{output}: what another command has left there is removed, since it had "
            f"another {', '.join(changed)}."
        )
    for claim in claims:
        claim.clear()
    path.parent.mkdir()
    write_json(path, state)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
