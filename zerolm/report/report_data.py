"""What the page of a run shows, as JSON: thinned curves, events with their places, tables, texts.

Knows what can be read of runs (zerolm/run_history.py); must not know how it is drawn.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

from zerolm.curves import Curves
from zerolm.event_words import level, merged, words
from zerolm.panels import TRAIN_LOSS, panels
from zerolm.run_history import History
from zerolm.run_settings import differences, flat
from zerolm.run_summary import facts, figures, findings
from zerolm.thinning import kept

MOST_POINTS = 60_000  # of all curves: they are most of the page, 15 to 25 bytes each
MOST_POINTS_OF_A_CURVE, FEWEST_POINTS_OF_A_CURVE = 3_000, 60
MOST_EVENTS, MOST_WORDS = 600, 600
MOST_SAMPLES_OF_A_PROMPT, MOST_SAMPLE_CHARACTERS, MOST_PROMPTS = 24, 4_000, 24
STALL_SECONDS, STALL_STEPS = 1.0, 10  # a checkpoint that costs more than either is an event

Json = dict[str, Any]


def data_of(histories: Sequence[History]) -> Json:
    """Return all that the page shows, as JSON."""
    keys = {key for history in histories for key in history.curves.columns}
    num_curves = sum(len(history.curves.columns) for history in histories)
    points = MOST_POINTS // max(1, num_curves)
    points = min(MOST_POINTS_OF_A_CURVE, max(FEWEST_POINTS_OF_A_CURVE, points))
    settings = [flat(history.record) for history in histories]
    return {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "written_at": time.time(),
        "runs": [_run(history, points) for history in histories],
        "panels": [
            panel
            for panel in panels(keys, compared=len(histories) > 1)
            if panel["title"] != "Batch" or _varies(histories, panel["keys"][0])
        ],
        "settings": settings,
        "differences": differences(settings) if len(histories) > 1 else [],
        "agreement": agreement(histories),
    }


def _varies(histories: Sequence[History], key: str) -> bool:
    return any(len(set(history.curves.values(key))) > 1 for history in histories)


def _run(history: History, points: int) -> Json:
    state, why = history.state()
    total = history.total_tokens
    ds_config = history.record.get("ds_config")
    clipping = ds_config.get("gradient_clipping") if isinstance(ds_config, dict) else None
    return {
        "name": history.name,
        "state": state,
        "why": why,
        "facts": facts(history),
        "figures": figures(history),
        "step": history.step,
        "total_steps": history.total_steps,
        "tokens": history.tokens,
        "total_tokens": total,
        "seconds_left": history.seconds_left() if state == "running" else None,
        "clipping": clipping if isinstance(clipping, (int, float)) and clipping else None,
        "curves": curves(history.curves, points),
        "rolled_back": [
            curves(part, max(100, points // 4), (TRAIN_LOSS, "train/grad_norm"))
            for part in history.rolled_back
        ],
        **_events(history),
        "evaluations": evaluations(history.curves),
        "samples": samples(history.samples),
        "findings": findings(history),
        "problems": history.problems,
    }


def curves(found: Curves, points: int, only: Sequence[str] = ()) -> Json:
    """Return curves of at most so many points: their values, and what the x-axes have there.

    Curves that were measured on the same lines share those. `places` are lists of lines, `lines`
    of each curve is the number of one; `steps`, `tokens` and `seconds` are of all lines used.
    """
    chosen: dict[str, tuple[tuple[int, ...], list[float | None]]] = {}
    for key, (lines, values) in sorted(found.columns.items()):
        if only and key not in only:
            continue
        keep = kept(values, points)
        where = tuple(lines[index] for index in keep)
        chosen[key] = where, [_number(values[index]) for index in keep]
    used = sorted({line for where, _ in chosen.values() for line in where})
    position = {line: index for index, line in enumerate(used)}
    places = sorted({where for where, _ in chosen.values()})
    number = {where: index for index, where in enumerate(places)}
    return {
        "steps": [found.steps[line] for line in used],
        "tokens": [found.tokens[line] for line in used],
        "seconds": [_number(found.seconds[line]) for line in used],
        "places": [[position[line] for line in where] for where in places],
        "curves": {
            key: {"lines": number[where], "values": values}
            for key, (where, values) in chosen.items()
        },
    }


def _number(value: float) -> float | int | None:
    """Return seven digits of a value, which is what single precision has; None for NaN."""
    if not math.isfinite(value):
        return None
    value = float(f"{value:.7g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _events(history: History) -> Json:
    """Return the events in words, with their places on the x-axes; `left_out` if too many."""
    stalls = {stall["step"]: stall for stall in _stalls(history.curves)}
    found: list[Json] = []
    for event, part in with_curves(history):  # a stall is told after the checkpoint that it was for
        found.append({**event, "curves": part})
        if event["event"] == "checkpoint" and event["step"] in stalls:
            found.append(stalls.pop(event["step"]))
    told = [
        {
            "kind": event["event"],
            "level": level(event["event"]),
            "step": event["step"],
            "time": event.get("time"),
            "words": words(event)[:MOST_WORDS],
            "curves": event.get("curves", history.curves),
        }
        for event in merged([*found, *stalls.values()])
    ]
    remarkable = [event for event in told if event["level"] != "quiet"]
    quiet = [event for event in told if event["level"] == "quiet"]
    shown = remarkable[-MOST_EVENTS:] + quiet[-MOST_EVENTS // 2 :]
    order = {id(event): index for index, event in enumerate(told)}
    shown.sort(key=lambda event: order[id(event)])
    for event in shown:
        event["tokens"], seconds = event.pop("curves").place(max(0, event["step"]))
        event["seconds"] = _number(seconds)
    return {"events": shown, "events_left_out": len(told) - len(shown)}


def with_curves(history: History) -> list[tuple[Json, Curves]]:
    """Return each event with the curves that it stands on: those that a rollback left, or today's.

    An event of a step that was taken again happened at other tokens than the step has now.
    """
    found = []
    left, low = history.curves, math.inf
    rolled_back = list(history.rolled_back)
    for event in reversed(history.events):
        if event["event"] == "rollback" and rolled_back:
            left, low = rolled_back.pop(), event.get("to_step", math.inf)
        found.append((event, left if event["step"] > low else history.curves))
    return found[::-1]


def _stalls(found: Curves) -> list[Json]:
    """Return an event for each checkpoint that training stood still for."""
    lines, stalls = found.columns.get("checkpoint/stall_seconds", ((), ()))
    waits = dict(zip(*found.columns.get("checkpoint/wait_seconds", ((), ())), strict=True))
    step_seconds = found.values("throughput/step_seconds")
    usual = sorted(step_seconds)[len(step_seconds) // 2] if step_seconds else 0.0
    return [
        {
            "event": "checkpoint_stall",
            "step": found.steps[line],
            "seconds": seconds,
            "wait_seconds": waits.get(line, 0.0),
        }
        for line, seconds in zip(lines, stalls, strict=True)
        if seconds > STALL_SECONDS and seconds > STALL_STEPS * usual
    ]


def evaluations(found: Curves) -> Json:
    """Return the table of all evaluations: a row a step, a column a metric."""
    keys = sorted(
        (key for key in found.columns if key.startswith("eval/") and not key.endswith("_stderr")),
        key=lambda key: (key not in ("eval/loss", "eval/perplexity"), key),
    )
    cells: dict[int, dict[str, float | None]] = {}
    for key in keys:
        for line, value in zip(*found.columns[key], strict=True):
            cells.setdefault(found.steps[line], {})[key] = _number(value)
    tokens = dict(zip(found.steps, found.tokens, strict=True))
    return {
        "keys": keys,
        "rows": [[step, tokens[step], *map(row.get, keys)] for step, row in sorted(cells.items())],
    }


def samples(lines: Sequence[Json]) -> list[Json]:
    """Return the prompts, each with what was generated over training, evenly thinned if long."""
    prompts: dict[Any, Json] = {}
    for line in lines:
        number = line.get("prompt_number", line["prompt"])
        prompt = prompts.setdefault(
            str(number), {"prompt": str(line["prompt"])[:MOST_SAMPLE_CHARACTERS], "texts": {}}
        )
        how = [f"{key} {line[key]}" for key in ("temperature", "top_k", "top_p") if line.get(key)]
        text = str(line["text"])[:MOST_SAMPLE_CHARACTERS]
        prompt["texts"][line["step"]] = [line["step"], line["tokens"], text, ", ".join(how)]
    steps = sorted({step for prompt in prompts.values() for step in prompt["texts"]})
    most = MOST_SAMPLES_OF_A_PROMPT
    if len(steps) > most:
        steps = [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]
    return [
        {**prompt, "texts": [prompt["texts"][step] for step in steps if step in prompt["texts"]]}
        for prompt in list(prompts.values())[:MOST_PROMPTS]
    ]


def agreement(histories: Sequence[History]) -> list[Json]:
    """Return how far the training losses of each run are from the first one's, at equal steps."""
    found = []
    first = _losses(histories[0].curves)
    for history in histories[1:]:
        other = _losses(history.curves)
        shared = first.keys() & other.keys()
        if shared:
            step = max(shared, key=lambda step: abs(first[step] - other[step]))
            found.append(
                {
                    "run": history.name,
                    "steps": len(shared),
                    "largest": _number(abs(first[step] - other[step])),
                    "at": step,
                    "relative": _number(
                        abs(first[step] - other[step]) / max(abs(first[step]), 1e-30)
                    ),
                }
            )
    return found


def _losses(found: Curves) -> dict[int, float]:
    lines, values = found.columns.get(TRAIN_LOSS, ((), ()))
    pairs = zip(lines, values, strict=True)
    return {found.steps[line]: value for line, value in pairs if math.isfinite(value)}
