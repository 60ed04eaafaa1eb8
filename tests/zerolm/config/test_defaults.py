"""Defaults: the published numbers that their formulas must give."""

import pytest

from zerolm.config import defaults


@pytest.mark.parametrize(
    ("flops", "rate", "tokens"), [(1e19, 1.3e-3, 0.46e6), (1e20, 9.9e-4, 0.98e6)]
)
def test_learning_rate_and_batch_follow_the_fit(flops, rate, tokens):
    """DeepSeek LLM (arXiv 2401.02954), figure 3: near 1e-3 and near 1M tokens at 1e20 FLOPs."""
    assert defaults.learning_rate(flops) == pytest.approx(rate, rel=0.02)
    sequences = defaults.batch_sequences(flops, seq_len=2048, total_tokens=10**12)
    assert sequences & (sequences - 1) == 0
    assert 0.7 < sequences * 2048 / tokens < 1.42


def test_short_runs_still_take_many_steps():
    assert defaults.batch_sequences(1e22, seq_len=2048, total_tokens=2048 * 1000) <= 16


def test_micro_batches_divide_and_fit():
    assert defaults.micro_batch_candidates(24) == [1, 2, 4, 8]
    assert defaults.micro_batch_size(24, sequence_bytes=10, budget_bytes=79) == 4
    assert defaults.micro_batch_size(24, sequence_bytes=10, budget_bytes=1) == 1


@pytest.mark.parametrize(
    ("value", "said"), [(1000, "960 or 1024"), (10, "64"), (128, "128 or 192")]
)
def test_the_nearest_multiples_are_named(value, said):
    assert defaults.nearest_multiples(value, 64) == said
