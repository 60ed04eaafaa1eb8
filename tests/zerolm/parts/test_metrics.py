"""The table of metrics: which row a key belongs to, and what the console shows."""

import pytest

from zerolm.parts.metrics import ALL, OTHER, bar_figures, charts, line_figures, metric_of

ROW = {
    "step": 7, "tokens": 8192, "train/loss": 3.25, "train/learning_rate": 1e-3,
    "train/grad_norm": 0.5, "throughput/tokens_per_second": 12345.0, "throughput/mfu": 0.41,
    "train/param_norm": 9.0,
}  # fmt: skip


def test_no_metric_is_in_the_table_twice() -> None:
    keys = [metric.key for metric in ALL]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("train/loss", "train/loss"),
        ("train/loss2", None),
        ("data/my/source.v1/loss", "data/<source>/loss"),
        ("data/store_bytes", "data/store_bytes"),
        ("train/param_norm/layers.11", "train/param_norm/<block>"),
        ("router/load_imbalance/router.3", "router/load_imbalance/router.<n>"),
        ("eval/hellaswag/acc_norm", "eval/hellaswag/acc_norm"),
        ("eval/arc_easy/acc_norm", "eval/<task>/<metric>"),
        ("eval/gsm8k/exact_match_flexible-extract", "eval/<task>/<metric>"),
        ("eval/lambada/perplexity", "eval/<task>/word_perplexity"),
        ("train/new", None),
    ],
)
def test_a_key_belongs_to_its_row(key, row) -> None:
    found = metric_of(key)
    assert (found.key if found else None) == row


def test_every_metric_that_is_drawn_is_in_one_panel() -> None:
    keys = [metric.key.replace("<metric>", "acc").replace("<n>", "0") for metric in ALL]
    drawn = [key for chart in charts(keys) for key in chart.keys]
    wanted = [key for key, metric in zip(keys, ALL, strict=True) if metric.panel is not None]
    assert sorted(drawn) == sorted(wanted)


def test_a_metric_that_is_not_in_the_table_has_a_panel_of_its_own_at_the_end() -> None:
    (loss, new) = charts({"zzz/new", "train/loss"})
    assert loss.section == "Loss" and loss.keys == ["train/loss"]
    assert new.section == OTHER and new.panel.title == "zzz/new" and new.keys == ["zzz/new"]


def test_blocks_are_in_the_order_of_their_numbers() -> None:
    keys = [f"train/update_ratio/layers.{number}" for number in range(12)]
    (chart,) = charts(set(keys))
    assert chart.keys == keys


def test_the_console_shows_the_metrics_that_a_row_has() -> None:
    line = "loss=3.2500 lr=1.000e-03 grad_norm=0.500 tok/s=12.3k mfu=41.0%"
    assert line_figures(ROW) == line.split(" ")
    bar = ["loss 3.2500", "12.3k tok/s", "MFU 41.0%", "grad 0.5", "lr 1.00e-03"]
    assert bar_figures(ROW) == bar
    assert line_figures({"step": 7, "train/loss": None}) == bar_figures({}) == []
