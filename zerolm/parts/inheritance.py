"""Determines what a run inherits from a run.json: chosen values and some derived values.

A run.json contains the resolved value of every setting; `derived_settings` lists those that were
not set explicitly. A new run derives all of them again. A branch or resumed run continues a loss
curve that already depends on derived values, so the run keeps these values, except those in
`FOLLOWING`. Standard library only.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from zerolm.common.values import printable
from zerolm.config import defaults
from zerolm.config.settings import COMMAND_LINE, Settings
from zerolm.optim.schedule import SCHEDULES, BatchSchedule
from zerolm.parts.settings import FLAGS, STATIC_DEFAULTS

# Settings specific to one run: its directory, its store and its name in W&B. Branches do not
# inherit these settings.
OWN_SETTINGS = frozenset(name for name, about in FLAGS.items() if about["of_one_run"])
# Settings that depend on other settings or the machine, so every run derives them again.
FOLLOWING = frozenset(name for name, about in FLAGS.items() if about["follows"])


class Layer(NamedTuple):
    """The settings in a file, and the names of those that were not set explicitly (`derived`)."""

    values: dict[str, Any]
    derived: frozenset[str] = frozenset()

    def without_derived(self, *, but_keep: bool) -> "Layer":
        """Return the values that a run inherits: all chosen values, but derived values only with
        `but_keep`, and then except those in `FOLLOWING`.

        Args:
            but_keep: whether the new run continues the file's run.
        """
        dropped = self.derived & FOLLOWING if but_keep else self.derived
        kept = {name: value for name, value in self.values.items() if name not in dropped}
        return Layer(kept, self.derived - dropped)


def derived_settings(settings: Settings) -> dict[str, Any]:
    """Return `derived_settings` for run.json: {name: value} for settings not set explicitly."""
    return {
        name: value
        for name, value in settings.to_json().items()
        if name not in settings.explicit and value != STATIC_DEFAULTS[name]
    }


def derived_names(record: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of settings in a run.json that were not set explicitly; a value edited later
    counts as set explicitly.

    Records from earlier releases have no `derived_settings`; values equal to their defaults count
    as derived there.
    """
    values: Mapping[str, Any] = record["settings"]
    derived = record.get("derived_settings")
    if not isinstance(derived, dict):
        derived = _defaults_of(record)
    unchosen = STATIC_DEFAULTS | derived
    return frozenset(name for name, value in values.items() if unchosen.get(name) == value)


def _defaults_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that follow from a record's other settings, without those derived from
    the model.

    In records from earlier releases, the learning rate, batch size and total therefore count as
    chosen.
    """
    values = record["settings"]

    def number(name: str) -> Any:
        value = values.get(name)
        return value if isinstance(value, int | float) else 0

    total, batch, peak = number("total_tokens"), number("batch_tokens"), number("learning_rate")
    schedule = SCHEDULES.get(str(values.get("schedule")), SCHEDULES["cosine"])
    decay = defaults.decay_tokens(total, number("warmup_tokens"))
    optimizer = (record.get("ds_config") or {}).get("optimizer") or {}
    lion = str(optimizer.get("type")).lower() == "lion"
    found = {
        "schedule": "cosine",
        "min_learning_rate": defaults.min_learning_rate(peak) if schedule.uses_minimum else peak,
        "warmup_tokens": defaults.warmup_tokens(total, batch),
        "decay_tokens": decay if schedule.uses_decay_tokens else None,
        "weight_decay": defaults.WEIGHT_DECAY,
        "eval_tokens": defaults.eval_tokens(number("seq_len")),
        "downstream_interval": values.get("eval_interval"),
    }
    found |= zip(("beta1", "beta2"), defaults.betas(lion), strict=True)
    if number("batch_ramp_start"):
        found["batch_ramp_tokens"] = defaults.ramp_tokens(total)
    if seq_len := number("seq_len"):
        sizes = ("batch_tokens", "batch_ramp_start", "batch_ramp_tokens")
        ramped = BatchSchedule(*(math.ceil(number(name) / seq_len) for name in sizes))
        steps = ramped.steps(0, math.ceil(total / seq_len)) if batch else 0
        intervals = ("log", "eval", "checkpoint")
        found |= {f"{what}_interval": defaults.interval(steps, what) for what in intervals}
        found["rollback_margin"] = defaults.rollback_margin(steps)
    return found


# ---- Values set in a file that a refusal asks to remove

# Any other word after the verb is a key, block, file or row; "one" refers to flags and keys.
_REMOVAL = re.compile(
    r"\b(?:[Rr]emove|[Ll]eave out|[Dd]rop) "
    r"(?=(?:\w+, or )?(?:(?:it|one|the flag|this flag|this setting)\b|--[a-z]))"
)
_WANTED = r"(?<!without )(?<!needs )(?<![Uu]se )(?<![Aa]dd )(?<![Gg]ive )"  # not to be removed


def with_origins(problems: Iterable[str], settings: Settings) -> list[str]:
    """For each problem that begins with a path from a settings file, append the file and key that
    set the path.

    If the fix is to remove a value set in a file, also add `--no-NAME`.

    A flag that the user did not write cannot be removed from the command line.
    """
    in_files = {
        name: place
        for name, place in settings.origins.items()
        if not place.startswith(COMMAND_LINE)
    }
    return [
        _with_no_forms(_with_origin(problem, settings, in_files), in_files) for problem in problems
    ]


def _with_origin(problem: str, settings: Settings, in_files: Mapping[str, str]) -> str:
    """If a problem begins with a path set in a file, append the file and the key."""
    for name, place in in_files.items():
        values = getattr(settings, name)
        for value in values if isinstance(values, tuple) else (values,):
            # as problems show it
            shown = printable(value, "\n\t") if isinstance(value, str) else ""
            path = shown.rpartition("=")[0] or shown
            starts = f"{shown}:", f"{path}:", f"{path}/", f"--{name} "
            if path and problem.startswith(starts):
                return f"{problem.removesuffix(f' (--{name})')} ({place})"
    return problem


def _with_no_forms(problem: str, in_files: Mapping[str, str]) -> str:
    fixes = list(_REMOVAL.finditer(problem))
    if not fixes:
        return problem
    # the text before the fix, and the flag named in the fix
    about = problem[: fixes[-1].start()] + " ".join(problem[fixes[-1].end() :].split()[:1])
    named: dict[str, list[str]] = {}
    for name, place in in_files.items():
        subject = re.search(rf"{re.escape(place)}(?!\w)|{_WANTED}--{name}(?!\w)", about)
        if subject and f"--no-{name}" not in problem:
            named.setdefault(place.rpartition(": ")[0], []).append(f"--no-{name}")
    lines = [
        f" {' or '.join(flags)} removes the value set in {file}." for file, flags in named.items()
    ]
    return problem + "".join(lines)
