"""Renders the report of a pipeline, made by `data_prep.pipeline.report`, as an HTML page."""

import json
from collections.abc import Mapping
from typing import Any

from data_prep.pipeline.html_quality import escape, name_of, scores, share_of, shares, size_of
from data_prep.read.bad_input import describe_changes
from data_prep.read.documents import BAD_REASONS, Problem, describe_skipped

STYLE = """
:root { --ink: #1c2733; --soft: #5b6b7b; --line: #dde3ea; --kept: #2a7f62; --dropped: #c8553d;
  --wash: #f5f7f9 }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); margin: 0 auto; max-width: 1080px;
  padding: 24px 20px 60px }
h1 { font-size: 26px; margin: 0 } h2 { margin: 44px 0 8px; border-top: 2px solid var(--ink);
  padding-top: 10px } h3 { margin: 24px 0 6px; font-size: 16px }
p, .soft { color: var(--soft) } p { margin: 4px 0 12px }
p, h1, h2, h3, summary { overflow-wrap: anywhere }
.scroll { overflow-x: auto; background: linear-gradient(270deg, #fff 40%, #fff0) right / 40px 100%
  no-repeat local, linear-gradient(270deg, #1c273338, #1c273300) right / 14px 100% no-repeat }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; white-space: nowrap }
th { color: var(--soft); font-weight: 600; font-size: 13px }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.bar { display: flex; height: 14px; min-width: 160px; background: var(--wash) }
.bar i { background: var(--kept) } .bar b { background: var(--dropped) }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 8px 32px }
.example { border-left: 3px solid var(--dropped); padding: 2px 10px; margin: 8px 0;
  overflow-wrap: anywhere; white-space: pre-wrap; font: 13px/1.45 ui-monospace, monospace }
.example span { color: var(--soft); display: block }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font-size: 11px }
pre { background: var(--wash); padding: 12px; overflow-x: auto; font-size: 12px }
details { margin: 10px 0 } summary { cursor: pointer; font-weight: 600 }
@media (max-width: 600px) { body { padding: 16px 14px 40px } summary { line-break: anywhere }
  th, td { padding: 5px 6px; font-size: 13px } .bar { min-width: 70px }
  td:first-child { white-space: normal; overflow-wrap: break-word; min-width: 90px } }
"""


def render(report: Mapping[str, Any]) -> str:
    """Return the HTML page for a report."""
    parts = [_header(report)]
    for name, source in report["sources"].items():
        parts.append(f"<h2>{escape(name)}</h2>")
        parts += [_funnel(source), _packing(source), shares(source), _lengths(source)]
        parts += [scores(source), _reasons(source), _times(source)]
        inputs = source["provenance"].get("inputs", [])
        shown = json.dumps({**source["provenance"], "recipe": "below"}, indent=2)
        parts.append(
            f"<details><summary>Provenance: {len(inputs):,} input files, versions</summary>"
            f"<pre>{escape(shown)}</pre></details>"
        )
    if "tokenizer" in report:
        parts.append(_tokenizer(report["tokenizer"]))
    shown = json.dumps(report["recipe"].get("content"), indent=2, ensure_ascii=False)
    parts.append(f"<h2>Recipe</h2><p>sha256 {escape(report['recipe'].get('sha256'))}</p>")
    parts.append(f"<pre>{escape(shown)}</pre>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(report['recipe'].get('file'))}: data</title><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _header(report: Mapping[str, Any]) -> str:
    sources = report["sources"].values()
    tokens = sum(part["num_tokens"] for each in sources for part in each["shards"].values())
    read = sum(each["stages"][0]["text_bytes_in"] for each in sources if each["stages"])
    summary = f"{len(report['sources']):,} sources, {size_of(read)} of text in"
    summary += f", {tokens:,} tokens out" if tokens else ""
    return f"<h1>{escape(report['recipe'].get('file'))}</h1><p>{summary}</p>"


def _funnel(source: Mapping[str, Any]) -> str:
    """Return the table of stages; bars show shares of the documents that the first stage read."""
    stages = source["stages"]
    if not stages:
        return "<p>No stage is complete.</p>"
    first = max(stages[0]["documents_in"], 1)
    rows = []
    for stage in stages:
        num_in, num_out = stage["documents_in"], stage["documents_out"]
        kept, dropped = 100 * num_out / first, 100 * (num_in - num_out) / first
        rows.append(
            f"<tr><td>{stage['stage']}<td>{num_in:,}<td>{num_out:,}<td>{share_of(num_out, num_in)}"
            f"<td>{size_of(stage['text_bytes_in'])}<td>{size_of(stage['text_bytes_out'])}"
            f"<td>{_estimate(stage, 'in')}<td>{_estimate(stage, 'out')}"
            f'<td><div class=bar title="of all documents read"><i style="width:{kept:.3f}%"></i>'
            f'<b style="width:{dropped:.3f}%"></b></div>'
        )
    for name, shards in source["shards"].items():
        rows.append(
            f"<tr><td>{name}<td>{shards['num_documents']:,}<td>{shards['num_documents']:,}<td>"
            f"<td>{size_of(shards['text_bytes'])}<td><td><td>{shards['num_tokens']:,}<td>"
        )
    note = ""
    if "estimated_tokens_per_byte" in source:
        note = (
            f"<p>Tokens with ~ are estimated from bytes, using "
            f"{1 / source['estimated_tokens_per_byte']:.3f} bytes per token as in the shards. "
            f"The tokens of the shards are counted.</p>"
        )
    return (
        "<h3>Documents through the stages</h3><div class=scroll><table><tr><th>stage<th>in<th>kept"
        "<th>share<th>text in<th>text out<th>tokens in<th>tokens out"
        f"<th>green kept, red dropped{''.join(rows)}</table></div>{note}"
    )


def _estimate(stage: Mapping[str, Any], end: str) -> str:
    tokens = stage.get(f"estimated_tokens_{end}")
    return "" if tokens is None else f"~{tokens:,}"


def _packing(source: Mapping[str, Any]) -> str:
    rows = []
    for name, packed in source["packing"].items():
        shards = source["shards"][name]
        for way in packed["efficiency"]:
            ids = way["rows"] * (packed["seq_len"] + 1)
            rows.append(
                f"<tr><td>{escape(name)}, {escape(way['packing'])}<td>{packed['seq_len']:,}"
                f"<td>{way['rows']:,}<td>{share_of(way['padding'], ids)}"
                f"<td>{share_of(way['cut_documents'], shards['num_documents'])}"
                f"<td>{share_of(way['cut_tokens'], shards['num_tokens'])}"
            )
    if not rows:
        return ""
    return (
        "<h3>Packing</h3><div class=scroll><table><tr><th>shards<th>seq_len<th>rows"
        "<th>padding<th>documents cut<th>tokens in cut documents"
        f"{''.join(rows)}</table></div>"
    )


def _tokenizer(report: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(name)}<td>{escape(each['bytes_per_token'])}"
        for name, each in report["sources"].items()
    ]
    return (
        f"<h2>Tokenizer</h2><p>Trained on the documents that all sources keep; "
        f"{report['vocab_size']:,} ids.</p><div class=scroll><table><tr><th>source"
        f"<th>bytes per token{''.join(rows)}</table></div>"
    )


def _reasons(source: Mapping[str, Any]) -> str:
    parts = []
    for stage in source["stages"]:
        parts += [_read(stage), _dropped(stage)]
        for key, what in (("changed", "changed"), ("tags", "kept with a tag")):
            if stage.get(key):
                counts = ", ".join(f"{escape(name)} {n:,}" for name, n in stage[key].items())
                parts.append(f"<p>Documents {what} in {stage['stage']}: {counts}</p>")
    return "".join(parts)


def _read(stage: Mapping[str, Any]) -> str:
    """Return what was not read as a document and where, and what was decoded or repaired."""
    reading = stage.get("reading", {})
    counts = describe_skipped(reading.get("skipped", {}))
    counts |= {BAD_REASONS.get(key, key): n for key, n in reading.get("bad", {}).items()}
    parts = []
    if counts:
        rows = "".join(f"<tr><td>{escape(what)}<td>{count:,}" for what, count in counts.items())
        parts.append(
            f"<h3>Not read as documents</h3><div class=scroll><table><tr><th>what<th>number{rows}"
            f"</table></div>"
        )
    examples = [Problem(*each) for each in reading.get("bad_examples", [])]
    if examples:
        shown = "".join(
            f"<div class=example><span>{escape(each.place)}</span>{escape(each.detail)}</div>"
            for each in examples
        )
        parts.append(f"<details><summary>Examples of bad input</summary>{shown}</details>")
    if changed := reading.get("changed"):
        parts.append(f"<p>Documents {escape(', '.join(describe_changes(changed)))}</p>")
    return "".join(parts)


def _dropped(stage: Mapping[str, Any]) -> str:
    dropped = stage["dropped"]
    if not dropped:
        return f"<h3>Dropped in {stage['stage']}</h3><p>Nothing.</p>"
    highest = max(dropped.values())
    rows, examples = [], []
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        rows.append(
            f"<tr><td>{name_of(reason)}<td>{count:,}<td>{share_of(count, stage['documents_in'])}"
            f"<td>{size_of(stage['dropped_bytes'].get(reason, 0))}"
            f'<td><div class=bar><b style="width:{100 * count / highest:.2f}%"></b></div>'
        )
        shown = "".join(
            f"<div class=example><span>{escape(each['id'])}</span>{escape(each['text'])}</div>"
            for each in stage["examples"].get(reason, [])
        )
        examples.append(f"<details><summary>{escape(reason)}</summary>{shown}</details>")
    return (
        f"<h3>Dropped in {stage['stage']}</h3><div class=scroll><table><tr><th>reason<th>documents"
        f"<th>share<th>text<th>{''.join(rows)}</table></div>"
        f"<h3>Examples of documents that {stage['stage']} dropped</h3>{''.join(examples)}"
    )


def _lengths(source: Mapping[str, Any]) -> str:
    stages = source["stages"]
    if not stages:
        return ""
    pairs = (
        ("read", stages[0]["lengths_in"]),
        ("kept by the last stage", stages[-1]["lengths_out"]),
    )
    charts = "".join(
        f"<div><p>{name}: {sum(counts.values()):,} documents, {max(counts.values(), default=0):,} "
        f"in the highest bar</p>{_histogram({int(k): v for k, v in counts.items()})}</div>"
        for name, counts in pairs
    )
    return f"<h3>Bytes per document</h3><div class=grid>{charts}</div>"


def _histogram(counts: Mapping[int, int]) -> str:
    """Return an SVG histogram; each bin covers sizes from a power of two to the next."""
    if not counts:
        return "<p>No documents.</p>"
    low, high = min(counts), max(counts)
    bins = [0] if low == 0 else []
    step = max(low, 1)
    while step <= high:
        bins.append(step)
        step *= 2
    highest, width = max(counts.values()), 420 / len(bins)
    marks = []
    for number, size in enumerate(bins):
        count = counts.get(size, 0)
        height, left = 120 * count / highest, 4 + number * width
        marks.append(
            f'<rect x="{left:.1f}" y="{130 - height:.1f}" width="{width - 2:.1f}" '
            f'height="{height:.1f}" fill="#2a7f62"><title>{size_of(size)} to {size_of(2 * size)}: '
            f"{count:,} documents</title></rect>"
        )
        if number % -(-len(bins) // 6) == 0:
            marks.append(f'<text x="{left:.1f}" y="145">{size_of(size)}</text>')
    return f'<svg viewBox="0 0 430 150" role=img>{"".join(marks)}</svg>'


def _times(source: Mapping[str, Any]) -> str:
    rows = []
    for stage in source["stages"]:
        for phase in stage["tasks"]:
            slowest = ", ".join(
                f"{each['task']} ({each['seconds']:.1f} s)" for each in phase["slowest"][:3]
            )
            seconds = sorted(phase["seconds"])
            rows.append(
                f"<tr><td>{name_of(phase['phase'])}<td>{phase['num_tasks']:,}"
                f"<td>{phase['wall_seconds']:,.1f}<td>{phase['task_seconds']:,.1f}"
                f"<td>{seconds[len(seconds) // 2]:.2f}<td>{escape(slowest)}"
                f"<td>{len(phase['hosts']):,}"
            )
    if not rows:
        return ""
    return (
        "<h3>Time</h3><div class=scroll><table><tr><th>phase<th>tasks<th>wall seconds"
        "<th>task seconds<th>median task<th>slowest tasks<th>hosts"
        f"{''.join(rows)}</table></div>"
    )
