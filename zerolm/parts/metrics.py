"""The table of all metrics, which also states which of them the report, trackers and console show.

The tables in docs/metrics.md, the panels in `report.html`, the console line and the progress bar
are derived from `METRICS`. A metric that is not in this table is still logged, sent to trackers,
and drawn in its own panel in the section `OTHER`. Standard library only.

    python -m tests.test_tables    # writes the tables of docs/metrics.md
"""

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

from zerolm.common.values import count
from zerolm.parts.settings import PARTS
from zerolm.run_dir.metrics import SECTIONS, Metric, Panel

OTHER = "Other"  # section of metrics that are not in the table
METRICS: dict[str, tuple[Metric, ...]] = {
    section: (*metrics, *(m for each in PARTS if section == each.SECTION for m in each.METRICS))
    for section, metrics in SECTIONS.items()
}
ALL = tuple(metric for section in METRICS.values() for metric in section)


class Chart(NamedTuple):
    """A panel and the keys of the metrics to draw in it."""

    section: str
    panel: Panel
    unit: str
    keys: list[str]


@cache
def metric_of(key: str) -> Metric | None:
    """Return the table's metric for a key in `metrics.jsonl`, or None if there is none."""
    exact = [metric for metric in ALL if metric.key == key]
    return next((metric for metric in exact or ALL if metric.matches(key)), None)


def charts(keys: Collection[str]) -> list[Chart]:
    """Return the panels that show these metrics, in table order; panels for unknown metrics come
    last.
    """
    ordered = sorted(keys, key=_by_number)
    found = []
    for section, metrics in METRICS.items():
        for panel in dict.fromkeys(metric.panel for metric in metrics):
            if panel is None:
                continue
            members = [metric for metric in metrics if metric.panel == panel]
            drawn = [key for metric in members for key in ordered if metric_of(key) is metric]
            if drawn:
                found.append(Chart(section, panel, members[0].unit, drawn))
    unknown = [key for key in ordered if metric_of(key) is None]
    return found + [Chart(OTHER, Panel(key), "", [key]) for key in unknown]


def line_figures(row: Mapping[str, Any]) -> list[str]:
    """Return a row's metrics for the console line, as `key=value`."""
    return [_figure(metric.line, row[metric.key]) for metric in ALL
            if metric.line and row.get(metric.key) is not None]  # fmt: skip


def bar_figures(row: Mapping[str, Any]) -> list[str]:
    """Return a row's metrics for the progress bar, the most important first."""
    shown = [metric for metric in ALL if metric.bar and row.get(metric.key) is not None]
    shown.sort(key=lambda metric: metric.bar_rank)
    return [_figure(metric.bar, row[metric.key]) for metric in shown]


def _figure(template: str, value: float) -> str:
    return template.format(value, count=count(value))


def _by_number(key: str) -> list[Any]:
    """Sort layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
