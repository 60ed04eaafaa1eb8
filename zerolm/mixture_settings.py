"""The settings of a mixture become its stages and caps, or are refused. Pure: no file is read.

`2B:web=0.3,code=0.7` is a stage that begins at the first sequence that starts at or after 2B
tokens; a source that it does not name rests in it.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

from zerolm.errors import ConfigError
from zerolm.mixture import Mixture, redistributed
from zerolm.order import Stage, exact_shares
from zerolm.settings import REDISTRIBUTE, Settings
from zerolm.values import parse_number

Find = Callable[[str], int]  # the number of the source of a name; a ValueError says why not


def resolve(
    settings: Settings,
    weights: Sequence[float],
    find: Find,
    num_windows: Sequence[int],
    problems: list[str],
) -> Mixture:
    """Make a mixture of what the settings ask for. What is wrong with them goes to `problems`.

    Args:
        settings: with `seq_len`.
        weights: of the sources in the first stage; 0 for one that enters later.
        num_windows: of each source, at least 1.
    """
    if not any(weights):
        problems.append(
            f"{settings.where('data')}: every weight is 0, but a run begins with these. Give a "
            f"source a weight."
        )
    stages = [Stage(0, tuple(weights)), *_stages(settings, len(weights), find, problems)]
    for number in range(len(weights)):
        if not any(stage.weights[number] for stage in stages):
            problems.append(
                f"{settings.where('data')}: {settings.data[number]}, has no weight in any stage. "
                f"Name it in a --data_stage, or leave the source out."
            )
    caps = _caps(settings, len(weights), find, problems)
    for spec, cap, size in zip(settings.data, caps, num_windows, strict=True):
        if cap is not None and cap * size < 1:
            problems.append(
                f"{settings.where('max_epochs')}: {float(cap):g}, is less than one of the {size} "
                f"sequences of {spec}. Raise it, or leave the source out."
            )
    if settings.over_max_epochs != REDISTRIBUTE or problems:
        return Mixture(stages, caps)
    return redistributed(stages, caps, num_windows)


def _stages(settings: Settings, num_sources: int, find: Find, problems: list[str]) -> list[Stage]:
    where, seq_len = settings.where("data_stage"), settings.seq_len
    assert seq_len is not None
    stages: list[Stage] = []
    for spec in settings.data_stage:
        tokens, weights = _stage(spec, num_sources, find, where, problems)
        if weights is None:
            continue
        start = -(-tokens // seq_len)
        if stages and start <= stages[-1].start:
            problems.append(
                f"{where}: {spec}, begins with or before the stage in front of it. Give stages in "
                f"the order of their tokens, at least one sequence apart."
            )
            continue
        stages.append(Stage(start, tuple(weights)))
    return stages


def _stage(
    spec: str, num_sources: int, find: Find, where: str, problems: list[str]
) -> tuple[int, list[float] | None]:
    """Read `2B:web=0.3,code=0.7`; the weights are None where something is wrong with it."""
    begins, colon, rest = spec.partition(":")
    try:
        tokens = parse_number(begins)
    except ValueError:
        tokens = -1
    if not (colon and rest and isinstance(tokens, int) and tokens > 0):
        problems.append(
            f"{where}: {spec}, must be the tokens where the stage begins, above 0, and its "
            f"weights. Write for example 2B:web=0.3,code=0.7."
        )
        return 0, None
    weights, wrong = [0.0] * num_sources, len(problems)
    named: set[int] = set()
    for part in rest.split(","):
        name, equals, weight = part.rpartition("=")
        try:
            number, value = find(name if equals else part), parse_number(weight)
        except ValueError as error:
            problems.append(f"{where}: {spec}, {part}: {error}")
            continue
        if number in named:
            problems.append(f"{where}: {spec}, {name}: is named twice. Give it one weight.")
        if value < 0:
            problems.append(f"{where}: {spec}, {part}: a weight must not be below 0. Correct it.")
        named.add(number)
        weights[number] = float(value)
    if len(problems) == wrong:
        try:
            exact_shares(weights, f"{where}: {spec}", may_rest=True)
        except ConfigError as error:
            problems += error.problems
    return tokens, weights if len(problems) == wrong else None


def _caps(
    settings: Settings, num_sources: int, find: Find, problems: list[str]
) -> list[Fraction | None]:
    """Read `4` and `code=8`, of which a name's own counts."""
    where = settings.where("max_epochs")
    everyone: Fraction | None = None
    own: dict[int, Fraction] = {}
    for spec in settings.max_epochs:
        name, equals, number = spec.rpartition("=")
        try:
            cap = Fraction(repr(float(parse_number(number))))
            which = find(name) if equals else None
        except ValueError as error:
            problems.append(f"{where}: {spec}, {error}")
            continue
        if cap <= 0:
            problems.append(f"{where}: {spec}, must be above 0. Write for example {name or ''}4.")
        elif (which in own) if which is not None else (everyone is not None):
            problems.append(f"{where}: {spec}, is the second one. Give one limit.")
        elif which is None:
            everyone = cap
        else:
            own[which] = cap
    if not settings.max_epochs and settings.over_max_epochs:
        problems.append(
            f"{settings.where('over_max_epochs')}: {settings.over_max_epochs}, needs --max_epochs. "
            f"Add it, or remove this."
        )
    return [own.get(number, everyone) for number in range(num_sources)]
