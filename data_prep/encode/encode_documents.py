"""Encodes documents into batches of token ids for the training and validation splits.

The result depends only on the documents and the tokenizer. Independent of files and tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from data_prep.encode.held_out import is_held_out
from data_prep.encode.parts import Batch
from data_prep.files.documents import Document
from data_prep.tokenizer.encoders import Encoder
from zerolm.common.errors import ShardError
from zerolm.shards.manifest import token_dtype
from zerolm.shards.origins import pack_origins


class IdCounts(NamedTuple):
    """Counts of ids that should be rare in a tokenizer's output."""

    inner_eos_ids: int = 0
    unknown_ids: int = 0


@dataclass(frozen=True)
class DocumentEncoder:
    """Encodes documents, appends an EOS id to each, and assigns each document to a split.

    Args:
        bos_id: id that also begins each document; None for none.
        vocab_size: size of the tokenizer's vocabulary; ids outside it are an error.
        val_fraction: fraction of documents to hold out for validation; None for a single split.
        unknown_id: id of the unknown token, if there is one.
    """

    eos_id: int
    vocab_size: int
    val_fraction: float | None
    unknown_id: int | None = None
    bos_id: int | None = None

    @property
    def num_splits(self) -> int:
        """The number of splits: 2 if there is a validation split, otherwise 1."""
        return 1 if self.val_fraction is None else 2

    def encode(
        self, encoder: Encoder, documents: Sequence[Document]
    ) -> tuple[list[Batch], IdCounts]:
        """Encode documents.

        Returns:
            One batch per split (only the first split's if no document is held out), and the counts.
        """
        texts, inputs, starts, _ = zip(*documents, strict=True)
        ids, text_bytes = encoder.encode(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        origins = pack_origins(np.array(inputs, np.uint64), np.array(starts, np.uint64))
        # A document may yield no ids, for example if it contains only spaces and the tokenizer
        # drops them.
        kept = lengths > 0
        members = [kept]
        if self.val_fraction is not None:
            held_out = [is_held_out(text.encode(), self.val_fraction) for text in texts]
            if any(held_out):
                members = [kept & ~np.array(held_out), kept & held_out]
        batches, num_inner_eos, num_unknown = [], 0, 0
        for chosen in members:
            tokens = self._bounded(ids if chosen.all() else list(compress(ids, chosen)))
            full = lengths[chosen] + (1 if self.bos_id is None else 2)
            batches.append(Batch(tokens, full, origins[chosen], int(text_bytes[chosen].sum())))
            num_inner_eos += int(np.count_nonzero(tokens == self.eos_id) - chosen.sum())
            if self.unknown_id is not None:
                num_unknown += int(np.count_nonzero(tokens == self.unknown_id))
        if self.unknown_id == self.eos_id:
            num_unknown = num_inner_eos
        elif self.bos_id is not None and self.unknown_id == self.bos_id:
            num_unknown -= int(np.count_nonzero(kept))
        return batches, IdCounts(num_inner_eos, num_unknown)

    def _bounded(self, ids: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate documents' ids in the shards' dtype, with the ids that begin and end each."""
        begins = [] if self.bos_id is None else [self.bos_id]
        between = np.array([self.eos_id, *begins], np.uint32)
        joined = [np.empty(0, np.uint32)] * (2 * len(ids))
        joined[::2], joined[1::2] = ids, [between] * len(ids)
        if ids and begins:  # move the last BOS to the start
            joined = [between[1:], *joined[:-1], between[:1]]
        tokens = np.concatenate(joined) if joined else np.empty(0, np.uint32)
        if len(tokens) and (largest := int(np.max(tokens))) >= self.vocab_size:
            raise ShardError(
                f"token id {largest} is outside the vocabulary of {self.vocab_size}: the "
                f"tokenizer's ids do not match its declared size. Correct the tokenizer."
            )
        return tokens.astype(token_dtype(self.vocab_size))
