"""Chooses the documents held out for validation, by a hash of each document's text."""

import hashlib
from collections.abc import Sequence

from data_prep.files.documents import InputRules
from data_prep.files.inputs import Input
from data_prep.formats import format_of
from data_prep.read.bad_input import Tally
from data_prep.read.work_units import plan_units, read_batches
from zerolm.common.url import is_url

HELD_OUT_HASH = "blake2b-64 of the UTF-8 text"
URL_COST = 16
MAX_SEARCHED_BYTES = 64 << 20  # larger sources are not checked; `_cost` weights the sizes


def is_held_out(utf8: bytes, fraction: float) -> bool:
    """Return whether a document belongs to the validation split.

    The split depends only on the document's text, not on other documents or their order. Therefore,
    all copies of a document are in the same split, and a larger fraction holds out a superset of
    the documents that a smaller fraction holds out.
    """
    digest = hashlib.blake2b(utf8, digest_size=8, person=b"zerolm-val").digest()
    return int.from_bytes(digest, "big") < fraction * (1 << 64)


def _cost(source: Input) -> int:
    """Return how much longer reading an input takes than reading local text of the same size."""
    return URL_COST if is_url(source.name) else format_of(source).cost


def held_out_problem(inputs: Sequence[Input], rules: InputRules, fraction: float) -> str | None:
    """Return a problem if a source is small and none of its documents would be held out.

    Sources on the hub and sources larger than MAX_SEARCHED_BYTES are not read.
    """
    size = sum((each.size_bytes or 0) * _cost(each) for each in inputs)
    if not fraction or size > MAX_SEARCHED_BYTES or any(each.hub for each in inputs):
        return None
    tally, number = Tally(), 0
    for unit in plan_units(inputs):
        for batch in read_batches(inputs, unit, rules, tally):
            if any(is_held_out(each.text.encode(), fraction) for each in batch.documents):
                return None
            number += len(batch.documents)
    return (
        f"{fraction:g} holds out none of {number:,} documents. Set it to 0, or to a higher value."
    )
