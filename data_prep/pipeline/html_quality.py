"""Parts of the report's HTML page: histograms of scores, and shares by the values of keys."""

import html
from collections.abc import Mapping
from typing import Any

from data_prep.stages.counts import thresholds

MAX_ROWS = 25  # of a table of shares
MAX_BARS = 50


def scores(source: Mapping[str, Any]) -> str:
    """Return the histogram of each score, and thresholds with what they keep."""
    stages = [stage for stage in source["stages"] if "scores_in" in stage]
    if not stages:
        return ""
    before: Mapping[str, Any] = stages[0]["scores_in"]
    after: Mapping[str, Any] = stages[-1].get("scores_out", {})
    parts = [
        f"<div><p>{name_of(name)}</p>{_bars(bins, after.get(name, {}))}{_thresholds(bins)}</div>"
        for name, bins in before.items()
    ]
    return (
        f"<h3>Scores</h3><p>All documents with the score, green those that "
        f"{stages[-1]['stage']} kept.</p><div class=grid>{''.join(parts)}</div>"
    )


def _bars(bins: Mapping[str, list[int]], kept: Mapping[str, list[int]]) -> str:
    bars = _grouped([low for low in bins if low not in ("nan", "inf", "-inf")])
    counts = [sum(bins.get(low, (0,))[0] for low in lows) for _, lows in bars]
    highest, width = max(counts, default=1), 420 / max(1, len(bars))
    marks = []
    for number, ((name, lows), count) in enumerate(zip(bars, counts, strict=True)):
        left = 4 + number * width
        own = sum(kept.get(low, (0,))[0] for low in lows)
        title = f"from {name}: {count:,} documents, {own:,} kept"
        for part, color in ((count, "#c9d2dc"), (own, "#2a7f62")):
            height = 120 * part / highest
            marks.append(
                f'<rect x="{left:.1f}" y="{130 - height:.1f}" width="{max(width - 1, 1):.1f}" '
                f'height="{height:.1f}" fill="{color}"><title>{title}</title></rect>'
            )
        if number % -(-len(bars) // 6) == 0:
            marks.append(f'<text x="{left:.1f}" y="145">{name}</text>')
    return f'<svg viewBox="0 0 430 150" role=img>{"".join(marks)}</svg>'


def _grouped(lows: list[str]) -> list[tuple[str, list[str]]]:
    """Return the bins of each bar, with the name of the bar; from -1 to 1 also empty bars."""
    if lows and float(lows[0]) >= -1 and float(lows[-1]) <= 1:
        first, last = round(float(lows[0]) * 100), round(float(lows[-1]) * 100)
        lows = [f"{number / 100:.2f}" for number in range(first, last + 1)]
    group = -(-len(lows) // MAX_BARS) or 1
    return [(lows[start], lows[start : start + group]) for start in range(0, len(lows), group)]


def _thresholds(bins: Mapping[str, list[int]]) -> str:
    rows = [
        f"<tr><td>at least {low}<td>{share_of(documents, total)}<td>{share_of(size, all_bytes)}"
        for low, documents, size, total, all_bytes in thresholds(bins)
    ]
    return (
        f"<div class=scroll><table><tr><th>score<th>documents<th>text{''.join(rows)}</table></div>"
    )


def shares(source: Mapping[str, Any]) -> str:
    """Return a table for each key, with the shares of its values before and after."""
    counted = source.get("shares")
    if not counted:
        return ""
    ends = (counted["before"], counted["after"])
    parts = []
    for key, found in counted["keys"].items():
        groups = found["groups"]
        totals = [[sum(row[end][n] for row in groups.values()) for n in range(3)] for end in (0, 1)]
        rows = []
        for name, (before, after) in list(groups.items())[:MAX_ROWS]:
            cells = "".join(
                f"<td>{number(row[n])}<td>{share_of(row[n], all_rows[n])}"
                for row, all_rows in zip((before, after), totals, strict=True)
                for n, number in ((0, _count), (1, size_of))
            )
            if counted["has_tokens"]:
                cells += f"<td>{after[2]:,}<td>{share_of(after[2], totals[1][2])}"
            rows.append(f"<tr><td>{name_of(name)}{cells}")
        hidden = found["num_groups"] - len(rows)
        more = f"<p>{hidden:,} more are in report.json or added up there.</p>" if hidden > 0 else ""
        columns = 6 if counted["has_tokens"] else 4
        heads = f"<th><th colspan=4>{escape(ends[0])}<th colspan={columns}>{escape(ends[1])}"
        names = "<th>documents<th>share<th>text<th>share"
        heads += f"<tr><th>{escape(key)}{names}{names}{'<th>tokens<th>share' * (columns == 6)}"
        parts.append(
            f"<h3>Shares by {escape(key)}</h3><div class=scroll><table><tr>"
            f"{heads}{''.join(rows)}</table></div>{more}"
        )
    return "".join(parts)


def _count(number: int) -> str:
    return f"{number:,}"


def share_of(part: int, total: int) -> str:
    """Return a share in percent."""
    return f"{100 * part / total:.1f} %" if total else ""


def size_of(number: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def escape(value: Any) -> str:
    """Return a value as text for HTML."""
    return html.escape(str(value))


def name_of(value: str) -> str:
    """Return a name, which may be divided between its words."""
    return escape(value).replace("_", "_<wbr>").replace(".", ".<wbr>")
