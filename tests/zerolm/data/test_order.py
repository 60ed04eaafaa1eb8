"""The order of the data: exact, fair, stable, and equal to a plain scalar reference."""

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest

from zerolm.common.errors import ConfigError
from zerolm.data.order import Blend, Order, num_windows
from zerolm.data.quotas import MAX_SEQUENCES, exact_shares

M64 = (1 << 64) - 1

GOLDEN_TWO = [
    [0, 0, 0, 1, 0, 1, 1, 1],
    [622, 832, 20, 25, 500, 189, 160, 290],
    [0, 0, 0, 0, 0, 0, 0, 0],
]
GOLDEN_FAR = [
    [0, 0, 1, 0, 0],
    [331, 767, 197, 522, 13],
    [700, 700000, 1000000000, 700000000000, 3228180212899171],
]
GOLDEN_SMALL = [3, 8, 4, 9, 1, 5, 2, 7, 0, 6, 4, 2, 7, 0, 6, 9, 3, 5, 8, 1]
GOLDEN_MANY = [
    [0, 0, 1, 1, 0],
    [72784105, 90901241, 127, 3909, 2396645],
    [0, 6, 31578941, 31578914168, 31456520226],
]


GOLDEN_200 = "48c5e91646525520271e3b47114d8d6900bb9b389439663bf3c5817b2cf77241"


def reference(sizes, weights, seed, block, sequence_id):
    """The order as docs/data_order.md describes it: one sequence, Python integers only."""

    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) & M64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
        return x ^ (x >> 31)

    def key(*parts):
        k = 0
        for part in parts:
            k = mix(k ^ mix(part))
        return k

    def permute(x, size, k):
        bits = max(6, (size - 1).bit_length()) if size > 1 else 0
        low_bits = bits // 2
        while True:
            high, low = x >> low_bits, x & ((1 << low_bits) - 1)
            for number in range(6):
                round_key = (k + number * 0xD1B54A32D192ED03) & M64
                if number % 2 == 0:
                    high ^= mix(low ^ round_key) & ((1 << (bits - low_bits)) - 1)
                else:
                    low ^= mix(high ^ round_key) & ((1 << low_bits) - 1)
            x = high << low_bits | low
            if x < size:
                return x

    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    while any(block * share < 2 for share in shares):
        block *= 2

    def given(n):
        ends = [math.floor(n * sum(shares[: s + 1])) for s in range(len(shares))]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    source, sample = 0, sequence_id
    if len(sizes) > 1:
        number, slot = divmod(sequence_id, block)
        place = permute(slot, block, key(seed & M64, 1, number))
        before, after = given(number * block), given((number + 1) * block)
        while place >= after[source] - before[source]:
            place -= after[source] - before[source]
            source += 1
        sample = before[source] + place
    epoch, index = divmod(sample, sizes[source])
    return source, permute(index, sizes[source], key(seed & M64, 2, source, epoch)), epoch


@pytest.mark.parametrize(
    "sizes, weights, seed, block",
    [
        ([1000], [1], 0, 4096),
        ([1], [3.5], 1, 4096),
        ([1000, 300, 50_000], [0.5, 0.2, 0.3], 17, 512),
        ([7, 1, 2, 40], [0.1, 0.3, 1e-4, 2], -5, 100),
        ([1 << 40, (1 << 40) + 1, 12345], [1e12, 3e12, 1e9], 1 << 70, 4096),
    ],
)
def test_order_equals_a_scalar_reference(sizes, weights, seed, block):
    generator = np.random.default_rng(3)
    edges = [0, 1, 511, 512, 4095, 4096, 10**12, MAX_SEQUENCES - 1]
    ids = np.concatenate([edges, generator.integers(0, 1 << 20, 40), 1 << np.arange(62)])
    placed = Order(sizes, weights, seed, block)(ids)
    expected = [reference(sizes, weights, seed, block, int(number)) for number in ids]
    assert list(zip(*(part.tolist() for part in placed), strict=True)) == expected
    assert all(part.dtype == np.int64 for part in placed)


def test_order_never_changes():
    """Golden values: if one changes, no run can be resumed or reproduced. Never update them."""
    two = Order([1000, 300], [0.7, 0.3], seed=42)
    assert [part.tolist() for part in two(np.arange(8))] == GOLDEN_TWO
    far = np.array([10**6, 10**9, 10**12, 10**15, MAX_SEQUENCES - 1])
    assert [part.tolist() for part in two(far)] == GOLDEN_FAR
    assert Order([10], [1], seed=7)(np.arange(20)).window.tolist() == GOLDEN_SMALL
    many = Order([123_456_789, 5000, 77], [8, 1.5, 1e-5], seed=2**63)
    assert many.block == 2097152
    assert [part.tolist() for part in many(far)] == GOLDEN_MANY


def test_the_order_of_200_sources_never_changes():
    """Golden digest: with blends, of which the last has a denominator beyond 64 bits."""
    weights = [float(1 + number * number % 89) for number in range(200)]
    blends = [
        Blend(10**9, tuple(weights[::-1])),
        Blend(10**9 + 200_001, tuple(0.1 + weight / 3 for weight in weights)),
    ]
    order = Order([1000 + number for number in range(200)], weights, seed=5, blends=blends)
    assert [mixer._is_small for mixer in order._mixers] == [True, True, False]
    far, close = 10**9 + 4096 * np.arange(100), np.arange(100)
    placed = order(np.concatenate([close, far, 10**15 + close]))
    assert hashlib.sha256(np.stack(placed).tobytes()).hexdigest() == GOLDEN_200


def test_two_blends_cannot_start_at_one_sequence():
    with pytest.raises(AssertionError, match="blends ascend"):
        Order([100], [1.0], seed=5, blends=[Blend(8, (1.0,)), Blend(8, (1.0,))])


@pytest.mark.parametrize("digits", [1, 6, 15, 17])
@pytest.mark.parametrize("num_sources", [2, 3, 8, 23])
def test_sources_are_those_of_the_reference_however_far_apart_the_sequences_are(
    num_sources, digits
):
    """As ranks of a large run have them: few in each of many mixing blocks."""
    draw = np.random.default_rng(num_sources)
    weights = [float(f"{weight:.{digits}g}") for weight in draw.uniform(0.01, 1, num_sources)]
    sizes = draw.integers(1, 10**6, num_sources).tolist()
    starts = 10 ** draw.integers(0, 17, 3)
    order, together = Order(sizes, weights, seed=3), []
    for start in starts:  # with 64-bit arithmetic, if the weights allow
        ids = start + 12_289 * np.arange(8)
        expected = [reference(sizes, weights, 3, 64, int(number)) for number in ids]
        assert list(zip(*(part.tolist() for part in order(ids)), strict=True)) == expected
        together += expected
    placed = order(np.concatenate([start + 12_289 * np.arange(8) for start in starts]))
    assert list(zip(*(part.tolist() for part in placed), strict=True)) == together


@pytest.mark.parametrize("size", [1, 2, 3, 5, 63, 64, 65, 1000, 4096, 5000, 65537])
def test_one_source_yields_every_window_once_per_epoch_and_reshuffles(size):
    order = Order([size], [1.0], seed=11)
    placed = order(np.arange(3 * size))
    epochs = placed.window.reshape(3, size)
    assert (np.sort(epochs, axis=1) == np.arange(size)).all()
    assert (placed.epoch == np.repeat(np.arange(3), size)).all()
    if size >= 63:
        assert (epochs[0] != epochs[1]).mean() > 0.9 and (epochs[1] != epochs[2]).mean() > 0.9
        other_seed = Order([size], [1.0], seed=12)(np.arange(size)).window
        assert (epochs[0] != other_seed).mean() > 0.9


@pytest.mark.parametrize(
    "weights",
    [
        [0.7, 0.3],
        [1, 1, 1],
        [0.1] * 10,
        [1, 1e-3, 1e-5, 0.37, 2e-6],
        list(np.random.default_rng(1).random(60) + 1e-3),
    ],
)
def test_prefixes_that_end_on_a_block_differ_from_the_weights_by_at_most_one(weights):
    order = Order([1000] * len(weights), weights, seed=5)
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    numbers = [*range(1, 40), 10**6 + 1, 10**9 + 7, (MAX_SEQUENCES >> 24)]
    last = [0] * len(weights)
    for number in numbers:
        ends = number * order.block
        counts = order.counts(ends).tolist()
        assert sum(counts) == ends
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - share * ends) < 1
        # No source is starved: each has something in every block.
        assert all(now > before for now, before in zip(counts, last, strict=True))
        last = counts


def test_counts_equal_a_count_of_the_placements():
    order = Order([50, 600, 7], [0.2, 0.7, 0.1], seed=1, block=64)
    sources = order(np.arange(1000)).source
    for number in [0, 1, 2, 63, 64, 65, 500, 640, 1000]:
        assert order.counts(number).tolist() == np.bincount(sources[:number], minlength=3).tolist()
    assert Order([9], [1], seed=1).counts(123).tolist() == [123]


def test_epochs_of_each_source_of_a_mixture_are_sequential():
    sizes = [100, 33, 1000]
    order = Order(sizes, [0.5, 0.25, 0.25], seed=8)
    placed = order(np.arange(order.block * 60))
    for source, size in enumerate(sizes):
        mine = placed.source == source
        epochs, windows = placed.epoch[mine], placed.window[mine]
        drawn = np.arange(len(epochs)) // size
        assert (np.sort(epochs) == drawn).all()  # complete epochs, no window twice in one
        assert len(np.unique(epochs * size + windows)) == len(epochs)
        assert (epochs != drawn).sum() <= order.block * (1 + drawn[-1])  # overlap inside a block


def test_a_sequence_does_not_depend_on_the_others_of_the_call():
    order = Order([1000, 300, 5], [0.6, 0.3, 0.1], seed=2)
    ids = np.random.default_rng(0).permutation(20_000)
    together = order(ids)
    for part in (ids[:1], ids[5:12], ids[100:7000]):
        alone = order(part)
        where = np.array([np.flatnonzero(ids == number)[0] for number in part[:50]])
        for one, other in zip(alone, together, strict=True):
            assert (one[:50] == other[where]).all()
    assert [part.shape for part in order(np.zeros(0, np.int64))] == [(0,)] * 3


def test_weights_are_the_decimals_that_were_written():
    ids = np.arange(10_000)
    by_share = Order([500, 500], [0.7, 0.3], seed=4)(ids)
    for weights in ([7, 3], [70.0, 30.0], [np.float64(0.7), np.float64(0.3)], [1.4, 0.6]):
        placed = Order([500, 500], weights, seed=4)(ids)
        assert all((one == other).all() for one, other in zip(by_share, placed, strict=True))


def test_windows_are_spread_over_the_source():
    """Compared with a uniform shuffle by chi-squared, for small sources and a large one."""
    num_epochs = 20_000
    for size in (2, 3, 5, 6, 17, 40):
        epochs = np.arange(num_epochs)[:, None] * size + np.arange(2)
        firsts, seconds = Order([size], [1], seed=6)(epochs.ravel()).window.reshape(-1, 2).T
        for seen in (np.bincount(firsts, minlength=size), np.bincount(seconds, minlength=size)):
            even = num_epochs / size
            assert ((seen - even) ** 2 / even).sum() < size + 6 * math.sqrt(2 * size)
    windows = Order([10**8], [1], seed=0)(np.arange(1 << 16)).window
    seen = np.histogram(windows, 256, (0, 10**8))[0]
    assert ((seen - 256) ** 2 / 256).sum() < 255 + 6 * math.sqrt(2 * 255)
    assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(
    "weights, message",
    [
        ([0.5, 0.0], "weight 0.0 of source 1"),
        ([-1, 2], "weight -1 of source 0"),
        ([float("nan"), float("inf")], "weight inf of source 1"),
        ([1, 1e-9], "Raise it"),
    ],
)
def test_unusable_weights_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        Order([10, 10], weights, seed=0)
    assert len(refusal.value.problems) == (2 if weights[0] != weights[0] else 1)


def test_windows_cover_every_target_once():
    for num_tokens in range(30):
        for seq_len in (1, 2, 5):
            targets = [
                target
                for window in range(num_windows(num_tokens, seq_len))
                for target in range(window * seq_len + 1, window * seq_len + seq_len + 1)
            ]
            assert targets == list(range(1, len(targets) + 1))
            assert max(0, num_tokens - 1) - len(targets) in range(seq_len)


def test_the_smallest_share_of_a_source_is_two_to_the_minus_twenty():
    assert exact_shares([1, (1 << 20) - 1], allow_zero=False)[0] == Fraction(1, 1 << 20)
    with pytest.raises(ConfigError, match=r"the minimum is 2\^-20"):
        exact_shares([1, 1 << 20], allow_zero=False)
