"""Samples: texts that a run's model generates at intervals from the prompts in a file."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.files import pointer_problem_of
from zerolm.common.records import unreadable
from zerolm.config.flag import count, flag
from zerolm.evaluate.evaluation import OWN_TEXTS, Evaluation, Scores, read_json_lines

SAMPLED_DOUBLINGS = 10  # by default, the first samples are due after 1/1024 of the run's tokens


class Samples(Evaluation):
    """Generated texts, written to `samples.jsonl`.

    Attributes:
        sampled_tokens: number of tokens trained when samples were last due.
    """

    name, setting, interval = "samples", "prompts", ""
    logged_key = ""  # after a rollback, the lines for repeated steps are removed

    @dataclass(frozen=True)
    class Flags:
        prompts: str | None = flag(
            "evaluation",
            "text",
            "prompts to generate samples from: one per line, or .jsonl with a key `prompt`",
            shows="PATH",
            not_with=OWN_TEXTS,
        )
        sample_interval: int | None = count(
            "evaluation",
            "training tokens between samples (default: each time the training tokens have "
            "doubled, and "
            "at the end)",
            "TOKENS",
        )
        sample_length: int = count(
            "evaluation", "maximum number of new tokens per sample", "TOKENS", default=64
        )
        temperature: float = flag(
            "evaluation",
            "real",
            "sampling temperature; 0: always the most likely token",
            shows="X",
            default=0.8,
            minimum=0.0,
        )
        top_k: int = count(
            "evaluation", "sample from the N most likely tokens; 0: from all", "N", 0, default=50
        )
        top_p: float = flag(
            "evaluation",
            "real",
            "sample from the most likely tokens whose probabilities add up to X; 1: from all",
            shows="X",
            default=1.0,
            above=0,
            maximum=1,
        )

    @classmethod
    def check(cls, settings: Any, coder: Any, max_length: int | None) -> None:
        from zerolm.evaluate.text_coder import prompt_ids

        path, length = Path(settings.prompts), settings.sample_length
        for number, text in enumerate(read_prompts(path), 1):
            tokens = 0 if max_length is None else len(prompt_ids(coder, text))
            if max_length is not None and tokens + length > max_length:
                raise ConfigError(
                    f"{path}: prompt {number} has {tokens} tokens; together with "
                    f"--sample_length {length}, they must not exceed {max_length}, the smaller of "
                    f"--seq_len and the model's maximum. Shorten one of them."
                )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not (prompts := plan.settings.prompts):
            return {}
        interval = plan.settings.sample_interval
        when = f"every {interval:,} tokens" if interval else "after each doubling of the tokens"
        return {"samples": f"of {prompts}, {when}"}

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.sampled_tokens = 0

    def restore(self, log: Any, skipped_tokens: int) -> None:
        from zerolm.distributed.collectives import broadcast_object

        sampled = broadcast_object(log.sampled_tokens() if log.writes else 0)
        self.sampled_tokens = max(sampled, skipped_tokens)  # skipped samples are not made up later

    def due(self, progress: Any, is_due: Callable[[int], bool]) -> bool:
        total, interval = self.settings.total_tokens, self.settings.sample_interval
        now, then = (
            num_points_passed(tokens, total, interval)
            for tokens in (progress.tokens, self.sampled_tokens)
        )
        if now > then:
            self.sampled_tokens = progress.tokens
        return now > then

    def measure(self, runner: Any, step: int = 0) -> Scores:
        from zerolm.evaluate.sampling import Prompt, SamplingOptions
        from zerolm.evaluate.text_coder import prompt_ids

        settings = self.settings
        texts = read_prompts(Path(settings.prompts))
        ids = [prompt_ids(runner.coder, text) for text in texts]
        longest = max(map(len, ids)) + settings.sample_length
        if longest > runner.max_length:  # only a new run is refused
            raise ConfigError(
                f"{settings.prompts}: the longest prompt and --sample_length add up to {longest} "
                f"tokens, but the maximum is {runner.max_length}"
            )
        options = SamplingOptions(settings.temperature, settings.top_k, settings.top_p)
        seeds = [sample_seed(settings.seed, step, number) for number in range(len(ids))]
        generated = runner.generate(
            [
                (Prompt(each, settings.sample_length, options, seed), [])
                for each, seed in zip(ids, seeds, strict=True)
            ]
        )
        rows = [
            {"prompt_number": n, "prompt": text, "text": new, "seed": seed, **options._asdict()}
            for n, (text, new, seed) in enumerate(zip(texts, generated, seeds, strict=True))
        ]
        return Scores({}, {"samples": rows})

    def record(
        self, scores: Scores, progress: Any, log: Any, print_line: Callable[..., None]
    ) -> None:
        where, rows = {"step": progress.step, "tokens": progress.tokens}, scores.file["samples"]
        log.samples([{**where, **row} for row in rows])
        for row in rows:
            shown = " ".join(f"{key}={json.dumps(row[key])}" for key in ("prompt", "text"))
            print_line(f"step={progress.step} sample={row['prompt_number']} {shown}")


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line; from `.jsonl`, one JSON object with `prompt` per line."""
    fix = 'Give a text file with one prompt per line, or JSON lines (.jsonl) with "prompt"'
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(unreadable(path, error, f"{fix}.")) from None
    if pointer := pointer_problem_of(path):
        raise ConfigError(f"{path}: {pointer}")
    if path.suffix == ".jsonl":
        lines = []
        for number, row in read_json_lines(path, fix):
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ConfigError(
                    f'{path}:{number}: not a JSON object with a string "prompt". {fix}.'
                )
            lines.append(row["prompt"])
    if not lines:
        raise ConfigError(f"{path}: contains no prompt. {fix}.")
    return lines


def sample_seed(seed: int, step: int, number: int) -> int:
    """Derive a sample's seed from the run's seed, the step and the prompt's index."""
    digest = hashlib.sha256(f"{seed}/sample/{step}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "little")  # a 32-bit integer is exact as a JSON number


def num_points_passed(tokens: int, total_tokens: int, interval: int | None) -> int:
    """Return how many times samples have been due in a run so far.

    Args:
        interval: number of tokens between samples; None for samples after each doubling of the
            number of tokens.
    """
    if interval:
        return tokens // interval + (tokens >= total_tokens and total_tokens % interval > 0)
    # tokens >= total / 2^k, in integers
    return sum(tokens << k >= total_tokens for k in range(SAMPLED_DOUBLINGS + 1))
