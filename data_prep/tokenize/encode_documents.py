"""Encodes documents into batches of token ids for the training and the validation split.

The result depends only on the documents and the tokenizer. Independent of files and tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_prep.read.documents import Document
from data_prep.tokenize.held_out import is_held_out
from data_prep.tokenize.parts import Batch
from data_prep.tokenizer.encoders import Encoder
from zerolm.common.errors import ShardError
from zerolm.shards.manifest import token_dtype
from zerolm.shards.origins import pack_origins

LONG_DOCUMENT_TOKENS = 300  # mean length from which documents are copied one by one


class IdCounts(NamedTuple):
    """Numbers of ids that a tokenizer should not give often."""

    inner_eos_ids: int = 0  # EOS ids inside documents
    unknown_ids: int = 0


@dataclass(frozen=True)
class DocumentEncoder:
    """Encodes documents, appends EOS ids, and divides the documents into splits.

    Args:
        vocab_size: of the tokenizer; larger ids are an error.
        val_fraction: share of the documents held out for validation; None for a single split.
        unknown_id: the id of text that is not in the vocabulary, if there is one.
    """

    eos_id: int
    vocab_size: int
    val_fraction: float | None
    unknown_id: int | None = None

    @property
    def num_splits(self) -> int:
        """1, or 2 with a validation split."""
        return 1 if self.val_fraction is None else 2

    def encode(
        self, encoder: Encoder, documents: Sequence[Document]
    ) -> tuple[list[Batch], IdCounts]:
        """Encode documents.

        Returns:
            A batch for each split (only the first if no document is held out), and counts.

        Raises:
            ShardError: an id outside the vocabulary.
        """
        texts = [document.text for document in documents]
        ids, ends, text_bytes = encoder.encode(texts)
        lengths = ends.copy()
        lengths[1:] -= ends[:-1]
        held_out = np.zeros(len(texts), bool)
        if self.val_fraction is not None:
            held_out[:] = [is_held_out(text.encode(), self.val_fraction) for text in texts]
        if len(ids):
            self._check_range(ids)
        tokens = self._append_eos(ids, ends[lengths > 0])
        num_eos = int(np.count_nonzero(tokens == self.eos_id))
        num_unknown = 0 if self.unknown_id is None else np.count_nonzero(ids == self.unknown_id)
        counts = IdCounts(num_eos - int((lengths > 0).sum()), int(num_unknown))
        origins = pack_origins(
            np.array([document.input for document in documents], np.uint64),
            np.array([document.start for document in documents], np.uint64),
        )
        lengths = np.where(lengths > 0, lengths + 1, 0)
        members = [~held_out, held_out] if held_out.any() else [np.ones(len(texts), bool)]
        batches = []
        for chosen in members:
            # A document may have no ids, such as only spaces with a tokenizer that drops them.
            kept = chosen & (lengths > 0)
            batches.append(
                Batch(
                    tokens if len(members) == 1 else tokens[np.repeat(chosen, lengths)],
                    lengths[kept],
                    origins[kept],
                    int(text_bytes[kept].sum()),
                )
            )
        return batches, counts

    def _check_range(self, ids: np.ndarray) -> None:
        largest = int(ids.max())
        smallest = 0 if ids.dtype.kind == "u" else int(ids.min())
        if largest >= self.vocab_size or smallest < 0:
            raise ShardError(
                f"token id {largest if smallest >= 0 else smallest} is outside the vocabulary of "
                f"{self.vocab_size}: the tokenizer's ids do not match its declared size. Correct "
                f"the tokenizer."
            )

    def _append_eos(self, ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Append the EOS id to each document; no document is empty."""
        tokens = np.empty(len(ids) + len(ends), token_dtype(self.vocab_size))
        eos_positions = ends + np.arange(len(ends))
        if len(ids) > LONG_DOCUMENT_TOKENS * len(ends):  # copying each is faster than a mask
            start = 0
            for number, end in enumerate(ends.tolist()):
                tokens[start + number : end + number] = ids[start:end]
                start = end
        else:
            is_text = np.ones(len(tokens), bool)
            is_text[eos_positions] = False
            tokens[is_text] = ids
        tokens[eos_positions] = self.eos_id
        return tokens
