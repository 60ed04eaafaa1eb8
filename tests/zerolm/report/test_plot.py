"""`zerolm plot`: the image shows the files of the run, complete or not."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

from zerolm.common.errors import ConfigError
from zerolm.report import plot
from zerolm.run_dir.jsonl import MetricsRow, read_rows


def write_run(run_dir, num_steps, half_line=False):
    """Write a run directory with a loss of 8 / step and a validation loss every tenth step."""
    run_dir.mkdir(parents=True)
    rows = [
        {"step": step, "tokens": step * 1000, "train/loss": 8 / step}
        for step in range(1, num_steps + 1)
    ]
    rows += [
        {"step": row["step"], "tokens": row["tokens"], "eval/loss": 3.0} for row in rows[9::10]
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir / "metrics.jsonl").write_text(text + ('{"step": 9' if half_line else ""))
    events = [("start", 0), ("checkpoint", 20), ("stopped", 20), ("resume", 20)]
    (run_dir / "events.jsonl").write_text(
        "".join(json.dumps({"event": kind, "step": step}) + "\n" for kind, step in events)
    )
    return run_dir


def test_series_equals_the_values_in_the_file(tmp_path):
    path = write_run(tmp_path / "run", 30, half_line=True) / "metrics.jsonl"
    rows = list(read_rows(path, MetricsRow))
    tokens, losses = plot.series(rows, "train/loss")
    np.testing.assert_array_equal(tokens, np.arange(1, 31) * 1000)
    np.testing.assert_array_equal(losses, 8 / np.arange(1, 31))
    assert plot.series(rows, "eval/loss")[0].tolist() == [10000, 20000, 30000]


def test_smoothing_is_a_centred_mean_that_keeps_both_ends():
    values = np.random.default_rng(0).normal(size=200)
    smoothed = plot.smooth(values)
    reach = round(200 * plot.SMOOTHING_SHARE)
    inside = np.convolve(values, np.full(2 * reach + 1, 1 / (2 * reach + 1)), mode="valid")
    np.testing.assert_allclose(smoothed[reach:-reach], inside)
    assert smoothed[0] == pytest.approx(values[0]) and smoothed[-1] == pytest.approx(values[-1])


def test_diverged_steps_are_left_out():
    rows = [{"tokens": 1, "train/loss": 2.0}, {"tokens": 2, "train/loss": float("nan")}]
    assert plot.series(rows, "train/loss")[1].tolist() == [2.0]


def test_the_plot_shows_each_run_in_its_colour(tmp_path):
    one, two = write_run(tmp_path / "one", 40), write_run(tmp_path / "two", 1)
    assert plot.plot_losses([two, one]) == two / "loss.png" and (two / "loss.png").is_file()
    picture = plot.plot_losses([one, two], tmp_path / "new" / "loss.png")
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (450, 800)
    blue = np.abs(pixels - np.array([0x1F, 0x77, 0xB4]) / 255).max(-1) < 0.02
    assert blue.sum() > 500, "the curve of the first run is not in the picture"


def test_labels_of_events_cover_neither_each_other_nor_the_legend(tmp_path):
    runs = [write_run(tmp_path / name, 400) for name in ("one", "two")]
    crowd = ["spike", "step_skipped", "spike", "cooldown", "rank_lost", "attempt_failed", "resume"]
    events = [{"event": kind, "step": 150 + at} for at, kind in enumerate(crowd)]
    events += [{"event": kind, "step": step} for kind, step in (
        ("stopped", 1), ("stage", 165), ("damaged", 171), ("stopped", 399), ("rollback", -1),
    )]  # fmt: skip
    for run_dir in runs:
        text = "".join(json.dumps(event) + "\n" for event in events)
        (run_dir / "events.jsonl").write_text(text)
    (axes,) = plot.draw_losses(runs).axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) >= 8 and "2 x spike" in " ".join(text.get_text() for text in axes.texts)
    boxes.append(axes.get_legend().get_window_extent())
    pairs = [(one, two) for at, one in enumerate(boxes) for two in boxes[:at]]
    assert not [pair for pair in pairs if pair[0].overlaps(pair[1])]
    area = axes.get_window_extent()
    assert all(area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 for box in boxes)


def test_every_run_without_a_loss_is_named(tmp_path):
    whole, empty = write_run(tmp_path / "whole", 3), tmp_path / "empty"
    with pytest.raises(ConfigError) as refusal:
        plot.plot_losses([empty, whole, tmp_path / "absent"], tmp_path / "loss.png")
    assert len(refusal.value.problems) == 2
    assert "empty" in refusal.value.problems[0] and "absent" in refusal.value.problems[1]
    assert not (tmp_path / "loss.png").exists()
