"""Text that a model writes: prompts, the choice of the next token, and generation on all ranks.

Each prompt is one rank's, one at a time, so that its text depends neither on the other prompts nor
on the number of ranks. All ranks make the same number of forward passes: ZeRO-3 gathers weights in
each. Draws come from a generator of the prompt's own on the CPU; training's are left alone.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerolm.common.errors import ConfigError
from zerolm.distributed.collectives import gather_objects, sum_over_ranks
from zerolm.evaluate.likelihood import ALONE, Ranks
from zerolm.model.compile import eager

AGREE_EVERY = 8  # tokens between two looks at whether all ranks are done
LOWEST = -1e30  # a logit that nothing can be drawn with, beside others
SAMPLED_DOUBLINGS = 10  # by default samples begin at a 1024th of the run

Stop = Callable[[Sequence[int]], bool]


class Choice(NamedTuple):
    """How a token is chosen. Temperature 0: the likeliest. Top-k 0 and top-p 1: of all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Prompt(NamedTuple):
    """What to go on from, and how."""

    ids: list[int]
    num_tokens: int  # at most so many new ones
    choice: Choice = Choice()
    seed: int = 0


def read_prompts(path: Path) -> list[str]:
    """Read a prompt a line, or a JSON object with `prompt` a line if the name ends in `.jsonl`.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    fix = 'Give a text file with a prompt a line, or a .jsonl with "prompt"'
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). {fix}.") from None
    if path.suffix == ".jsonl":
        for number, line in enumerate(lines):
            try:
                lines[number] = json.loads(line)["prompt"]
                assert isinstance(lines[number], str)
            except (ValueError, KeyError, TypeError, AssertionError):
                raise ConfigError(
                    f'{path}:{number + 1}: is no JSON object with a text "prompt". {fix}.'
                ) from None
    if not lines:
        raise ConfigError(f"{path}: has no prompt. {fix}.")
    return lines


def seed_of(seed: int, step: int, number: int) -> int:
    """Return the seed of a sample: of the run's, the step and the prompt's number alone."""
    digest = hashlib.sha256(f"{seed}/sample/{step}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "little")  # exact in every reader of JSON


def passed(tokens: int, total_tokens: int, interval: int | None) -> int:
    """Return how many of the places where samples are due a run has reached.

    Args:
        interval: tokens between two; None: after each doubling of the tokens.
    """
    if interval:
        return tokens // interval + (tokens >= total_tokens and total_tokens % interval > 0)
    # tokens >= total / 2^k, in integers
    return sum(tokens << k >= total_tokens for k in range(SAMPLED_DOUBLINGS + 1))


def distribution(logits_V: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Return the (V,) float64 probabilities that a token is drawn with.

    Top-k first, then top-p: the fewest likeliest tokens whose probabilities reach it.
    """
    # A model that has diverged still writes something: what observes a run must not end it.
    logits_V = logits_V.double().nan_to_num(nan=LOWEST, posinf=-LOWEST, neginf=LOWEST)
    if choice.temperature == 0:
        best = torch.zeros_like(logits_V)
        best[logits_V.argmax()] = 1.0
        return best
    logits_V = logits_V / choice.temperature
    if 0 < choice.top_k < len(logits_V):
        least = logits_V.topk(choice.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    chances_V = logits_V.softmax(-1)
    if choice.top_p < 1:
        ordered_V, order_V = chances_V.sort(descending=True, stable=True)
        before_V = ordered_V.cumsum(0) - ordered_V
        chances_V[order_V[before_V >= choice.top_p]] = 0
        chances_V /= chances_V.sum()
    return chances_V


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    stop: Stop,
    *,
    device: Any,
    ranks: Ranks = ALONE,
    beat: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Go on from each prompt, with a KV cache where the model has one. Every rank must call.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        prompts: the same on every rank, none empty; with their new tokens within the positions.
        stop: is given the new tokens and tells whether to end there.
        beat: called before each forward pass.

    Returns:
        The new tokens of each prompt, with the last one; on every rank.
    """
    mine: dict[int, list[int]] = {}
    with torch.no_grad(), eager():
        for first in range(0, len(prompts), ranks.world_size):
            together = prompts[first : first + ranks.world_size]
            most = max(prompt.num_tokens for prompt in together)
            number = first + ranks.rank
            prompt = prompts[number] if number < len(prompts) else Prompt([0], 0)
            mine[number] = _one(model, prompt, most, stop, device, ranks, beat)
    everyone = gather_objects(mine) if ranks.world_size > 1 else [mine]
    merged = {number: ids for each in everyone for number, ids in each.items()}
    return [merged[number] for number in range(len(prompts))]


def _one(
    model: Any,
    prompt: Prompt,
    most: int,
    stop: Stop,
    device: Any,
    ranks: Ranks,
    beat: Callable[[], None],
) -> list[int]:
    """Generate one text, in step with the other ranks', of which the longest has `most` tokens."""
    generator = torch.Generator().manual_seed(prompt.seed)
    ids, new = list(prompt.ids), []
    cache, unseen = None, list(prompt.ids)
    done = prompt.num_tokens == 0
    for number in range(most):
        beat()
        if not done:
            more: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
            outputs = model(input_ids=torch.tensor([unseen], device=device), use_cache=True, **more)
            cache = getattr(outputs, "past_key_values", None)
            chances_V = distribution(outputs.logits[0, -1].float().cpu(), prompt.choice)
            token = int(
                chances_V.argmax()
                if prompt.choice.temperature == 0
                else torch.multinomial(chances_V, 1, generator=generator)
            )
            new.append(token)
            ids.append(token)
            unseen = ids if cache is None else [token]
            done = len(new) == prompt.num_tokens or stop(new)
        elif ranks.world_size > 1:  # for the weights that the others gather
            model(input_ids=torch.tensor([[0]], device=device), use_cache=False)
        else:
            break
        if ranks.world_size == 1 or (number + 1) % AGREE_EVERY:
            continue
        if int(sum_over_ranks(torch.tensor(int(not done), device=device))) == 0:
            break
    return new
