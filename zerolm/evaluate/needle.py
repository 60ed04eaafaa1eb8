"""Needles: random key-value pairs in validation text; the model must find the value by its key.

An item is a window of validation text with a key and its value inserted at some depth. The key is
repeated at the end, and the value is scored as its continuation. Both consist of random token ids
from the text, so only the context can predict the value. Works on ids; must not depend on a
tokenizer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import ConfigError
from zerolm.config.flag import count
from zerolm.evaluate.evaluation import OWN_TEXTS, Evaluation, ExportFlag, Scores
from zerolm.run_dir.metrics import HIGHER, LOWER, Metric, Panel

if TYPE_CHECKING:
    from zerolm.evaluate.likelihood import Row

DEPTHS = (10, 50, 90)  # percentage of the text that precedes the key
NUM_IDS = 4  # number of ids per key and per value
MIN_SEQ_LEN = 32  # length of a window with a needle
ACCURACY = Panel("Needles", points=True,
    about="Share of random values in validation text that the model finds by key.")  # fmt: skip


class Needle(Evaluation):
    """Accuracy and loss on the values, in total and by depth, measured along with each validation
    loss.
    """

    name, setting, requires, interval = "needle", "needle_items", ("val_data",), "eval_interval"
    on_texts, of_other_weights = False, True
    EXPORT = (ExportFlag("needle_items"),)
    # fmt: off
    METRICS = (
        Metric("eval/needle/acc", "share", ACCURACY,
            "with `--needle_items`: share of random values in validation text that the model "
            "finds by their keys, at all depths", better=HIGHER),
        Metric("eval/needle/acc_at_<depth>", "share", ACCURACY,
            "the same for values at one depth: 10%, 50% or 90% of the text precede the key",
            better=HIGHER),
        Metric("eval/needle/loss", "nats per token",
            Panel("Needles, loss", points=True),
            "mean loss on the values", better=LOWER),
        Metric("eval/needle/loss_at_<depth>", "nats per token",
            Panel("Needles by depth, loss", points=True), "the same for values at one depth",
            better=LOWER),
    )
    # fmt: on

    @dataclass(frozen=True)
    class Flags:
        needle_items: int = count(
            "evaluation",
            "with each validation, look up random keys in N windows of --val_data; 0: off",
            "N",
            minimum=0,
            default=0,
            not_with=OWN_TEXTS,
        )

    @classmethod
    def problems(cls, settings: Any) -> Iterable[str]:
        if settings.needle_items and (settings.seq_len or MIN_SEQ_LEN) < MIN_SEQ_LEN:
            yield (
                f"{settings.where('needle_items')}: {settings.needle_items} needs --seq_len "
                f"{MIN_SEQ_LEN} or more: a needle takes 16. Raise it, or remove this setting."
            )

    def read(self) -> None:
        assert self.held_out is not None
        if self.held_out.options["seq_len"] < MIN_SEQ_LEN:
            raise ConfigError(f"--needle_items: needs --seq_len {MIN_SEQ_LEN} or more. Raise it.")

    def measure(self, runner: Any, step: int = 0) -> Scores:
        import torch

        assert self.held_out is not None
        windows = self.held_out.windows(self.settings.needle_items)
        ends = {
            number
            for source in self.held_out.sources
            for number in (source.eos_id, source.bos_id)
            if number is not None
        }
        scores = runner.score(rows(windows, ends))
        measured = torch.tensor(scores, dtype=torch.float64).reshape(-1, len(DEPTHS), 2)
        losses, hits = -measured[..., 0] / NUM_IDS, measured[..., 1]
        row = {"needle/acc": float(hits.mean()), "needle/loss": float(losses.mean())}
        for number, depth in enumerate(DEPTHS):
            row[f"needle/acc_at_{depth}"] = float(hits.mean(0)[number])
            row[f"needle/loss_at_{depth}"] = float(losses.mean(0)[number])
        return Scores(row)


def rows(windows: Iterable[Sequence[int]], excluded: Iterable[int]) -> "list[Row]":
    """Return one item per window and depth; all items of a window have the same key and value.

    Args:
        windows: token ids.
        excluded: ids that must not occur in keys or values.
    """
    import numpy as np

    from zerolm.evaluate.likelihood import Row

    texts = [list(window) for window in windows]
    candidates = np.setdiff1d(np.concatenate(texts), list(excluded))
    items = []
    for number, text in enumerate(texts):
        key, value = np.random.default_rng(number).choice(candidates, (2, NUM_IDS)).tolist()
        room = len(text) - 4 * NUM_IDS
        for depth in DEPTHS:
            at = room * depth // 100
            ids = [*text[:at], *key, *value, *text[at:room], *key, *value]
            items.append(Row(ids, NUM_IDS))
    return items
