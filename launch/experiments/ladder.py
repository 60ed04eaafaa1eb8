"""The runs that a prediction is fitted to: their sizes, tokens and final losses.

Only the ends of finished runs whose learning rate has decayed belong to one law: on the way there
the loss is higher than that of a run with this number of tokens.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.experiments.law import Observed
from launch.experiments.results import final_loss
from zerolm.common.errors import ConfigError
from zerolm.common.events import DONE
from zerolm.common.run_files import RunFiles
from zerolm.model.flops import LOOKUP
from zerolm.model.model import Model
from zerolm.optim.schedule import SCHEDULES
from zerolm.report.run_history import RunHistory, read_run

TOTAL, NON_EMBEDDING = KINDS = ("total", "non_embedding")  # --parameters
MIN_POINTS, MIN_VALUES = 6, 3  # of five coefficients; of each of sizes and tokens


@dataclass(frozen=True)
class Rung:
    """A finished run. Fields are JSON keys; `sizes` has the parameters by each way to count."""

    name: str
    sizes: dict[str, int]
    tokens: int
    loss: float
    metric: str

    def observed(self, kind: str) -> Observed:
        return Observed(self.sizes[kind], self.tokens, self.loss)


def sizes_of(model: Model) -> dict[str, int]:
    """Return the parameters that serve a token: all, and without embeddings and output head."""
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


def read_rung(run: RunHistory) -> Rung | str:
    """Return a run as a point of the law, or why it is none."""
    settings, record = run.settings, run.record
    state, found = run.state()[0], final_loss(run)
    schedule = SCHEDULES.get(str(settings.get("schedule")))
    peak, minimum = settings.get("learning_rate"), settings.get("min_learning_rate")
    if state != DONE:
        return f"it is {state}, not done"
    if found is None:
        return "its last step was not evaluated"
    if "scheduler" not in (record.get("ds_config") or {}):
        if schedule is None or not schedule.uses_minimum or minimum is None or peak is None:
            return "its learning rate does not decay"
        if minimum > peak / 2:
            return f"its learning rate only decays from {peak:g} to {minimum:g}"
    if settings.get("init_from"):
        return "it starts from existing weights"
    sizes = _sizes(json.dumps(record.get("model_config"), sort_keys=True))
    return Rung(run.name, sizes, run.tokens, *found)


def expand(paths: Sequence[Path]) -> list[Path]:
    """Return the run directories of some paths, of which some may be directories of sweeps."""
    found = []
    for path in paths:
        inner = sorted(record.parent for record in path.glob("*/run.json"))
        found += [path] if RunFiles(path).record.is_file() or not inner else inner
    return found


def read_ladder(paths: Sequence[Path]) -> tuple[list[Rung], dict[str, str], list[str]]:
    """Return (the runs to fit, {run that is left out: why}, notices).

    Raises:
        ConfigError: the runs cannot be read, cannot be compared, or are too few.
    """
    problems: list[str] = []
    rungs, left_out = list[Rung](), dict[str, str]()
    validation, data = dict[str, list[str]](), dict[str, list[str]]()
    for path in expand(paths):
        try:
            run = read_run(path)
        except ConfigError as error:
            problems += error.problems
            continue
        found = read_rung(run)
        if isinstance(found, str):
            left_out[run.name] = found
            continue
        rungs.append(found)
        held_out = json.dumps([found.metric.partition(",")[0], run.settings.get("val_data")])
        validation.setdefault(held_out, []).append(run.name)
        data.setdefault(str(run.record.get("data_fingerprint")), []).append(run.name)
    if len(validation) > 1:
        sets = "; ".join(f"{', '.join(names[:3])}: {key}" for key, names in validation.items())
        problems.append(
            f"the runs: have different validation data, so their losses cannot be compared "
            f"({sets}). Give runs with the same --val_data."
        )
    best: dict[tuple[int, int], Rung] = {}
    for rung in sorted(rungs, key=lambda each: each.loss):
        other = best.setdefault((rung.sizes[TOTAL], rung.tokens), rung)
        if other is not rung:
            left_out[rung.name] = f"{other.name} has its size and tokens, and a lower loss"
    kept = sorted(best.values(), key=lambda each: (each.sizes[TOTAL], each.tokens))
    sizes, tokens = {each.sizes[TOTAL] for each in kept}, {each.tokens for each in kept}
    if not problems and (len(kept) < MIN_POINTS or min(len(sizes), len(tokens)) < MIN_VALUES):
        without = "".join(f"\n{name}: left out: {why}." for name, why in left_out.items())
        problems.append(
            f"the runs: {len(kept)} that can be fitted, of {len(sizes)} sizes and {len(tokens)} "
            f"numbers of tokens; {MIN_POINTS} of {MIN_VALUES} sizes and {MIN_VALUES} numbers of "
            f"tokens are needed. Add runs.{without}"
        )
    if problems:
        raise ConfigError(problems)
    differ = ["the runs have different training data, which have different laws"]
    return kept, left_out, differ if len(data) > 1 else []
