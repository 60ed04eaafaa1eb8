"""The grid of a sweep: one axis per `--set NAME=V1,V2`, and one named point per combination.

A point's name is also the name of its run directory. The name depends only on the values, not on
their notation or order. Must not read or start runs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from zerolm.common.errors import did_you_mean
from zerolm.common.values import shown_setting
from zerolm.config.settings import COMMAND_LINE
from zerolm.parts.other_names import answer_for
from zerolm.parts.parse import convert
from zerolm.parts.settings import FLAGS

OF_THE_SWEEP = ("run_dir", "upload_to", "wandb_name")  # each point has its own
SWEPT = [name for name, about in FLAGS.items() if about["saved"] and name not in OF_THE_SWEEP]


@dataclass(frozen=True)
class Point:
    """One combination of values.

    Attributes:
        labels: {setting: its value as it appears in the point's name}.
        flags: the pretrain.py flags that set these values.
    """

    labels: dict[str, str]
    flags: list[str]

    @property
    def name(self) -> str:
        return ",".join(f"{axis}={label}" for axis, label in self.labels.items())


def read_axes(given: Sequence[str], problems: list[str]) -> dict[str, dict[str, str]]:
    """Return {setting: {label: value as given}} for `NAME=V1,V2` arguments, sorted by name.

    Append a problem for each argument that is invalid.
    """
    axes: dict[str, dict[str, str]] = {}
    for text in given:
        written, equals, values = text.partition("=")
        name, where = written.replace("-", "_"), f"{COMMAND_LINE}: --set: {written}"
        if name in OF_THE_SWEEP:
            problems.append(f"{where}: each run of a sweep has its own. Remove it.")
        elif name not in SWEPT:
            near = answer_for(name) if name not in FLAGS else ""
            near = near or did_you_mean(name, SWEPT)
            near = near or " zerolm train --help all lists the settings."
            problems.append(f"{where}: no such setting.{near}")
        elif name in axes:
            problems.append(f"{where} is given twice. Write all its values in one --set.")
        elif not equals or not all(values.split(",")):
            problems.append(f"{where} lacks a value. For example, write --set {name}=A,B.")
        else:
            axes[name] = _labelled(name, values.split(","), problems)
    return dict(sorted(axes.items()))


def _labelled(name: str, values: Sequence[str], problems: list[str]) -> dict[str, str]:
    labelled: dict[str, str] = {}
    where = f"{COMMAND_LINE}: --set: {name}"
    for value in values:
        try:
            label = _label(name, value)
        except ValueError as error:
            problems.append(f"{where}: {shown_setting(where, value)} {error}")
            continue
        if label in labelled:
            problems.append(
                f"{where}: {value} would use the same directory as {labelled[label]}: {label}. "
                f"Remove one of them, or rename its file."
            )
        labelled[label] = value
    return labelled


def _label(name: str, value: str) -> str:
    """Return a value in the form used in directory names; equal numbers have equal labels."""
    converted = convert(name, value)
    if isinstance(converted, float):
        label = f"{converted:g}" if float(f"{converted:g}") == converted else repr(converted)
    elif isinstance(converted, int) and not isinstance(converted, bool):
        label = str(converted)
    else:
        label = Path(value).name.removesuffix(".json")
    return re.sub(r"[^\w.+@-]+", "-", label)


def grid(axes: Mapping[str, Mapping[str, str]]) -> list[Point]:
    """Return a point for each combination; the last axis varies fastest."""
    points = []
    for labels in product(*axes.values()):
        chosen = dict(zip(axes, labels, strict=True))
        flags = [f"--{axis}={axes[axis][label]}" for axis, label in chosen.items()]
        points.append(Point(chosen, flags))
    return points
