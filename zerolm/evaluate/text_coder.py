"""Text to token ids and back, with the tokenizer that made the data, as lm-eval uses it.

Knows the copy of a tokenizer that lies beside the shards, or beside an exported model. Training
never comes here: its ids are in the shards.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.evaluate.likelihood import Row, problem_of
from zerolm.shards.tokenizer import TIKTOKEN_FILE, load_auto_tokenizer, read_tiktoken

DEFAULT_MAX_LENGTH = 2048  # of a model without such a bound, as in lm-eval


class TextCoder:
    """A tokenizer.

    Attributes:
        eos_id: ends a document.
        prefix_id: what stands before a text that has nothing before it.
        tokenizer: of transformers, None for one of tiktoken.

    Raises:
        ConfigError: there is no tokenizer in `directory`, or it has no end of text.
    """

    def __init__(self, directory: Path, eos_id: int | None = None):
        self.tokenizer: Any = None
        if (directory / TIKTOKEN_FILE).is_file():
            self._encoding = read_tiktoken(directory)
            self.eos_id = self._encoding.eot_token if eos_id is None else eos_id
            self.prefix_id = self.eos_id
            return
        if not directory.is_dir():
            raise ConfigError(
                f"{directory}: there is no tokenizer, which texts need. Tokenize the data with "
                f"python -m data_prep tokenize, which keeps a copy there."
            )
        self.tokenizer = load_auto_tokenizer(str(directory), local=True)
        known = self.tokenizer.eos_token_id
        if known is None and eos_id is None:
            raise ConfigError(f"{directory}: the tokenizer has no EOS token. Give it one.")
        self.eos_id = known if eos_id is None else eos_id
        bos_id = self.tokenizer.bos_token_id
        self.prefix_id = self.eos_id if bos_id is None else bos_id
        self._prefix = self.tokenizer.decode([self.prefix_id])

    def encode(self, text: str, special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text, with a BOS where the tokenizer puts one.

        Args:
            special_tokens: whether it may; None: unless the text begins with it.
        """
        if self.tokenizer is None:
            return self._encoding.encode(text, allowed_special="all")
        more = {} if special_tokens is None else {"add_special_tokens": special_tokens}
        if special_tokens is None and self._prefix and text.startswith(self._prefix):
            more = {"add_special_tokens": False}
        return self.tokenizer.encode(text, **more)

    def decode(self, ids: Sequence[int], special_tokens: bool = True) -> str:
        """Return the text of ids; those that are no token, where a model has more ids, have none.

        Args:
            special_tokens: whether they are shown.
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
        """Return the ids of a continuation with its context before, as one text is tokenized.

        Source: lm-evaluation-harness 0.4.13, `TemplateLM.loglikelihood` and `_encode_pair`.
        """
        if not context:
            ids = self.encode(continuation, special_tokens=False)
            if ids and ids[0] == self.prefix_id:
                return Row(ids, len(ids) - 1)
            return Row([self.prefix_id, *ids], len(ids))
        bare = context.rstrip()
        whole = self.encode(context + continuation)
        before = self.encode(bare)
        # The tokens of the context alone, even where they are others than in the whole.
        scored = whole[len(before) :]
        return Row(before + scored, len(scored))

    def rows(self, items: Sequence[Sequence[tuple[str, str]]], max_length: int) -> list[Row]:
        """Return the ids of each (context, continuation) of each item, one after the other.

        Raises:
            ConfigError: one that a model of so many positions cannot score, with the item's number.
        """
        found = []
        for number, item in enumerate(items, 1):
            for context, continuation in item:
                found.append(self.row(context, continuation))
                problem = problem_of(found[-1], max_length)
                if problem:
                    raise ConfigError(
                        f"item {number} {problem}: {continuation.strip()[:60]!r}. Leave it out."
                    )
        return found


def prompt_ids(coder: TextCoder, prompt: str) -> list[int]:
    """Return the ids to go on from; nothing is the end of the text before."""
    return coder.encode(prompt) or [coder.eos_id]


def max_length(config: Any, tokenizer: Any = None) -> int:
    """Return how many tokens a model takes at once.

    Source: lm-evaluation-harness 0.4.13, `resolve_max_length`.
    """
    config = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    known = getattr(tokenizer, "model_max_length", None)
    return int(known) if known is not None and known < 10**9 else DEFAULT_MAX_LENGTH
