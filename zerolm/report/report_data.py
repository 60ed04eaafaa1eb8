"""The data of `report.html`, as JSON: thinned curves, events, tables and texts of each run.

Must not depend on how the scripts in `assets/` draw the data.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from zerolm.parts.metrics import charts, metric_of
from zerolm.report.curves import Curves, rounded, thinned
from zerolm.report.event_list import event_list
from zerolm.report.run_history import RunHistory
from zerolm.report.settings import differences, flatten
from zerolm.report.summary import facts, figures, findings
from zerolm.run_dir.metrics import BATCH, NOISE_SCALE
from zerolm.run_dir.records import lineage

TRAIN_LOSS = "train/loss"
MAX_POINTS = 60_000  # in all curves; points make up most of the file, 15 to 25 bytes each
MAX_POINTS_OF_A_CURVE, MIN_POINTS_OF_A_CURVE = 3_000, 60
MAX_CURVES_OF_RUNS = 4  # in a panel with one curve per source or block, when runs are compared
MAX_SAMPLES_OF_A_PROMPT, MAX_SAMPLE_CHARACTERS, MAX_PROMPTS = 24, 4_000, 24

Json = dict[str, Any]


def report_data(runs: Sequence[RunHistory], price_per_hour: float | None = None) -> Json:
    """Return everything that the report on one or several runs shows.

    Args:
        price_per_hour: dollars per device-hour.
    """
    keys = {key for run in runs for key in run.curves.columns}
    num_curves = sum(len(run.curves.columns) for run in runs)
    points = MAX_POINTS // max(1, num_curves)
    points = min(MAX_POINTS_OF_A_CURVE, max(MIN_POINTS_OF_A_CURVE, points))
    settings = [flatten(run.record) for run in runs]
    return {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "written_at": time.time(),
        "runs": [
            _run(run, points, _first_step(run, runs), price_per_hour, compared=len(runs) > 1)
            for run in runs
        ],
        "panels": [
            panel
            for panel in panels(keys, compared=len(runs) > 1)
            if panel["title"] != BATCH.title or _varies(runs, panel["keys"][0])
        ],
        "settings": settings,
        "differences": differences(settings) if len(runs) > 1 else [],
        "agreement": agreement(runs),
    }


def panels(keys: Collection[str], *, compared: bool) -> list[Json]:
    """Return the panels that are not empty, each with its metrics' `keys` and short `names`.

    Args:
        keys: keys of all metrics.
        compared: whether several runs are drawn, each in its own colour.
    """
    drawn = []
    for _, panel, unit, chosen in charts(keys):
        if compared and panel.many and len(chosen) > MAX_CURVES_OF_RUNS:
            continue
        if panel == NOISE_SCALE and "train/noise_scale_tokens" not in chosen:
            panel = BATCH
        names = _short(chosen)
        if not panel.many and len(names) > 1:  # keep the names of sources and blocks unchanged
            names = [name.replace("_", " ") for name in names]
        drawn.append({**asdict(panel), "unit": unit, "keys": chosen, "names": names})
    return drawn


def _short(keys: Sequence[str]) -> list[str]:
    """Return a short name for each key: the path segments that are not the same in all keys."""
    if len(keys) == 1:
        return [keys[0]]
    paths = [key.split("/") for key in keys]
    if any(len(path) != len(paths[0]) for path in paths):
        return list(keys)
    differs = [len(set(column)) > 1 for column in zip(*paths, strict=True)]
    return ["/".join(segment for segment, show in zip(path, differs, strict=True) if show)
            for path in paths]  # fmt: skip


def _varies(runs: Sequence[RunHistory], key: str) -> bool:
    return any(len(set(run.curves.values(key))) > 1 for run in runs)


def _first_step(run: RunHistory, runs: Sequence[RunHistory]) -> int:
    """Return the first step to draw of a run: where it branched off from another run shown, else
    0.
    """
    shown = {str(other.run_dir.resolve()) for other in runs if other is not run}
    branch: object = run.branch
    while isinstance(branch, dict) and branch:
        if branch.get("run") in shown:
            return int(branch["step"])
        branch = branch.get("branch")
    return 0


def _run(
    run: RunHistory, points: int, first_step: int, price_per_hour: float | None, *, compared: bool
) -> Json:
    state, why = run.state()
    branch = [["Branch of", lineage(run.branch), ""]] if compared and run.branch else []
    ds_config = run.record.get("ds_config")
    clipping = ds_config.get("gradient_clipping") if isinstance(ds_config, dict) else None
    return {
        "name": run.name,
        "state": state,
        "why": why,
        "facts": facts(run),
        "figures": figures(run, price_per_hour) + branch,
        "step": run.step,
        "total_steps": run.total_steps,
        "tokens": run.tokens,
        "total_tokens": run.total_tokens,
        "seconds_left": run.seconds_left() if state == "running" else None,
        "clipping": clipping if isinstance(clipping, (int, float)) and clipping else None,
        "curves": curves_json(run.curves, points, first_step=first_step),
        "rolled_back": [
            curves_json(undone, max(100, points // 4), (TRAIN_LOSS, "train/grad_norm"))
            for undone in run.rolled_back
        ],
        **event_list(run),
        "evaluations": evaluations(run.curves),
        "samples": samples(run.samples),
        "findings": findings(run),
        "problems": run.problems,
    }


def curves_json(
    curves: Curves, max_points: int, only: Sequence[str] = (), first_step: int = 0
) -> Json:
    """Return the thinned curves, and the x-axis values of the lines that the curves use.

    `steps`, `tokens` and `seconds` are the x-axis values of all lines used. `places` contains lists
    of line indices, and a curve's `lines` is the index of its list in `places`. Curves with the
    same lines share a list.
    """
    chosen: dict[str, tuple[tuple[int, ...], list[float | None]]] = {}
    for key, (lines, values) in sorted(curves.columns.items()):
        if only and key not in only:
            continue
        first = next((i for i, line in enumerate(lines) if curves.steps[line] >= first_step), None)
        if first is None:
            continue
        lines, values = lines[first:], values[first:]
        keep = thinned(values, max_points)
        places = tuple(lines[index] for index in keep)
        chosen[key] = places, [rounded(values[index]) for index in keep]
    used = sorted({line for places, _ in chosen.values() for line in places})
    position = {line: index for index, line in enumerate(used)}
    distinct = sorted({places for places, _ in chosen.values()})
    number = {places: index for index, places in enumerate(distinct)}
    return {
        "steps": [curves.steps[line] for line in used],
        "tokens": [curves.tokens[line] for line in used],
        "seconds": [rounded(curves.seconds[line]) for line in used],
        "places": [[position[line] for line in places] for places in distinct],
        "curves": {
            key: {"lines": number[places], "values": values}
            for key, (places, values) in chosen.items()
        },
    }


def evaluations(curves: Curves) -> Json:
    """Return the table of all evaluations: one row per step, one column per metric.

    For each column, `better` states whether the lowest or the highest value is best ("" if neither
    is), and `units` states the unit.
    """
    keys = sorted(
        (key for key in curves.columns if key.startswith("eval/")),
        key=lambda key: (key not in ("eval/loss", "eval/perplexity"), key),
    )
    cells: dict[int, dict[str, float | None]] = {}
    for key in keys:
        for line, value in zip(*curves.columns[key], strict=True):
            cells.setdefault(curves.steps[line], {})[key] = rounded(value)
    tokens = dict(zip(curves.steps, curves.tokens, strict=True))
    known = [metric_of(key) for key in keys]
    return {
        "keys": keys,
        "better": [metric.better if metric else "" for metric in known],
        "units": [metric.unit if metric else "" for metric in known],
        "rows": [[step, tokens[step], *map(row.get, keys)] for step, row in sorted(cells.items())],
    }


def samples(lines: Sequence[Json]) -> list[Json]:
    """Return the prompts, each with its generated texts, or with a selection if there are many
    texts.
    """
    prompts: dict[Any, Json] = {}
    for line in lines:
        number = line.get("prompt_number", line["prompt"])
        prompt = prompts.setdefault(
            str(number), {"prompt": str(line["prompt"])[:MAX_SAMPLE_CHARACTERS], "texts": {}}
        )
        how = [f"{key} {line[key]}" for key in ("temperature", "top_k", "top_p") if line.get(key)]
        text = str(line["text"])[:MAX_SAMPLE_CHARACTERS]
        prompt["texts"][line["step"]] = [line["step"], line["tokens"], text, ", ".join(how)]
    steps = sorted({step for prompt in prompts.values() for step in prompt["texts"]})
    last = MAX_SAMPLES_OF_A_PROMPT - 1
    if len(steps) > last + 1:
        steps = [steps[round(index * (len(steps) - 1) / last)] for index in range(last + 1)]
    return [
        {**prompt, "texts": [prompt["texts"][step] for step in steps if step in prompt["texts"]]}
        for prompt in list(prompts.values())[:MAX_PROMPTS]
    ]


def agreement(runs: Sequence[RunHistory]) -> list[Json]:
    """Return, for each other run, the largest difference between its training losses and the first
    run's.
    """
    found = []
    first = _losses(runs[0].curves)
    for run in runs[1:]:
        other = _losses(run.curves)
        shared = first.keys() & other.keys()
        if shared:
            step = max(shared, key=lambda step: abs(first[step] - other[step]))
            difference = abs(first[step] - other[step])
            found.append(
                {
                    "run": run.name,
                    "steps": len(shared),
                    "largest": rounded(difference),
                    "at": step,
                    "relative": rounded(difference / max(abs(first[step]), 1e-30)),
                }
            )
    return found


def _losses(curves: Curves) -> dict[int, float]:
    lines, values = curves.columns.get(TRAIN_LOSS, ((), ()))
    pairs = zip(lines, values, strict=True)
    return {curves.steps[line]: value for line, value in pairs if math.isfinite(value)}
