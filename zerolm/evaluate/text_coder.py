"""`TextCoder`: converts text to token ids and back as lm-eval does, with the data's tokenizer.

Reads the copy of the tokenizer next to the shards or an exported model. Must not depend on the
model or on training. Training itself never tokenizes, since the shards contain token ids.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.evaluate.likelihood import Row, row_problem
from zerolm.model.model import max_positions
from zerolm.shards.boundaries import Template, template_of
from zerolm.shards.reader import Source
from zerolm.shards.tokenizer import TIKTOKEN_FILE, load_auto_tokenizer, read_tiktoken

DEFAULT_MAX_LENGTH = 2048  # used if neither the model nor the tokenizer sets a limit, as in lm-eval


class TextCoder:
    """A tokenizer from transformers or tiktoken.

    Args:
        eos_id: used in place of the tokenizer's EOS id.
        before: ids that precede a text, in place of those that the tokenizer puts there. What it
            puts after a text is always left out: a prompt must not end with EOS.

    Attributes:
        eos_id: id that ends a document.
        prefix_id: id that precedes a text without context: the BOS id if there is one, otherwise
            the EOS id.
        has_template: whether the tokenizer itself adds ids to a text.
        tokenizer: a transformers tokenizer; None for tiktoken.
        notices: a line if the tokenizer class and its tokenizer.json differ; the latter takes
            precedence.

    Raises:
        ConfigError: there is no tokenizer in `directory`, or it has no EOS token.
    """

    def __init__(
        self, directory: Path, eos_id: int | None = None, before: Sequence[int] | None = None
    ):
        self.tokenizer: Any = None
        self.has_template = False
        self.notices: list[str] = []
        if (directory / TIKTOKEN_FILE).is_file():
            self._encoding = read_tiktoken(directory)
            self.eos_id = self._encoding.eot_token if eos_id is None else eos_id
            self.prefix_id = self.eos_id
            return
        if not directory.is_dir():
            raise ConfigError(
                f"{directory}: there is no tokenizer, but evaluation on text needs one. Tokenize "
                f"the data with `zerolm data tokenize`, which copies the tokenizer there."
            )
        self.tokenizer = load_auto_tokenizer(str(directory), local=True, notices=self.notices)
        known = self.tokenizer.eos_token_id
        if known is None and eos_id is None:
            raise ConfigError(f"{directory}: the tokenizer has no EOS token. Add one.")
        self.eos_id = known if eos_id is None else eos_id
        template = template_of(
            lambda text, adds: self.tokenizer.encode(text, add_special_tokens=adds)
        )
        self.has_template = template != Template([], [])
        self._before = template.before if before is None else list(before)
        bos_id = self.tokenizer.bos_token_id
        if before is not None and template.before:
            bos_id = before[0] if before else None  # an untrained BOS precedes no text
        self.prefix_id = self.eos_id if bos_id is None else bos_id
        self._prefix = self.tokenizer.decode([self.prefix_id])

    @classmethod
    def of_shards(cls, source: Source) -> "TextCoder":
        """Return the coder of a source's tokenizer, which begins texts as documents begin there."""
        before = [] if source.bos_id is None else [source.bos_id]
        return cls(source.tokenizer_directory(), source.eos_id, before)

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text.

        Args:
            special_tokens: whether a BOS may precede them; if None, only of a text without one.
        """
        if self.tokenizer is None:
            return self._encoding.encode(text, allowed_special="all")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if special_tokens is None:
            special_tokens = not (self._prefix and text.startswith(self._prefix))
        return [*self._before, *ids] if special_tokens else ids

    def decode(self, ids: Sequence[int], special_tokens: bool = True) -> str:
        """Decode token ids to text, optionally without special tokens.

        Ids that only pad the vocabulary, and so are not in the tokenizer, are skipped.
        """
        if self.tokenizer is not None:
            known = [token for token in ids if token < len(self.tokenizer)]
            return self.tokenizer.decode(known, skip_special_tokens=not special_tokens)
        special = set() if special_tokens else {self.eos_id}
        return b"".join(map(self._bytes, filter(lambda token: token not in special, ids))).decode(
            "utf-8", "replace"
        )

    def _bytes(self, token: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(token)
        except KeyError:
            return b""

    def row(self, context: str, continuation: str) -> Row:
        """Return the ids of a context and its continuation, tokenized together as one text.

        Source: lm-evaluation-harness 0.4.13, `TemplateLM.loglikelihood` and `_encode_pair`.
        """
        if not context:
            ids = self.encode(continuation, special_tokens=False)
            if ids and ids[0] == self.prefix_id:
                return Row(ids, len(ids) - 1)
            return Row([self.prefix_id, *ids], len(ids))
        # Tokenize the context alone, even if its ids differ in the joined text.
        context_ids = self.encode(context.rstrip())
        scored_ids = self.encode(context + continuation)[len(context_ids) :]
        return Row(context_ids + scored_ids, len(scored_ids))

    def rows(self, items: Sequence[Sequence[tuple[str, str]]], max_length: int) -> list[Row]:
        """Return a row for each (context, continuation) pair of each item, in order.

        Raises:
            ConfigError: a row cannot be scored; the message names the item.
        """
        rows = []
        for number, item in enumerate(items, 1):
            for context, continuation in item:
                rows.append(self.row(context, continuation))
                problem = row_problem(rows[-1], max_length)
                if problem:
                    raise ConfigError(
                        f"item {number} {problem}: {continuation.strip()[:60]!r}. Remove it."
                    )
        return rows


def prompt_ids(coder: TextCoder, prompt: str) -> list[int]:
    """Return the token ids of a prompt, or the EOS id for an empty prompt."""
    return coder.encode(prompt) or [coder.eos_id]


def max_length(config: Any, tokenizer: Any = None) -> int:
    """Return the maximum number of tokens per text in a model's forward pass.

    Source: lm-evaluation-harness 0.4.13, `resolve_max_length`, which does not handle MPT's
    `max_seq_len` and the padding rows of RoBERTa's position tables.
    """
    if positions := max_positions(config):
        return positions
    known = getattr(tokenizer, "model_max_length", None)
    return int(known) if known is not None and known < 10**9 else DEFAULT_MAX_LENGTH
