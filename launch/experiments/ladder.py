"""The runs that a scaling law is fitted to: their sizes, tokens and final losses.

Only the final losses of finished runs with a decayed learning rate follow the same law: an
intermediate loss is higher than the final loss of a run with that number of tokens.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.experiments.comparable import differences, law_differences, meanings
from launch.experiments.law import Observed
from launch.experiments.results import final_loss
from zerolm.common.errors import ConfigError
from zerolm.common.files import is_file
from zerolm.common.values import printable
from zerolm.model.flops import LOOKUP
from zerolm.model.model import Model
from zerolm.optim.schedule import SCHEDULES
from zerolm.report.run_history import RunHistory, read_run
from zerolm.run_dir.events import DONE
from zerolm.run_dir.files import RunFiles

TOTAL, NON_EMBEDDING = KINDS = ("total", "non_embedding")  # --parameters
# DeepSpeed schedulers that end at a low learning rate.
DECAYS = ("WarmupDecayLR", "WarmupCosineLR", "OneCycle")
# Minimum number of runs, to fit five coefficients; of distinct sizes, and of distinct token counts.
MIN_POINTS, MIN_VALUES = 6, 3


@dataclass(frozen=True)
class Rung:
    """A finished run. Fields are JSON keys.

    Attributes:
        sizes: {way of counting parameters, from `KINDS`: number of parameters}.
    """

    name: str
    sizes: dict[str, int]
    tokens: int
    loss: float
    metric: str
    vocab_size: int | None

    def observed(self, kind: str) -> Observed:
        return Observed(self.sizes[kind], self.tokens, self.loss)


def sizes_of(model: Model) -> dict[str, int]:
    """Return the number of active parameters per token, with and without embeddings and head."""
    embeddings = sum(
        math.prod(shape)
        for name, shape in model.shapes.items()
        if LOOKUP.search(name) or (len(shape) == 2 and shape[0] == model.vocab_size)
    )
    total = model.num_active_parameters
    return {TOTAL: total, NON_EMBEDDING: total - embeddings}


@cache
def _sizes(config_json: str) -> dict[str, int]:
    from transformers import AutoConfig

    config = json.loads(config_json)
    return sizes_of(Model.from_config(AutoConfig.for_model(config.pop("model_type"), **config)))


def read_rung(run: RunHistory, name: str = "") -> Rung | str:
    """Return a run as a rung to fit, or the reason why the run cannot be used."""
    found = _rung(run, name)
    return f"{found} ({run.problems[0]})" if isinstance(found, str) and run.problems else found


def _rung(run: RunHistory, name: str) -> Rung | str:
    state, found = run.state()[0], final_loss(run)
    if state != DONE:
        return f"it is {state}, not done"
    if found is None:
        last = run.curves.columns.get("eval/loss") or run.curves.columns.get("train/loss")
        lost = last is not None and not math.isfinite(last[1][-1])
        return "its last loss is not finite" if lost else "its last step was not evaluated"
    if found[0] <= 0:
        return f"its final loss is {found[0]:g}, but a scaling law needs positive losses"
    if undecayed := _undecayed(run):
        return undecayed
    if run.settings.get("init_from"):
        return "it starts from existing weights"
    changed = {key for event in run.events if event["event"] == "changed"
               for key in event.get("changes") or ()}  # fmt: skip
    if changed:
        return f"it was resumed with different values of {', '.join(sorted(changed))}"
    config = run.record.get("model_config")
    if not config:
        return "its run.json has no model_config"
    try:
        sizes = _sizes(json.dumps(config, sort_keys=True))
    except (ConfigError, ValueError, KeyError) as error:
        return f"its model_config cannot be read: {error}"
    return Rung(name or run.name, sizes, run.tokens, *found, config.get("vocab_size"))


def _undecayed(run: RunHistory) -> str:
    """Return a message if a run's learning rate has not decayed by the end, else ""."""
    scheduler = (run.record.get("ds_config") or {}).get("scheduler")
    peak, minimum = run.settings.get("learning_rate"), run.settings.get("min_learning_rate")
    rates = run.curves.columns.get("train/learning_rate")
    if rates and run.curves.steps[rates[0][-1]] == run.step and len(rates[0]) > 1:
        peak, minimum = max(run.curves.values("train/learning_rate"), default=0.0), rates[1][-1]
    elif scheduler:
        kind = scheduler.get("type")
        return "" if kind in DECAYS else f"the {kind} in its DeepSpeed JSON does not decay"
    else:
        schedule = SCHEDULES.get(str(run.settings.get("schedule")))
        if schedule is None or not schedule.uses_minimum or minimum is None or peak is None:
            return "its learning rate does not decay"
    if minimum > peak / 2:
        return f"its learning rate only decays from {peak:g} to {minimum:g}"
    return ""


def expand(paths: Sequence[Path]) -> list[Path]:
    """Return run directories, with each sweep directory replaced by the run directories in it.

    A directory that is given more than once, even under different names, is returned once.
    """
    found = []
    for path in paths:
        inner = sorted(record.parent for record in path.glob("*/run.json"))
        inner += [each for each in path.glob("*/") if not os.access(each, os.R_OK | os.X_OK)]
        found += [path] if is_file(RunFiles(path).record) or not inner else inner
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def read_ladder(
    paths: Sequence[Path], target: Path | None = None
) -> tuple[list[Rung], dict[str, str], list[str]]:
    """Return (the runs to fit, {excluded run: reason}, notices).

    Args:
        target: a finished run that is not fitted; its loss will be compared with the fit.

    Raises:
        ConfigError: the runs cannot be read or compared, or there are too few runs.
    """
    problems: list[str] = []
    rungs, left_out, runs = list[Rung](), dict[str, str](), dict[str, RunHistory]()
    places = expand(paths)
    names = [printable(path.resolve().name) for path in places]
    for path, name in zip(places, names, strict=True):
        try:
            run = read_run(path)
        except ConfigError as error:
            problems += error.problems
            continue
        own = name if names.count(name) == 1 else str(path)
        found = read_rung(run, own)
        if isinstance(found, str):
            left_out[own] = found
        else:
            rungs.append(found)
            runs[own] = run
    problems += _incomparable(rungs, runs, target)
    best: dict[tuple[int, int], Rung] = {}
    for rung in sorted(rungs, key=lambda each: each.loss):
        other = best.setdefault((rung.sizes[TOTAL], rung.tokens), rung)
        if other is not rung:
            lower = "the same loss" if other.loss == rung.loss else "a lower loss"
            left_out[rung.name] = f"{other.name} has the same size and tokens, and {lower}"
    kept = sorted(best.values(), key=lambda each: (each.sizes[TOTAL], each.tokens))
    sizes, tokens = {each.sizes[TOTAL] for each in kept}, {each.tokens for each in kept}
    if not problems and (len(kept) < MIN_POINTS or min(len(sizes), len(tokens)) < MIN_VALUES):
        without = "".join(f"\n{name}: left out: {why}." for name, why in left_out.items())
        problems.append(
            f"the runs: {len(kept)} can be fitted, with {len(sizes)} sizes and {len(tokens)} "
            f"numbers of tokens; {MIN_POINTS} runs with {MIN_VALUES} sizes and {MIN_VALUES} "
            f"numbers of tokens are needed. Add runs.{without}"
        )
    if problems:
        raise ConfigError(problems)
    differ = law_differences([runs[rung.name] for rung in kept])
    return (
        kept,
        left_out,
        [f"the runs have different {what}, and may follow different laws" for what in differ],
    )


def _incomparable(
    rungs: Sequence[Rung], runs: Mapping[str, RunHistory], target: Path | None
) -> list[str]:
    """Return a problem for each property that prevents comparing the losses."""
    metrics, compared = {rung.name: rung.metric for rung in rungs}, dict(runs)
    if target is not None and not isinstance(found := read_rung(read_run(target)), str):
        metrics[str(target)], compared[str(target)] = found.metric, read_run(target)
    return [
        f"the runs: have different {what}, so their losses cannot be compared ({values}). Give "
        f"runs with the same {what}."
        for what, values in differences(meanings(compared, metrics)).items()
    ]
