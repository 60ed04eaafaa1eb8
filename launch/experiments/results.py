"""Results of an experiment's runs: final losses, and the table of a sweep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.experiments import comparable
from launch.experiments.grid import Point
from launch.experiments.optimum import Optimum, find_optimum
from zerolm.common.errors import ConfigError
from zerolm.common.files import is_file
from zerolm.common.values import count, parse_number
from zerolm.report.run_history import RunHistory, read_run
from zerolm.report.summary import last_training_loss
from zerolm.run_dir.events import DONE, FAILED, GAVE_UP
from zerolm.run_dir.files import RunFiles

SEED, LEARNING_RATE = "seed", "learning_rate"
# More tokens are always better, and losses on different sequences cannot be compared.
WITHOUT_OPTIMUM = (SEED, "total_tokens", "val_data", *comparable.SETTINGS)


@dataclass(frozen=True)
class Result:
    """The result of a point. Fields are JSON keys.

    Attributes:
        state: the run's state as shown by `zerolm status`; `new` before its first start.
        loss, metric: final loss and its name; None and "" unless the run is done.
    """

    name: str
    run_dir: str
    values: dict[str, str]
    state: str
    tokens: int
    loss: float | None
    metric: str


def final_loss(run: RunHistory) -> tuple[float, str] | None:
    """Return (a run's final loss, its name), using the validation loss if the run was evaluated.

    Return None if there are no losses, the last loss is not finite, or the last step was not
    evaluated, since an evaluation that crashes is skipped.
    """
    column = run.curves.columns.get("eval/loss")
    if column and column[0]:
        line, loss = column[0][-1], column[1][-1]
        is_final = run.curves.steps[line] == run.step and math.isfinite(loss)
        return (loss, "eval/loss") if is_final else None
    losses = run.curves.columns.get("train/loss", ((), ()))[1]
    found = last_training_loss(run.curves) if losses and math.isfinite(losses[-1]) else None
    return None if found is None else (found[0], f"train/loss, mean of the last {found[1]} lines")


def result_of(point: Point, run_dir: Path) -> Result:
    if not is_file(RunFiles(run_dir).record):
        return Result(point.name, str(run_dir), point.labels, "new", 0, None, "")
    run = read_run(run_dir)
    state, found = run.state()[0], final_loss(run) if run.state()[0] == DONE else None
    loss, metric = found or (None, "")
    return Result(point.name, str(run_dir), point.labels, state, run.tokens, loss, metric)


def curve_axis(results: Sequence[Result]) -> str | None:
    """Return the setting to optimize, or None if there is none.

    This is the learning rate or, if that was not swept, the first setting with several values, all
    of them positive numbers.
    """
    axes = [axis for axis in results[0].values if axis not in WITHOUT_OPTIMUM]
    for axis in sorted(axes, key=lambda axis: axis != LEARNING_RATE):
        numbers = {_number(result.values[axis]) for result in results}
        if len(numbers) > 1 and all(number > 0 for number in numbers):
            return axis
    return None


def _number(label: str) -> float:
    try:
        return float(parse_number(label))
    except ValueError:
        return math.nan


def curves(results: Sequence[Result], axis: str | None) -> dict[str, dict[float, list[float]]]:
    """Return {combination of the other settings: {value of `axis`: losses of all seeds}}.

    Only finished runs are included. If `axis` is None, the value is 0.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for result in results:
        if result.loss is not None:
            losses = found.setdefault(_group(result, axis), {})
            losses.setdefault(_value(result, axis), []).append(result.loss)
    return found


def _group(result: Result, axis: str | None) -> str:
    return ",".join(f"{key}={value}" for key, value in result.values.items()
                    if key not in (axis, SEED))  # fmt: skip


def _value(result: Result, axis: str | None) -> float:
    return 0.0 if axis is None else _number(result.values[axis])


def optima(results: Sequence[Result], axis: str | None) -> dict[str, Optimum]:
    """Return {combination of the other settings: optimum of `axis`}; {} if `axis` is None.

    For each value, runs that gave up, failed, or ended without a finite loss are counted.
    """
    if axis is None:
        return {}
    lost: dict[str, dict[float, int]] = {}
    for result in results:
        if result.state in (GAVE_UP, FAILED) or (result.state == DONE and result.loss is None):
            of_group, value = lost.setdefault(_group(result, axis), {}), _value(result, axis)
            of_group[value] = of_group.get(value, 0) + 1
    each = curves(results, axis)
    found = {group: find_optimum(each.get(group, {}), lost.get(group, {}))
             for group in dict.fromkeys([*each, *lost])}  # fmt: skip
    return {group: optimum for group, optimum in found.items() if optimum is not None}


def require_one_metric(results: Sequence[Result]) -> None:
    """Raise ConfigError if only some of the runs have a validation loss."""
    kinds = {result.metric.partition(",")[0] for result in results if result.metric}
    if len(kinds) > 1:
        raise ConfigError(
            "the runs: only some have an eval/loss, so their losses cannot be compared. Give all "
            "of them the same --val_data."
        )


def as_text(results: Sequence[Result], axis: str | None, found: Mapping[str, Optimum]) -> str:
    """Format the table of a sweep, sorted by loss, and its optima."""
    width = max(len(result.name) for result in results)
    metrics = sorted({result.metric for result in results if result.metric})
    lines = [f"{'point':<{width}}  {'tokens':>8}  {'loss':>9}  state"]
    for result in sorted(results, key=lambda each: math.inf if each.loss is None else each.loss):
        loss = "" if result.loss is None else f"{result.loss:.5f}"
        tokens = count(result.tokens)
        lines.append(f"{result.name:<{width}}  {tokens:>8}  {loss:>9}  {result.state}")
    lines += [f"loss: {metric}" for metric in metrics]
    states = [DONE if result.loss is not None else "without a final loss" if result.state == DONE
              else result.state for result in results]  # fmt: skip
    if {*states} != {DONE}:
        numbers = ", ".join(f"{states.count(state)} {state}" for state in sorted({*states}))
        lines.append(f"{len(results)} runs: {numbers}")
    lines += [
        f"note: the runs have different {axis}, so their losses cannot be compared"
        for axis in ("val_data", *comparable.SETTINGS)
        if len({result.values.get(axis) for result in results}) > 1
    ]
    for group, optimum in found.items():
        lines += ["", f"{group + ': ' if group else ''}{describe(str(axis), optimum)}"]
    return "\n".join(lines)


def describe(axis: str, optimum: Optimum) -> str:
    """Return text that describes an optimum, with its uncertainty or why that is unknown."""
    text = f"best {axis} {optimum.value:.3g}, loss {optimum.loss:.5f}"
    if optimum.parabola is None:
        fewer = "; fewer than three values, so no parabola was fitted"
        text += ", measured" if optimum.at_edge else fewer
    elif optimum.value == optimum.measured:
        text += ", measured; the parabola has no minimum near it"
    else:
        text += (
            f": minimum of a parabola through {optimum.points} values; the best measured one is "
            f"{optimum.measured:.3g}, loss {optimum.measured_loss:.5f}"
        )
    if optimum.interval is not None:
        low, high = optimum.interval
        text += f", 90% interval {low:.3g} to {high:.3g} from {optimum.seeds} seeds"
        text += " or wider: noise hides the curve" if optimum.open_ended else ""
    elif optimum.parabola is not None:
        text += ", no interval: only one seed"
    if optimum.at_edge:
        text += ". The best value has no comparable neighbour on "
        text += f"{'one side' if len(optimum.missing) == 1 else 'either side'}: "
        text += f"add values {_places(optimum)}"
    if optimum.high:
        text += f". Not fitted: {_values(optimum.high)}, where a loss is more than 20% higher"
    for value, number in optimum.incomplete.items():
        runs = f"{number} run{'s' * (number > 1)}"
        text += f". Not compared: {value:.3g}, where {runs} gave up, failed or "
        text += "ended without a finite loss"
    return f"{text}."


def _places(optimum: Optimum) -> str:
    return " and ".join(
        f"between {low:.3g} and {high:.3g}" if low is not None and high is not None
        else f"below {high:.3g}" if low is None else f"beyond {low:.3g}"
        for low, high in optimum.missing
    )  # fmt: skip


def _values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def as_json(results: Sequence[Result], axis: str | None, found: Mapping[str, Optimum]) -> dict:
    """Return the content of sweep.json."""
    return {
        "axis": axis,
        "points": [asdict(result) for result in results],
        "optima": {group: asdict(optimum) for group, optimum in found.items()},
    }
