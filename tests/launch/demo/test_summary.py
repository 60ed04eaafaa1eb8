"""The demo fails when its run did not learn."""

import json

from launch.demo.summary import summary

WEIGHTS = {"code": 0.8, "prose": 0.2}


def write_metrics(path, losses, code, prose, total):
    rows = [
        {"step": step, "tokens": step * 4096, "train/loss": loss}
        for step, loss in enumerate(losses, start=1)
    ]
    rows.append({"step": len(losses), "tokens": len(losses) * 4096, "eval/loss": total})
    rows[-1] |= {"eval/code-val/loss": code, "eval/prose-val/loss": prose}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_that_learned_passes_and_its_losses_are_printed(tmp_path):
    metrics = write_metrics(tmp_path / "m.jsonl", [8.3, 6.0] + [4.5] * 50, 4.4, 5.9, 4.5)
    text, learned = summary(metrics, WEIGHTS)
    assert learned
    assert "8.300 at first, 4.500" in text and "52, 212,992 tokens" in text
    assert "eval/loss     4.700 (0.8 x 4.400 code + 0.2 x 5.900 prose)" in text


def test_the_share_of_a_source_in_the_validation_text_does_not_matter(tmp_path):
    """A library that leaves little code to hold out: the mean over tokens is that of prose."""
    metrics = write_metrics(tmp_path / "m.jsonl", [8.3] + [4.5] * 50, 4.4, 5.9, 5.8)
    assert summary(metrics, WEIGHTS)[1]


def test_a_run_whose_loss_fell_too_little_fails(tmp_path):
    metrics = write_metrics(tmp_path / "m.jsonl", [8.3] + [6.0] * 50, 6.0, 6.0, 6.0)
    assert not summary(metrics, WEIGHTS)[1]


def test_a_validation_loss_far_from_the_training_loss_fails(tmp_path):
    metrics = write_metrics(tmp_path / "m.jsonl", [8.3] + [4.5] * 50, 5.0, 6.1, 4.5)
    assert not summary(metrics, WEIGHTS)[1]
