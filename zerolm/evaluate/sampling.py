"""Text generation on all ranks: prompts, and sampling of the next token.

A rank continues one prompt at a time, so a text does not depend on the other prompts or the number
of ranks. All ranks run the same number of forward passes, because ZeRO-3 gathers weights in each.
Each prompt has its own CPU random generator; the generators used in training are left alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zerolm.common.errors import ConfigError
from zerolm.distributed.collectives import gather_objects, sum_over_ranks
from zerolm.evaluate.likelihood import SINGLE_PROCESS, Ranks
from zerolm.evaluate.text_coder import TextCoder, max_length
from zerolm.model.compile import eager
from zerolm.model.forward import continued_logits, on_every_stage, own_logits

SYNC_INTERVAL = 8  # number of tokens between checks of whether all ranks are done
MIN_LOGIT = -1e30  # finite, but its probability is zero next to any usual logit
# decoded along with new tokens, because some tokenizers drop a text's first space
CONTEXT_TOKENS = 8
INCOMPLETE = "\ufffd"  # decoded from the first bytes of a character

Stop = Callable[[Sequence[int]], bool]


class SamplingOptions(NamedTuple):
    """How to sample the next token. Temperature 0 means greedy decoding. With top-k 0 and top-p 1,
    all tokens are candidates.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Prompt(NamedTuple):
    """A text to continue."""

    ids: list[int]
    max_new_tokens: int
    options: SamplingOptions = SamplingOptions()
    seed: int = 0


def token_probabilities(logits_V: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Return the probability of each token to be the next, as float64 of shape (V,).

    Top-k is applied first. Top-p then keeps the smallest set of likeliest tokens whose total
    probability reaches p.
    """
    # Generation must work even if the model has diverged.
    logits_V = logits_V.double().nan_to_num(nan=MIN_LOGIT, posinf=-MIN_LOGIT, neginf=MIN_LOGIT)
    if options.temperature == 0:
        best = torch.zeros_like(logits_V)
        best[logits_V.argmax()] = 1.0
        return best
    logits_V = logits_V / options.temperature
    if 0 < options.top_k < len(logits_V):
        least = logits_V.topk(options.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    probs_V = logits_V.softmax(-1)
    if options.top_p < 1:
        ordered_V, order_V = probs_V.sort(descending=True, stable=True)
        before_V = ordered_V.cumsum(0) - ordered_V
        probs_V[order_V[before_V >= options.top_p]] = 0
        probs_V /= probs_V.sum()
    return probs_V


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    stop: Stop,
    *,
    device: Any,
    ranks: Ranks = SINGLE_PROCESS,
    tick: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Continue each prompt, with a KV cache if the model has one. Every rank must call this.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        prompts: nonempty prompts, the same on every rank; each fits into the model's positions
            together with its new tokens.
        stop: takes the new tokens so far; returns whether to stop after them.
        tick: called before each forward pass.

    Returns:
        Each prompt's new tokens, including the one that stopped it, on every rank.
    """
    mine: dict[int, list[int]] = {}
    with torch.no_grad(), eager():
        for first in range(0, len(prompts), ranks.world_size):
            concurrent = prompts[first : first + ranks.world_size]
            num_passes = max(prompt.max_new_tokens for prompt in concurrent)
            number = first + ranks.rank
            prompt = prompts[number] if number < len(prompts) else Prompt([0], 0)
            mine[number] = _generate_one(model, prompt, num_passes, stop, device, ranks, tick)
    by_rank = gather_objects(mine) if ranks.world_size > 1 else [mine]
    merged = {number: ids for each in by_rank for number, ids in each.items()}
    return [merged[number] for number in range(len(prompts))]


def continuation(model: Any, prompt: Prompt, device: Any) -> Iterator[int]:
    """Yield new tokens for a prompt endlessly, each after one forward pass.

    Uses a KV cache if the model has one. Call under `torch.no_grad`. The caller applies
    `prompt.max_new_tokens`.
    """
    generator = torch.Generator().manual_seed(prompt.seed)
    ids, unseen, cache = list(prompt.ids), list(prompt.ids), dict[str, Any]()
    while True:
        ids_1T = torch.tensor([unseen], device=device)
        logits_1TV, cache = continued_logits(model, ids_1T, cache)
        probs_V = token_probabilities(logits_1TV[0, -1].float().cpu(), prompt.options)
        token = int(
            probs_V.argmax()
            if prompt.options.temperature == 0
            else torch.multinomial(probs_V, 1, generator=generator)
        )
        token = int(on_every_stage(model, torch.tensor(token, device=device)))
        ids.append(token)
        unseen = [token] if cache else ids
        yield token


def _generate_one(
    model: Any,
    prompt: Prompt,
    num_passes: int,
    stop: Stop,
    device: Any,
    ranks: Ranks,
    tick: Callable[[], None],
) -> list[int]:
    """Generate one text in lockstep with the other ranks, in no more than `num_passes` passes."""
    tokens, new = continuation(model, prompt, device), []
    done = prompt.max_new_tokens == 0
    for number in range(num_passes):
        tick()
        if not done:
            new.append(next(tokens))
            done = len(new) == prompt.max_new_tokens or stop(new)
        elif ranks.world_size > 1:  # helps to gather the weights
            own_logits(model, torch.tensor([[0]], device=device))
        else:
            break
        if ranks.world_size == 1 or (number + 1) % SYNC_INTERVAL:
            continue
        if int(sum_over_ranks(torch.tensor(int(not done), device=device))) == 0:
            break
    return new


def streamed_text(model: Any, coder: TextCoder, prompt: Prompt) -> Iterator[str]:
    """Yield a prompt's continuation in pieces, each as soon as it is generated.

    The text ends at an EOS token of the tokenizer or the model's generation config, after
    `prompt.max_new_tokens`, or at the model's maximum length. Not for models sharded over ranks.
    """
    room = max_length(model.config, coder.tokenizer) - len(prompt.ids)
    if room <= 0:
        raise ConfigError(
            f"the prompt has {len(prompt.ids)} tokens, but the model's maximum is "
            f"{room + len(prompt.ids)}. Use a shorter one."
        )
    also = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    stop_ids = {coder.eos_id, *(also if isinstance(also, list) else [also])}
    context, new = prompt.ids[-CONTEXT_TOKENS:], list[int]()
    shown = len(coder.decode(context).rstrip(INCOMPLETE))
    tokens = continuation(model, prompt, model.device)
    for _ in range(min(prompt.max_new_tokens, room)):
        with torch.no_grad(), eager():
            token = next(tokens)
        if token in stop_ids:
            return
        new.append(token)
        text = coder.decode(context + new).rstrip(INCOMPLETE)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
