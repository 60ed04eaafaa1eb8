"""`ModelRunner`: scores and generates texts for rank 0, using all ranks.

The code of evaluations runs only on rank 0, so its errors affect no other rank. Rank 0 sends the
token ids of each list of requests to all ranks, which compute in lockstep. The other ranks wait in
`serve`; `KeepAlive` prevents their timeouts while rank 0 works. Must not depend on evaluations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zerolm.distributed.collectives import broadcast_object
from zerolm.evaluate.keepalive import KeepAlive, receive
from zerolm.evaluate.likelihood import SINGLE_PROCESS, Ranks, Row, log_likelihoods
from zerolm.evaluate.sampling import Prompt, generate
from zerolm.evaluate.text_coder import TextCoder


class ForwardError(Exception):
    """A forward pass failed on this rank, and the other ranks may be waiting in it."""


class ModelRunner:
    """A model, its tokenizer, and limits on its forward passes.

    Args:
        coder: the tokenizer; None if there is none or none is needed.
        max_length: maximum number of tokens per text in a forward pass.
        tick: called before each forward pass.
    """

    def __init__(
        self,
        model: Any,
        device: Any,
        coder: TextCoder | None,
        max_length: int,
        batch_tokens: int,
        ranks: Ranks = SINGLE_PROCESS,
        tick: Callable[[], None] = lambda: None,
    ):
        self.model, self.device, self.ranks, self.tick = model, device, ranks, tick
        self._coder, self.max_length, self.batch_tokens = coder, max_length, batch_tokens
        self._alive: KeepAlive | None = None  # while the other ranks are in `serve`

    @property
    def coder(self) -> TextCoder:
        assert self._coder is not None, "text evaluations need a tokenizer"
        return self._coder

    # ---- Rank 0, or a single process

    def score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether each scored token is the likeliest) for each row."""
        return self._compute("_score", rows)

    def generate(self, prompts: Sequence[tuple[Prompt, list[str]]]) -> list[str]:
        """Return the continuation of each prompt, up to its first stop string.

        Args:
            prompts: (prompt, stop strings) pairs.
        """
        return self._compute("_generate", prompts)

    @contextmanager
    def serving_peers(self) -> Iterator[None]:
        """Keep the other ranks in `serve` inside this context, and make them return at its end.

        Raises:
            ForwardError: a forward pass failed. After any other error, all ranks can continue.
        """
        has_peers = self.ranks.peers
        try:
            with KeepAlive(self.tick, has_peers, self.device) as self._alive:
                yield
        except ForwardError:
            raise  # the other ranks are not in `serve`
        except BaseException:
            if has_peers:
                broadcast_object(None)
            raise
        finally:
            self._alive = None
        if has_peers:
            broadcast_object(None)

    def _compute(self, method: str, requests: Sequence[Any]) -> list[Any]:
        if self._alive is None or not requests:
            return getattr(self, method)(requests) if requests else []
        try:
            with self._alive.paused():
                if self.ranks.peers:
                    broadcast_object((method, requests))
                return getattr(self, method)(requests)
        except Exception as error:
            raise ForwardError(f"{type(error).__name__}: {error}") from error

    # ---- The other ranks

    def serve(self) -> None:
        """Run forward passes for rank 0's requests until rank 0 sends None. Every rank except rank
        0 must call this.
        """
        while (message := receive(self.tick)) is not None:
            method, requests = message
            getattr(self, method)(requests)

    # ---- Every rank

    def ticking(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches for the caller's forward passes, and call `tick` before each."""
        for batch in batches:
            self.tick()
            yield batch

    def _score(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        sums, likeliest = log_likelihoods(
            self.model,
            rows,
            device=self.device,
            batch_tokens=self.batch_tokens,
            max_length=self.max_length,
            ranks=self.ranks,
            tick=self.tick,
        )
        return list(zip(sums.tolist(), likeliest.tolist(), strict=True))

    def _generate(self, prompts: Sequence[tuple[Prompt, list[str]]]) -> list[str]:
        texts: list[str] = [""] * len(prompts)
        stops_of = [tuple(filter(None, stops)) for _, stops in prompts]
        for stops in dict.fromkeys(stops_of):
            numbers = [number for number, each in enumerate(stops_of) if each == stops]

            def stop(ids: Sequence[int], stops: tuple[str, ...] = stops) -> bool:
                if ids[-1] == self.coder.eos_id or not stops:
                    return ids[-1] == self.coder.eos_id
                text = self.coder.decode(ids, special_tokens=False)
                return any(end in text for end in stops)

            generated = generate(
                self.model, [prompts[n][0] for n in numbers], stop,
                device=self.device, ranks=self.ranks, tick=self.tick,
            )  # fmt: skip
            for number, ids in zip(numbers, generated, strict=True):
                text = self.coder.decode(ids, special_tokens=False)
                for end in stops:
                    text = text.split(end)[0]
                texts[number] = text
        return texts
