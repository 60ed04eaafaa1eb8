"""Digests are sums of words, by numpy too, and change with each single bit."""

import numpy as np
import pytest
import torch

from zerolm.integrity.checks import flip_bit
from zerolm.integrity.digests import WORDS, digest, piecewise, values_of_piece


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 8, 1001])
def test_each_bit_of_each_value_changes_the_digest(dtype, count) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(digest(values))
    for index in {0, count // 2, count - 1}:
        for bit in range(8 * values.element_size()):
            flip_bit(values, index, bit)
            assert int(digest(values)) != before
            flip_bit(values, index, bit)
    assert int(digest(values)) == before


def test_a_digest_is_the_sum_of_the_words_modulo_2_to_the_64() -> None:
    values = torch.randn(2 * WORDS * 3 + 10, generator=torch.Generator().manual_seed(1))
    expected = values.numpy().view(np.int64).sum(dtype=np.int64)
    assert int(digest(values)) == int(expected) and len(piecewise(values)) == 4
    assert int(digest(values[1:][:-1])) == int(digest(values[1:-1].clone()))  # not aligned


def test_the_piece_of_a_changed_value_is_named() -> None:
    values = torch.zeros(2 * WORDS * 2 + 6, dtype=torch.float32)
    before = piecewise(values)
    for index in (0, 2 * WORDS, len(values) - 1):
        flip_bit(values, index, 5)
        (piece,) = (piecewise(values) != before).nonzero().flatten().tolist()
        start, stop = values_of_piece(values, piece)
        assert start <= index < stop
        flip_bit(values, index, 5)
