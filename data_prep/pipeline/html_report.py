"""Renders a pipeline's report, from `data_prep.pipeline.report`, as an HTML page.

The page is rendered from the template `report.html`; this module computes the bars of its
histograms.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from data_prep.files.documents import Problem
from data_prep.formats import describe_reason
from data_prep.read.bad_input import describe_changes, describe_skipped
from zerolm.report.page import page

TEMPLATE = Path(__file__).with_name("report.html")

Bar = tuple[str, str, list[tuple[str, int]]]  # label, title, counts by CSS class


def render(report: Mapping[str, Any]) -> str:
    """Render a report as an HTML page."""
    sources = report["sources"].values()
    return page(
        TEMPLATE,
        title=f"{report['recipe'].get('file')}: data",
        report=report,
        num_tokens=sum(part["num_tokens"] for each in sources for part in each["shards"].values()),
        text_bytes=sum(each["stages"][0]["text_bytes_in"] for each in sources if each["stages"]),
        as_json=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        bad_examples=bad_examples,
        describe_changes=describe_changes,
        divided=divided,
        length_bars=length_bars,
        not_read=not_read,
        share=share,
        size=size,
    )


def not_read(reading: Mapping[str, Any]) -> dict[str, int]:
    """Count the input that was not read as documents; return {description: count}."""
    bad = {describe_reason(key): number for key, number in reading.get("bad", {}).items()}
    return describe_skipped(reading.get("skipped", {})) | bad


def bad_examples(reading: Mapping[str, Any]) -> list[dict[str, str]]:
    problems = [Problem(*each) for each in reading["bad_examples"]]
    return [{"id": problem.place, "text": problem.detail} for problem in problems]


def length_bars(counts: Mapping[str, int]) -> list[Bar]:
    """Return a histogram of document sizes, with one bar for each power of two."""
    low, high = min(map(int, counts)), max(map(int, counts))
    sizes = [0] if low == 0 else []
    step = max(low, 1)
    while step <= high:
        sizes.append(step)
        step *= 2
    bars: list[Bar] = []
    for each in sizes:
        number = counts.get(str(each), 0)
        title = f"{size(each)} to {size(2 * each)}: {number:,} documents"
        bars.append((size(each), title, [("kept", number)]))
    return bars


def share(part: int, total: int) -> str:
    """Format part / total as a percentage; return "" if the total is 0."""
    return f"{100 * part / total:.1f} %" if total else ""


def size(number: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def divided(name: str) -> Markup:
    """Return a name as HTML that allows line breaks between its words."""
    return escape(name).replace("_", Markup("_<wbr>")).replace(".", Markup(".<wbr>"))
