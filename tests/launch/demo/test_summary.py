"""The demo fails when its run did not learn."""

import json

from launch.demo.summary import summary


def write_metrics(path, losses, validation):
    rows = [
        {"step": step, "tokens": step * 4096, "train/loss": loss}
        for step, loss in enumerate(losses, start=1)
    ]
    rows.append({"step": len(losses), "tokens": len(losses) * 4096, "eval/loss": validation})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_that_learned_passes_and_its_losses_are_printed(tmp_path):
    text, learned = summary(write_metrics(tmp_path / "m.jsonl", [8.3, 6.0] + [4.5] * 20, 4.7))
    assert learned
    assert "8.300 at first, 4.500" in text and "4.700" in text and "22, 90,112 tokens" in text


def test_a_run_whose_loss_fell_too_little_fails(tmp_path):
    assert not summary(write_metrics(tmp_path / "m.jsonl", [8.3] + [6.0] * 20, 6.0))[1]


def test_a_validation_loss_far_from_the_training_loss_fails(tmp_path):
    assert not summary(write_metrics(tmp_path / "m.jsonl", [8.3] + [4.5] * 20, 5.2))[1]
