"""Validation loss, computed on all ranks; it is the same for every ZeRO stage and world size."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolm.config.flag import switch
from zerolm.evaluate.evaluation import Evaluation, ExportFlag, Scores
from zerolm.run_dir.metrics import BITS_PER_BYTE, LOSS, LOWER, Metric, Panel

if TYPE_CHECKING:
    import torch

    from zerolm.engine.protocol import Model

# Start of each measured quarter of the window, as a fraction of the possible start positions.
QUARTERS = {"first": 0.0, "middle": 0.5, "last": 1.0}


class Validation(Evaluation):
    """Loss and bits per byte on `--val_data`, in total, by source, and by position."""

    name, setting, interval = "loss", "val_data", "eval_interval"
    on_texts, on_every_rank, of_other_weights = False, True, True
    logged_key = "eval/loss"
    SECTION = "Loss"
    EXPORT = (
        ExportFlag(
            "val_data",
            help="token shards: compute loss and bits per byte, like a run's eval/...; may be "
            "repeated",
        ),
        ExportFlag(
            "data",
            help="token shards that the model was trained on: --val_data with documents of theirs "
            "is refused; may be repeated",
        ),
        ExportFlag(
            "seq_len",
            help="tokens per sequence of --val_data; give the run's value to reproduce its figures "
            "(default: 2048, or the model's positions if fewer)",
        ),
        *map(ExportFlag, ("eval_tokens", "document_mask", "packing", "loss_by_position")),
    )
    # fmt: off
    METRICS = (
        Metric("eval/loss", "nats per token", LOSS,
            "mean over the validation tokens of all `--val_data`", better=LOWER),
        Metric("eval/perplexity", "", None, "`exp(eval/loss)`", better=LOWER),
        Metric("eval/bits_per_byte", "bits per byte", BITS_PER_BYTE,
            "the same loss in bits per byte of text", better=LOWER),
        Metric("eval/<source>/loss", "nats per token",
            Panel("Evaluation by source", many=True, points=True),
            "validation loss on one source; only if there are several", better=LOWER),
        Metric("eval/loss_at_<part>_quarter", "nats per token",
            Panel("Evaluation by position", points=True,
                about="Loss on the first, middle and last quarter of the window: if the model "
                    "uses its context, its loss is lower later in the window."),
            pattern=r"eval/([a-z]+_)?loss_at_[a-z]+_quarter",
            about="with `--loss_by_position`: validation loss on the window's `first`, `middle` or "
                "`last` quarter; with `--ema_tokens` also `eval/ema_loss_at_...`", better=LOWER),
        Metric("eval/<source>/loss_at_<part>_quarter", "nats per token",
            Panel("Evaluation by source and position", many=True, points=True),
            "the same for one source; only if there are several", better=LOWER),
        Metric("eval/<source>/bits_per_byte", "bits per byte",
            Panel("Evaluation by source, bits per byte", many=True, points=True),
            "`eval/bits_per_byte` for one source; only if there are several", better=LOWER),
    )
    # fmt: on

    @dataclass(frozen=True)
    class Flags:
        loss_by_position: bool = switch(
            "data", "also log the validation loss on the window's first, middle and last quarter"
        )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not plan.val_sources:
            return {"evaluation": "no validation loss: there is no --val_data"}
        every = plan.settings.eval_interval
        return {"evaluation": f"{plan.val_sequences:,} sequences every {every} steps"}

    def measure(self, runner: Any, step: int = 0) -> Scores:
        held_out = self.held_out
        assert held_out is not None
        token_bytes = held_out.token_bytes
        figures = validation_loss(
            runner.model,
            runner.ticking(held_out.batches(runner.device)),
            held_out.names,
            None if token_bytes is None else token_bytes.to(runner.device),
            by_position=self.settings.loss_by_position,
        )
        runner.model.eval()
        return Scores(figures)

    def shown(self, figures: Mapping[str, float]) -> str:
        shown = [f"eval_loss={figures['loss']:.4f} eval_perplexity={figures['perplexity']:.2f}"]
        if "bits_per_byte" in figures:
            shown.append(f"eval_bits_per_byte={figures['bits_per_byte']:.4f}")
        others = [
            key for key in figures if re.fullmatch(r"\w+_loss", key)
        ]  # losses of other weights
        return " ".join(shown + [f"eval_{key}={figures[key]:.4f}" for key in others])


def validation_loss(
    engine: "Model",
    batches: "Iterable[dict[str, torch.Tensor]]",
    source_names: Sequence[str],
    token_bytes: "torch.Tensor | None" = None,
    *,
    by_position: bool = False,
) -> dict[str, float]:
    """Return loss and bits per byte on validation data, in total and by source.

    Every rank must call this.

    Args:
        engine: a DeepSpeed engine, or a model in a single process; left in training mode.
        batches: this rank's micro-batches on the engine's device. Every rank must have the same
            number of them, because ZeRO-3 gathers weights in each forward pass.
        token_bytes: number of text bytes for each token id, for `sums_by_source`; None if unknown.
        by_position: also return the loss on each of three quarters of the window.

    Returns:
        `loss`, `perplexity` and `bits_per_byte`; with several sources also `<source>/loss` and
        `<source>/bits_per_byte`; with `by_position` also `loss_at_first_quarter` and so on.
    """
    import torch

    from zerolm.distributed.collectives import sum_over_ranks
    from zerolm.model.compile import eager
    from zerolm.model.forward import has_losses, token_losses
    from zerolm.model.loss import sums_by_source

    num_sums = 2 if token_bytes is None else 4
    sums = torch.zeros(num_sums, len(source_names), dtype=torch.float64, device=engine.device)
    parts = QUARTERS if by_position else ()
    of_parts = torch.zeros(
        len(parts), 2, len(source_names), dtype=torch.float64, device=engine.device
    )
    engine.eval()
    with torch.no_grad(), eager():
        for batch in batches:
            losses_BT, _ = token_losses(engine, batch)
            sums += sums_by_source(losses_BT, batch, len(source_names), token_bytes)
            for number, part in enumerate(parts):
                columns = _quarter(part, losses_BT.shape[1])
                of_part = {**batch, "targets": batch["targets"][:, columns]}
                of_parts[number] += sums_by_source(
                    losses_BT[:, columns], of_part, len(source_names)
                )
    engine.train()
    if not has_losses(engine):
        sums, of_parts = torch.zeros_like(sums), torch.zeros_like(of_parts)
    if torch.distributed.is_initialized():
        sum_over_ranks(sums)
        if parts:
            sum_over_ranks(of_parts)
    row = _figures(sums, source_names)
    for part, of_part in zip(parts, of_parts, strict=True):
        row |= _figures(of_part, source_names, f"_at_{part}_quarter")
    return row


def _quarter(part: str, length: int) -> slice:
    size = length // 4
    start = int(QUARTERS[part] * (length - size))
    return slice(start, start + size)


def _figures(
    sums: "torch.Tensor", source_names: Sequence[str], suffix: str = ""
) -> dict[str, float]:
    """Return loss and bits per byte from `sums_by_source`, in total and by source."""
    from zerolm.model.loss import bits_per_byte

    of_each = {"": [sum(each) for each in sums.tolist()]}
    if len(source_names) > 1:
        of_sources = zip(source_names, sums.T.tolist(), strict=True)
        of_each |= {f"{name}/": of_source for name, of_source in of_sources}
    row = {}
    for prefix, (loss, num_tokens, *text) in of_each.items():
        if num_tokens:
            row[f"{prefix}loss{suffix}"] = loss / num_tokens
            if not prefix and not suffix:
                row["perplexity"] = perplexity(row["loss"])
        if text and text[1]:
            row[f"{prefix}bits_per_byte"] = bits_per_byte(*text)
    return row


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows: a diverged run must not crash here."""
    return math.exp(loss) if loss < 700 else math.inf
