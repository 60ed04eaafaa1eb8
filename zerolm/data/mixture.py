"""What a run takes from each of its sources, and when: stages of weights, caps on epochs. Pure.

zerolm/mixture_settings.py makes a mixture of what a user asks for, and zerolm/order.py an order of
its stages; nothing else of a mixture reaches it. It does not depend on the batch, the ranks or the
length of the run.

A source that reaches its cap, where the others are to fill its place, leaves at the sequence from
which on one more of its windows could be one too many. That begins a stage like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from zerolm.order import MAX_SEQUENCES, Order, Stage, block_size, exact_shares
from zerolm.values import shown

TEMPERATURE_DIGITS = 12  # of a weight, so that it is the same number on every machine


@dataclass(frozen=True)
class Mixture:
    """The weights of a run's sources.

    Attributes:
        stages: ascending, the first one at 0.
        caps: the most epochs of each source in a run; None for no limit.
        supply: sequences that the sources give within their caps, where the others fill a source's
            place; None for no limit.
    """

    stages: list[Stage]
    caps: list[Fraction | None]
    supply: int | None = None

    def order(self, num_windows: Sequence[int], seed: int) -> Order:
        """Return the order of these sources, for a seed."""
        first, *later = self.stages
        return Order(num_windows, first.weights, seed, stages=later)


def tempered(num_tokens: Sequence[int], temperature: float) -> list[float]:
    """Return weights in proportion to tokens^(1 / temperature), of 12 digits.

    In decimal arithmetic, which does not depend on a processor or a C library.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 3.5.2, temperature-scaled mixing.
    """
    if temperature == 1:
        return [float(tokens) for tokens in num_tokens]
    with localcontext() as context:
        context.prec = 40
        exponent = 1 / Decimal(repr(float(temperature)))
        powers = [Decimal(tokens) ** exponent for tokens in num_tokens]
        total = sum(powers)
        return [float(f"{power / total:.{TEMPERATURE_DIGITS}g}") for power in powers]


def redistributed(
    stages: Sequence[Stage], caps: Sequence[Fraction | None], num_windows: Sequence[int]
) -> Mixture:
    """Cut stages where a source reaches its cap, and leave it out from there on.

    In n sequences of a stage a source with share w gives less than n w + 1, so with n = floor(r/w)
    it gives at most the r that it has left, and at least r - 1. What comes after the supply
    of a stage is not decided here: a run that is as long is refused.
    """
    left = {
        number: int(cap * num_windows[number]) for number, cap in enumerate(caps) if cap is not None
    }
    gone: set[int] = set()
    cut: list[Stage] = []
    for number, stage in enumerate(stages):
        stop = stages[number + 1].start if number + 1 < len(stages) else MAX_SEQUENCES
        start = stage.start
        while start < stop:
            weights = tuple(0.0 if n in gone else w for n, w in enumerate(stage.weights))
            if not any(weights):
                return Mixture([*cut, *stages[number + 1 :]], list(caps), start)
            shares = exact_shares(weights, may_rest=True)
            lasts = {n: int(left[n] / shares[n]) for n in left if shares[n]}
            end = min([stop, *(start + length for length in lasts.values())])
            if end > start:
                cut.append(Stage(start, weights))
            given = _given(shares, end - start)
            left = {n: rest - given[n] for n, rest in left.items()}
            gone |= {n for n, length in lasts.items() if start + length == end}
            start = end
    return Mixture(cut, list(caps))


def _given(shares: Sequence[Fraction], length: int) -> list[int]:
    """Return what each source gives in a whole stage, as zerolm/order.py deals it."""
    ends = [int(length * sum(shares[: number + 1])) for number in range(len(shares))]
    return [end - before for before, end in zip([0, *ends], ends, strict=False)]


def same_until(ours: Sequence[Stage], theirs: Sequence[Stage], end: int) -> bool:
    """Tell whether two mixtures of the same sources give the same order up to a sequence number.

    What begins there or later may differ. Where a stage that has begun ends elsewhere in the other
    mixture, all blocks up to the one with the last sequence must be whole in both.
    """
    begun, other = ([stage for stage in each if stage.start < end] for each in (ours, theirs))
    if [stage.start for stage in begun] != [stage.start for stage in other]:
        return False
    if not begun:
        return True
    shares = [[exact_shares(s.weights, may_rest=True) for s in each] for each in (begun, other)]
    if shares[0] != shares[1]:
        return False
    stops = [
        each[len(begun)].start if len(each) > len(begun) else MAX_SEQUENCES
        for each in (ours, theirs)
    ]
    if stops[0] == stops[1] or len(begun[0].weights) == 1:
        return True
    block, start = block_size(shares[0][-1]), begun[-1].start
    return start - (start - end) // block * block <= min(stops)


def record(mixture: Mixture, names: Sequence[str]) -> dict[str, Any]:
    """Return a mixture for run.json."""
    return {
        "sources": list(names),
        "stages": [[stage.start, list(stage.weights)] for stage in mixture.stages],
        "max_epochs": [None if cap is None else float(cap) for cap in mixture.caps],
    }


def shares(stage: Stage, names: Sequence[str]) -> dict[str, float]:
    """Return the share of each source that gives something in a stage."""
    exact = exact_shares(stage.weights, may_rest=True)
    return {name: float(share) for name, share in zip(names, exact, strict=True) if share}


def recorded_stages(stages: Sequence[Sequence[Any]]) -> list[Stage]:
    """Return the stages of a record."""
    return [Stage(int(start), tuple(weights)) for start, weights in stages]


def stages_shown(stages: Sequence[Stage]) -> str:
    """Return stages in short."""
    return "; ".join(
        f"{shown(list(stage.weights))} from sequence {stage.start}" for stage in stages
    )
