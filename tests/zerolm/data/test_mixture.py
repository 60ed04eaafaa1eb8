"""Mixtures with blends and caps equal a reference that assigns one sequence after the other."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from zerolm.data.mixture import Mixture, redistribute, same_order_until, temperature_weights
from zerolm.data.order import Blend, Order
from zerolm.data.quotas import MAX_SEQUENCES, exact_shares

M64 = (1 << 64) - 1
NUM = 300  # sequences that the slow reference assigns
GOLDEN_STAGED = [
    [0, 0, 1, 0, 0, 1, 2, 0],
    [758, 793, 12, 785, 453, 82, 29, 814],
    [0, 0, 0, 0, 0, 1, 0, 0],
]


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


def shuffled(items, k):
    """Return a list permuted with a key: place x of the result has item p(x)."""
    size = len(items)
    bits = max(6, (size - 1).bit_length()) if size > 1 else 0
    low_bits = bits // 2

    def once(x):
        high, low = x >> low_bits, x & ((1 << low_bits) - 1)
        for number in range(6):
            round_key = (k + number * 0xD1B54A32D192ED03) & M64
            if number % 2 == 0:
                high ^= mix(low ^ round_key) & ((1 << (bits - low_bits)) - 1)
            else:
                low ^= mix(high ^ round_key) & ((1 << low_bits) - 1)
        return high << low_bits | low

    places = []
    for x in range(size):
        x = once(x)
        while x >= size:
            x = once(x)
        places.append(x)
    return [items[place] for place in places]


def reference(sizes, blends, seed, group=1):
    """Yield (source, window, epoch) of sequence 0, 1, 2, ..., with lists and counters only."""
    drawn = [0] * len(sizes)
    epochs: dict[tuple[int, int], list[int]] = {}
    for number, (start, weights, consumed) in enumerate(blends):
        drawn = list(consumed) if consumed else drawn
        stop = blends[number + 1][0] if number + 1 < len(blends) else math.inf
        exact = [Fraction(str(weight)) for weight in weights]
        block = 64
        while min(block * weight / sum(exact) for weight in exact if weight) < 2:
            block *= 2
        stage_key = (1,) if number == 0 else (3, start)
        begin, targets = start, [0] * len(sizes)
        for block_number in itertools.count():
            if begin >= stop:
                break
            end = min(begin + block, stop)
            slots, level, after = [], Fraction(0), 0
            quotas = []
            for source, weight in enumerate(exact):
                level += weight / sum(exact)
                upto = math.floor((end - start) * level)
                quotas.append(upto - after - targets[source])
                after = upto
            # Only in a short last block: a source cannot give sequences back.
            while min(quotas) < 0:
                share = [(end - start) * weight / sum(exact) for weight in exact]
                above = [targets[s] + max(q, 0) - share[s] for s, q in enumerate(quotas)]
                giver = max((s for s, q in enumerate(quotas) if q > 0), key=above.__getitem__)
                quotas[quotas.index(-1)] = 0
                quotas[giver] -= 1
            for source, quota in enumerate(quotas):
                slots += [source] * quota
                targets[source] += quota
            numbered = []
            for source in slots:
                numbered.append((source, drawn[source]))
                drawn[source] += 1
            for source, sample in shuffled(numbered, key(seed & M64, *stage_key, block_number)):
                epoch, index = divmod(sample, sizes[source] // group * group)
                if (source, epoch) not in epochs:
                    k = key(seed & M64, 2, source, epoch)
                    order = shuffled(range(sizes[source] // group), k)
                    epochs[source, epoch] = [n * group + m for n in order for m in range(group)]
                yield source, epochs[source, epoch][index], epoch
            begin = end


@st.composite
def mixtures(draw, max_blends=4, consumed=False):
    num_sources = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.integers(1, 50), min_size=num_sources, max_size=num_sources))
    weight = st.one_of(st.just(0.0), st.integers(1, 50).map(lambda n: n / 10))
    weights = st.lists(weight, min_size=num_sources, max_size=num_sources).filter(any)
    edges = draw(st.sets(st.integers(1, NUM - 1), max_size=max_blends - 1))
    first = draw(weights if edges else weights.filter(all))
    blends = [Blend(0, tuple(first)), *(Blend(e, tuple(draw(weights))) for e in sorted(edges))]
    if consumed and edges:
        windows = st.lists(st.integers(0, 200), min_size=num_sources, max_size=num_sources)
        at = draw(st.integers(1, len(edges)))
        blends[at] = blends[at]._replace(consumed=tuple(draw(windows)))
    assume(all(any(column) for column in zip(*(blend.weights for blend in blends), strict=True)))
    return sizes, blends


# A blend whose last block has 2 sequences, in which the third source would have -1 by its weight.
SHORT_LAST_BLOCK = (
    [1, 1, 1, 1],
    [
        Blend(0, (0.0, 0.0, 0.0, 0.1)),
        Blend(1, (0.1, 0.3, 0.5, 4.3)),
        Blend(131, (0.0, 0.0, 0.0, 0.1)),
    ],
)


@given(mixtures(consumed=True), st.integers(-3, 1 << 70), st.integers(1, 4))
@example(SHORT_LAST_BLOCK, 5, 1)
@settings(max_examples=15, deadline=None)
def test_the_order_equals_a_sequential_reference(mixture, seed, group):
    sizes, blends = mixture
    sizes = [size * group + size % group for size in sizes]
    order = Mixture(blends, [None] * len(sizes), group=group).order(sizes, seed)
    placed = list(zip(*(part.tolist() for part in order(np.arange(NUM))), strict=True))
    expected = list(itertools.islice(reference(sizes, blends, seed, group), NUM))
    assert placed == expected
    far = np.array([0, 17, NUM - 1, 10**9, MAX_SEQUENCES - 1])
    assert order(far[:3]).window.tolist() == [expected[number][1] for number in far[:3]]
    order(far)  # the last blend has no end


@given(mixtures())
@example(SHORT_LAST_BLOCK)
@settings(max_examples=25, deadline=None)
def test_counts_are_the_weights_times_the_length_of_each_blend(mixture):
    """To within two sequences a blend, against fractions; and to the sequence, against a count."""
    sizes, blends = mixture
    order = Order(sizes, blends[0].weights, 5, blends=blends[1:])
    sources = order(np.arange(NUM)).source
    edges = [blend.start for blend in blends] + [10**12]
    due = [Fraction(0)] * len(sizes)
    for number, (blend, stop) in enumerate(zip(blends, edges[1:], strict=True)):
        exact = [Fraction(str(weight)) for weight in blend.weights]
        due = [d + (stop - blend.start) * w / sum(exact) for d, w in zip(due, exact, strict=True)]
        counts = order.counts(stop).tolist()
        assert sum(counts) == stop
        complete = stop < 10**12 or (stop - blend.start) % order.block == 0
        for count, share in zip(counts, due, strict=True):
            assert abs(count - share) < 2 * number + 1 or not complete
    for number in (0, 1, 63, 64, NUM // 2, NUM, *edges[:-1]):
        seen = np.bincount(sources[:number], minlength=len(sizes)).tolist()
        assert order.counts(number).tolist() == seen


def test_the_order_of_blends_never_changes():
    """Golden values: see test_order.py. Never update them."""
    order = Order([1000, 300, 50], [0.7, 0.3, 0], 42, blends=[Blend(1000, (0.2, 0.3, 0.5))])
    before = Order([1000, 300, 50], [0.7, 0.3, 0], 42, blends=[Blend(10**6, (1, 1, 1))])
    plain = Order([1000, 300], [0.7, 0.3], 42)
    ids = np.arange(960)  # complete blocks of the first blend: as in a run without blends
    for ours, other, same in zip(order(ids), before(ids), plain(ids), strict=True):
        assert (ours == other).all() and (ours == same).all()
    assert [part.tolist() for part in order(np.arange(996, 1004))] == GOLDEN_STAGED


@given(mixtures(), mixtures(), st.integers(1, NUM), st.booleans())
@settings(max_examples=40, deadline=None)
def test_mixtures_that_agree_up_to_a_sequence_have_the_same_order_up_to_it(one, other, end, graft):
    sizes, blends = one
    theirs = [Blend(s.start, (s.weights * 5)[: len(sizes)]) for s in other[1]]
    if graft:  # the past of one, the future of the other
        past = [blend for blend in blends if blend.start < end]
        theirs = past + [s for s in theirs if s.start >= end and any(s.weights)]
    if not all(any(s.weights) for s in theirs):
        return
    if same_order_until(blends, theirs, end):
        orders = [Mixture(s, [None] * len(sizes)).order(sizes, 1) for s in (blends, theirs)
                  if len(s) > 1 or all(s[0].weights)]  # fmt: skip
        ids = np.arange(end)
        assert len({tuple(np.concatenate(order(ids)).tolist()) for order in orders}) == 1


def test_only_blends_that_have_not_started_may_change():
    now = [Blend(0, (7, 3)), Blend(640, (1, 1))]
    assert same_order_until(now, [Blend(0, (0.7, 0.3)), Blend(704, (1, 2))], 640)  # not started
    assert same_order_until(now, now[:1], 640)  # removed
    assert not same_order_until(now, now[:1], 641)  # too late
    assert not same_order_until(now, [Blend(0, (7, 3.1)), now[1]], 1)  # the past
    assert not same_order_until(now, [now[0], Blend(704, (1, 1))], 800)  # in another place
    early = [Blend(0, (7, 3)), Blend(100, (1, 1))]
    assert same_order_until(now, early, 64)
    # The block at 64 ends at 100 in the other, which permutes it differently.
    assert not same_order_until(now, early, 65)
    assert same_order_until([Blend(0, (5000.0,))], [Blend(0, (1.0,))], 10**9)  # of one source
    assert same_order_until([Blend(0, (1,))], [Blend(0, (1,)), Blend(100, (1,))], 90)


def test_what_a_source_had_before_a_longer_blend_counts_for_its_cap():
    blends = [Blend(0, (1, 1)), Blend(30, (1, 1), (35, 8))]
    result = redistribute(blends, [Fraction(4), Fraction(1)], [10, 50])
    assert result.blends[1] == blends[1] and result.blends[2].weights == (0.0, 1)
    order = result.order([10, 50], 9)
    assert order.counts(30).tolist() == [35, 8]
    assert result.supply == 30 + (40 - 35) + (50 - 8)
    assert order.counts(result.supply).tolist() == [40, 50]
    used = redistribute([blends[0], Blend(30, (1, 1), (41, 8))], [Fraction(4), None], [10, 50])
    assert used.blends[1] == Blend(30, (0.0, 1), (41, 8))


@given(mixtures(), st.lists(st.one_of(st.none(), st.integers(10, 60)), min_size=5, max_size=5))
@example(  # both sources of a blend reach their caps, inside of a block
    ([10, 1, 17, 1, 1], [Blend(0, (4.6, 0, 4.3, 0, 0)), Blend(109, (0, 0, 0, 0, 0.1))]),
    [48, None, 27, None, None],
)
@example(  # a source is at its cap late in the second blend, with two sequences to spare
    ([31, 44], [Blend(0, (7.0, 9.0)), Blend(129, (6.0, 7.0))]), [52, None, None, None, None]
)
@settings(max_examples=25, deadline=None)
def test_a_source_at_its_cap_is_dropped_and_the_others_share_its_place(mixture, tenths):
    sizes, blends = mixture
    caps = [None if t is None else Fraction(t, 10) for t in tenths[: len(sizes)]]
    result = redistribute(blends, caps, sizes)
    until = min(NUM * 3, NUM * 3 if result.supply is None else result.supply)
    order = result.order(sizes, 9)
    sources = order(np.arange(until)).source
    left = {n: math.floor(cap * sizes[n]) for n, cap in enumerate(caps) if cap is not None}
    for n, most in left.items():
        assert (sources == n).sum() <= most
    for index, blend in enumerate(result.blends):
        asked = [s for s in blends if s.start <= blend.start][-1]
        for n, (got, wanted) in enumerate(zip(blend.weights, asked.weights, strict=True)):
            assert got in (0, wanted)
            if got == 0 and wanted:  # it has used its cap, to within two
                assert order.counts(blend.start)[n] >= left[n] - 2
        if index + 1 < len(result.blends):
            following = result.blends[index + 1]
            assert blend.start < following.start
            if result.supply is not None and blend.start >= result.supply:
                continue
            shares = exact_shares(blend.weights, allow_zero=True)
            taken = order.counts(blend.start).tolist()
            due = {n: blend.start + math.floor((most - taken[n]) / shares[n])
                   for n, most in left.items() if shares[n]}  # fmt: skip
            later = [s.start for s in blends if s.start > blend.start]
            assert following.start == min([*later, *due.values()])
            if following.start != result.supply:
                assert not any(following.weights[n] for n in due if due[n] == following.start)
    if result.supply is not None:
        active = [s for s in blends if s.start <= result.supply][-1].weights
        assert any(active)
        counts = order.counts(result.supply).tolist()
        assert all(counts[n] >= left[n] - 2 for n, w in enumerate(active) if w)


def test_temperature_flattens_the_weights_by_size():
    sizes = [10**12, 10**9, 12_345]
    assert temperature_weights(sizes, 1) == [float(size) for size in sizes]
    for temperature in (0.5, 1.5, 2, 3.3, 100):
        powers = np.array(sizes, float) ** (1 / temperature)
        assert temperature_weights(sizes, temperature) == pytest.approx(
            powers / powers.sum(), rel=1e-11
        )
    assert temperature_weights([4, 1], 2) == [0.666666666667, 0.333333333333]
