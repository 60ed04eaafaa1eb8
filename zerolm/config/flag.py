"""Metadata of a settings field: how its flag is parsed, and how other code uses it.

Standard library only, so that `--help` is instant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from zerolm.common.values import duration


def flag(
    group: str,
    kind: str,
    help: str,
    *,
    shows: str = "",
    default: Any = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    saved: bool = True,
    tracker: str = "",
    changes_curve: bool = False,
    unchangeable: str = "",
    follows: bool = False,
    of_one_run: bool = False,
    planned: bool = False,
    not_with: Mapping[str, str] | None = None,
) -> Any:
    """Return a dataclass field that describes a flag. The help shows the default value, if any.

    Args:
        group: a key of `zerolm.config.settings.GROUPS`.
        kind: a key of `zerolm.parts.parse.CONVERTERS`, which determines how the value is converted.
        shows: placeholder for the value in the help.
        minimum, above, maximum, below: bounds for `values.within`.
        saved: whether the value is saved in run.json.
        tracker: `module:class` of the `Tracker` that the flag enables.
        changes_curve: whether resuming with another value changes the loss curve. Runs from before
            the setting existed are treated as if they had the default value.
        unchangeable: why a resume may never use another value, even with --accept_changes.
        follows: whether the value follows from other settings or the machine, so each start derives
            it again.
        of_one_run: whether the setting belongs to one run, so a branch does not inherit it from its
            trunk.
        planned: whether the setting affects the memory or time of a step, so `zerolm plan` also has
            the flag.
        not_with: {axis of a `Layout`: why the flag cannot be combined with it}.
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    about: dict[str, Any] = {
        **{"group": group, "kind": kind, "purpose": help, "shows": shows, "bounds": bounds},
        **{"help": help and with_default(help, kind, default), "choices": tuple(choices)},
        **{"saved": saved, "tracker": tracker},
        **{"changes_curve": changes_curve, "unchangeable": unchangeable, "follows": follows},
        **{"of_one_run": of_one_run, "planned": planned, "not_with": not_with or {}},
    }
    return field(default=default, metadata=about)


def with_default(help: str, kind: str, default: Any) -> str:
    """Append the default value to a help text, in the form that a user would type."""
    if kind in ("recompute", "list") or default is None:
        return help
    text = default
    if kind == "switch":
        text = "on" if default else "off"
    elif kind == "duration":
        text = duration(default).removesuffix("00s")
    return f"{help} (default: {text:g})" if isinstance(text, float) else f"{help} (default: {text})"


def count(group: str, help: str, shows: str, minimum: int = 1, **more: Any) -> Any:
    return flag(group, "count", help, shows=shows, minimum=minimum, **more)


def real(group: str, help: str, shows: str = "X", **more: Any) -> Any:
    return flag(group, "real", help, shows=shows, minimum=0.0, **more)


def switch(group: str, help: str, default: bool = False, **more: Any) -> Any:
    return flag(group, "switch", help, default=default, **more)
