"""The mixture of a run's sources: blends, and caps on epochs. Pure.

A mixture is built from the user's settings. Of its fields, only the blends and the group size
determine the order of the data. The mixture does not depend on the batch size, the ranks or the
length of the run.

With `--over_max_epochs redistribute`, a source is dropped before one more of its windows could
exceed its cap, and the others share its weight. This starts a new blend like any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.values import parse_number, shown
from zerolm.config.settings import BEST_FIT, REDISTRIBUTE, Settings
from zerolm.data.order import Blend, Order
from zerolm.data.quotas import MAX_SEQUENCES, block_size, counts_at_end, exact_shares

TEMPERATURE_DIGITS = 12  # to which weights are rounded, so they are the same on every machine

# From a source's name to its index; raises ValueError with a reason.
FindSource = Callable[[str], int]


@dataclass(frozen=True)
class Mixture:
    """The weights and caps of a run's sources.

    Attributes:
        blends: blends in ascending order; the first one starts at 0.
        caps: maximum number of epochs over each source in a run; None for no limit.
        supply: number of sequences available within the caps, if sources are dropped at their caps;
            None for no limit.
        group: number of consecutive windows that are read one after another, see `Order`.
    """

    blends: list[Blend]
    caps: list[Fraction | None]
    supply: int | None = None
    group: int = 1

    def order(self, num_windows: Sequence[int], seed: int) -> Order:
        """Return the order of the sources' sequences for a seed."""
        first, *later = self.blends
        return Order(num_windows, first.weights, seed, blends=later, group=self.group)


def group_size(settings: Settings) -> int:
    """Return how many windows of `--seq_len` make up one sequence of `--later_seq_len`."""
    return max(1, (settings.later_seq_len or 0) // (settings.seq_len or 1))


def temperature_weights(num_tokens: Sequence[int], temperature: float) -> list[float]:
    """Return weights proportional to tokens^(1 / temperature), rounded to 12 digits.

    They are computed in decimal arithmetic, which is the same on every processor and C library.

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


def redistribute(
    blends: Sequence[Blend], caps: Sequence[Fraction | None], num_windows: Sequence[int]
) -> Mixture:
    """Split each blend where a source reaches its cap, and drop the source from then on.

    Of n sequences in a blend, a source with share w provides fewer than n w + 1. So with n =
    floor(r/w) it provides at most the r sequences that it has left, and at least r - 2. The order
    beyond the supply is undefined, since a run that needs more than the supply is refused.
    """
    most = {
        number: int(cap * num_windows[number]) for number, cap in enumerate(caps) if cap is not None
    }
    left = most
    dropped: set[int] = set()
    result: list[Blend] = []
    for number, blend in enumerate(blends):
        stop = blends[number + 1].start if number + 1 < len(blends) else MAX_SEQUENCES
        start, consumed = blend.start, blend.consumed
        if consumed is not None:
            left = {n: limit - consumed[n] for n, limit in most.items()}
            dropped = {n for n, rest in left.items() if rest <= 0}
        while start < stop:
            weights = tuple(0.0 if n in dropped else w for n, w in enumerate(blend.weights))
            if not any(weights):
                # A blend that starts at the supply ends the block before it, so no source exceeds
                # its cap there. The blend itself is never read, since such a run is refused.
                after = [Blend(start, blend.weights, consumed), *blends[number + 1 :]]
                return Mixture([*result, *after], list(caps), start)
            shares = exact_shares(weights, allow_zero=True)
            lengths = {n: int(left[n] / shares[n]) for n in left if shares[n]}
            end = min([stop, *(start + length for length in lengths.values())])
            if end > start:
                result.append(Blend(start, weights, consumed))
                consumed = None
            used = counts_at_end(shares, end - start)
            left = {n: rest - used[n] for n, rest in left.items()}
            dropped |= {n for n, length in lengths.items() if start + length == end}
            start = end
    return Mixture(result, list(caps))


def same_order_until(ours: Sequence[Blend], theirs: Sequence[Blend], end: int) -> bool:
    """Return whether two mixtures of the same sources have the same order before sequence `end`.

    Blends that start at or after `end` may differ. If the last blend before `end` ends at different
    numbers in the two mixtures, every block before `end` must be complete in both.
    """
    started, other = ([blend for blend in each if blend.start < end] for each in (ours, theirs))
    begins = [[(blend.start, blend.consumed) for blend in each] for each in (started, other)]
    if begins[0] != begins[1]:
        return False
    if not started:
        return True
    shares = [[exact_shares(s.weights, allow_zero=True) for s in each] for each in (started, other)]
    if shares[0] != shares[1]:
        return False
    stops = [
        each[len(started)].start if len(each) > len(started) else MAX_SEQUENCES
        for each in (ours, theirs)
    ]
    if stops[0] == stops[1] or len(started[0].weights) == 1:
        return True
    block, start = block_size(shares[0][-1]), started[-1].start
    return start - (start - end) // block * block <= min(stops)


# -------------------------------------------------------------------------------------------------
# Records and display


def record(mixture: Mixture, names: Sequence[str]) -> dict[str, Any]:
    """Return the entry that describes a mixture in run.json."""
    return {
        "sources": list(names),
        "stages": [blend_record(blend) for blend in mixture.blends],
        "max_epochs": [None if cap is None else float(cap) for cap in mixture.caps],
    }


def blends_from_record(blends: Sequence[Sequence[Any]]) -> list[Blend]:
    """Return the blends in an entry written by `record`."""
    return [
        Blend(int(start), tuple(weights), tuple(consumed[0]) if consumed else None)
        for start, weights, *consumed in blends
    ]


def blend_record(blend: Blend) -> list[Any]:
    """Return a blend as a JSON value, which includes `consumed` only if it is set."""
    start, weights, consumed = blend
    return [start, list(weights), *([] if consumed is None else [list(consumed)])]


def blend_shares(blend: Blend, names: Sequence[str]) -> dict[str, float]:
    """Return {name: share} for the sources that a blend uses."""
    exact = exact_shares(blend.weights, allow_zero=True)
    return {name: float(share) for name, share in zip(names, exact, strict=True) if share}


def describe_blends(blends: Sequence[Blend]) -> str:
    """Describe blends in one line, for messages."""
    return "; ".join(
        f"{shown(list(blend.weights))} from sequence {blend.start}" for blend in blends
    )


# -------------------------------------------------------------------------------------------------
# From settings


def resolve_mixture(
    settings: Settings,
    weights: Sequence[float],
    find: FindSource,
    num_windows: Sequence[int],
    problems: list[str],
) -> Mixture:
    """Build the mixture that the settings describe; append any problems to `problems`.

    Args:
        settings: settings whose `seq_len` is set.
        weights: weights in the first blend; 0 for sources that only a later blend uses.
        find: function from a source's name to its index.
        num_windows: number of windows in each source, at least 1.
    """
    if not any(weights):
        problems.append(
            f"{settings.where('data')}: every weight is 0, but a run starts with these weights. "
            "Give at least one source a weight."
        )
    blends = [Blend(0, tuple(weights)), *_parse_blends(settings, len(weights), find, problems)]
    is_valid = len(blends) == 1 + len(settings.data_stage)  # an invalid one may use the source
    for number in range(len(weights)):
        if is_valid and not any(blend.weights[number] for blend in blends):
            problems.append(
                f"{settings.where('data')}: {settings.data[number]} has no weight in any blend. "
                "List it in a --data_stage, or remove the source."
            )
    caps = _parse_caps(settings, len(weights), find, problems)
    for spec, cap, size in zip(settings.data, caps, num_windows, strict=True):
        if cap is not None and cap * size < 1:
            problems.append(
                f"{settings.where('max_epochs')}: {float(cap):g} is less than one of the {size} "
                f"sequences of {spec}. Raise it, or remove the source."
            )
    problems += _group_problems(settings)
    mixture = Mixture(blends, caps)
    if settings.over_max_epochs == REDISTRIBUTE and not problems:
        mixture = redistribute(blends, caps, num_windows)
    return replace(mixture, group=group_size(settings))


def _group_problems(settings: Settings) -> list[str]:
    later, seq_len = settings.later_seq_len, settings.seq_len
    where = f"{settings.where('later_seq_len')}: {later}"
    if later is None or seq_len is None:
        return []
    problems = []
    if later % seq_len:
        problems.append(f"{where} must be a multiple of --seq_len {seq_len}. Choose one.")
    if settings.packing == BEST_FIT:
        problems.append(
            f"{where} needs --packing concat, because packed rows depend on the length. Remove one "
            "of them."
        )
    return problems


def _parse_blends(
    settings: Settings, num_sources: int, find: FindSource, problems: list[str]
) -> list[Blend]:
    where, seq_len = settings.where("data_stage"), settings.seq_len
    assert seq_len is not None
    blends: list[Blend] = []
    for spec in settings.data_stage:
        tokens, weights, consumed = _parse_blend(spec, num_sources, find, where, problems)
        if weights is None:
            continue
        start = -(-tokens // seq_len)
        if blends and start <= blends[-1].start:
            problems.append(
                f"{where}: {spec} does not start after the previous blend. Give blends in "
                f"ascending order of their tokens, at least one sequence apart."
            )
            continue
        blends.append(Blend(start, tuple(weights), consumed))
    return blends


def _parse_blend(
    spec: str, num_sources: int, find: FindSource, where: str, problems: list[str]
) -> tuple[int, list[float] | None, tuple[int, ...] | None]:
    """Parse a blend such as `2B:web=0.3,code=0.7` into (tokens, weights, consumed windows).

    The weights are None if they are invalid. `web=0.3@120` records 120 consumed windows of web; a
    branch with a longer sequence length writes this form.
    """
    start, colon, rest = spec.partition(":")
    try:
        tokens = parse_number(start)
    except ValueError:
        tokens = -1
    if not (colon and rest and isinstance(tokens, int) and tokens > 0):
        problems.append(
            f"{where}: {spec} must be the number of tokens at which the blend starts, above 0, "
            f"and its weights. Write for example 2B:web=0.3,code=0.7."
        )
        return 0, None, None
    weights, num_problems = [0.0] * num_sources, len(problems)
    consumed = [0] * num_sources
    named: set[int] = set()
    for part in rest.split(","):
        name, equals, weight = part.rpartition("=")
        weight, _, windows = weight.partition("@")
        try:
            number, value = find(name if equals else part), parse_number(weight)
            consumed[number] = int(windows or 0)
        except ValueError as error:
            problems.append(f"{where}: {spec}: {part} {error}")
            continue
        if number in named:
            problems.append(f"{where}: {spec}: {name} is listed twice. Give it one weight.")
        if value < 0:
            problems.append(f"{where}: {spec}: {part}: a weight must not be below 0. Correct it.")
        named.add(number)
        weights[number] = float(value)
    if len(problems) == num_problems:
        try:
            exact_shares(weights, f"{where}: {spec}", allow_zero=True)
        except ConfigError as error:
            problems += error.problems
    valid = len(problems) == num_problems
    return tokens, weights if valid else None, tuple(consumed) if "@" in rest else None


def _parse_caps(
    settings: Settings, num_sources: int, find: FindSource, problems: list[str]
) -> list[Fraction | None]:
    """Parse caps: `4` is for all sources; `code=8` is for one source, and takes precedence."""
    where = settings.where("max_epochs")
    default: Fraction | None = None
    named: dict[int, Fraction] = {}
    for spec in settings.max_epochs:
        name, equals, number = spec.rpartition("=")
        try:
            cap = Fraction(repr(float(parse_number(number))))
            source = find(name) if equals else None
        except ValueError as error:
            problems.append(f"{where}: {spec} {error}")
            continue
        if cap <= 0:
            example = f"{name}=4" if equals else "4"
            problems.append(f"{where}: {spec} must be above 0. Write for example {example}.")
        elif (source in named) if source is not None else (default is not None):
            problems.append(f"{where}: {spec} is a second limit for it. Give one limit.")
        elif source is None:
            default = cap
        else:
            named[source] = cap
    if not settings.max_epochs and settings.over_max_epochs:
        problems.append(
            f"{settings.where('over_max_epochs')}: {settings.over_max_epochs} needs --max_epochs. "
            "Add that flag, or remove this one."
        )
    return [named.get(number, default) for number in range(num_sources)]
