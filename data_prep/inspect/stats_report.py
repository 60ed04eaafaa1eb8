"""Formats statistics of token shards as lines for a terminal, a plot, and an HTML report."""

import base64
import html
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerolm.common.values import count

Statistics = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;
color:#222;background:#fff}table{border-collapse:collapse;margin:1rem 0}td,th{text-align:right;
padding:.2rem .6rem;border-bottom:1px solid #ddd;white-space:nowrap}
td:first-child,th:first-child{text-align:left;padding-left:0}h2{overflow-wrap:anywhere}
.scroll{overflow-x:auto}.scroll img{min-width:46rem;max-width:100%}.ids span{white-space:nowrap;
display:inline-block;margin-right:.7rem}code{background:#f3f3f3;padding:0 .2rem}"""


def text_lines(sources: Sequence[Statistics]) -> Iterator[str]:
    """Yield the lines to print for the statistics that `measure_shards` returns."""
    for source in sources:
        length, ids, duplicates = source["length"], source["ids"], source["duplicates"]
        quantiles = ", ".join(
            f"{float(share):.0%} {tokens:,}" for share, tokens in length["quantiles"].items()
        )
        yield f"{source['shards']}:"
        yield (
            f"    documents      {source['num_documents']:,}, {source['num_tokens']:,} tokens"
            + (f", {source['bytes_per_token']:.3f} bytes per token" if source["bytes_per_token"]
               else "")
        )  # fmt: skip
        yield (
            f"    length         mean {length['mean']:,.1f}, {length['shortest']:,} to "
            f"{length['longest']:,} tokens (document {length['longest_document']})"
        )
        yield f"    quantiles      {quantiles}"
        for limit in length["longer_than"]:
            if limit["documents"]:
                yield (
                    f"    above {limit['tokens']:<8,} {limit['documents']:,} documents "
                    f"({limit['documents'] / source['num_documents']:.2%}), "
                    f"{limit['of_tokens'] / source['num_tokens']:.2%} of the tokens"
                )
        yield (
            f"    ids            {ids['unused']:,} of {ids['vocab_size']:,} unused; "
            f"{ids['half_of_tokens']:,} ids make up half of the tokens"
            + (f"; Zipf exponent {ids['zipf_exponent']:.2f}" if ids["zipf_exponent"] else "")
        )
        if ids["eos_inside_documents"]:
            yield f"    EOS            {ids['eos_inside_documents']:,} inside documents"
        yield (
            f"    duplicates     {duplicates['again']:,} documents ({duplicates['share']:.2%}) are "
            f"copies of another one, in {duplicates['groups']:,} groups"
        )
        for repeat in duplicates["most_repeated"][:3]:
            yield f"                   {repeat['times']:,} times: document {repeat['document']}"


def plot(sources: Sequence[Statistics]) -> bytes:
    """Return a PNG: histograms of documents and tokens by length, and token frequency by rank."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure = Figure(figsize=(14, 4.2), layout="constrained", dpi=110)
    axes = figure.subplots(1, 3)
    for name, source in zip(_names(sources), sources, strict=True):
        for axis, column, total in ((axes[0], 1, "num_documents"), (axes[1], 2, "num_tokens")):
            bins = _merge_bins(source["length"]["histogram"])
            shares = [row[column] / source[total] for row in bins]
            axis.step([row[0] for row in bins], shares, where="post", label=name)
        ranks, times = zip(*source["ids"]["by_rank"], strict=True)
        axes[2].plot(ranks, [number / source["num_tokens"] for number in times], label=name)
    titles = ("documents by their length", "tokens by the length of their document")
    for axis, title in zip(axes, titles, strict=False):
        axis.set(xscale="log", xlabel="tokens", title=f"Share of {title}", ylim=(0, None))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes[2].set(xscale="log", yscale="log", xlabel="rank", title="Share of tokens of each id")
    axes[2].xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _merge_bins(histogram: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return a histogram with bins four times as wide, and an empty bin at its end."""
    rows: list[list[float]] = []
    for number, (edge, documents, tokens) in enumerate(histogram):
        if number % 4 == 0:
            rows.append([edge, 0, 0])
        rows[-1][1] += documents
        rows[-1][2] += tokens
    return [*rows, [rows[-1][0] * 2**0.25, 0, 0]]


def _names(sources: Sequence[Statistics]) -> list[str]:
    """Return short names of the shard directories, or their paths if those are ambiguous."""
    short = [source["shards"].rstrip("/").rpartition("/")[2] for source in sources]
    if len(set(short)) == len(short):
        return short
    return [source["shards"] for source in sources]


def html_report(sources: Sequence[Statistics], decoders: Sequence[Decode | None]) -> str:
    """Return a self-contained HTML page.

    Args:
        decoders: for the ids of each source; None if there is no tokenizer beside its shards.
    """
    image = base64.b64encode(plot(sources)).decode()
    columns = ["source", "documents", "tokens", "bytes per token", "mean length", "median",
               "longest", "unused ids", "EOS inside", "copies"]  # fmt: skip
    table = "".join(f"<th>{name}</th>" for name in columns)
    for name, source in zip(_names(sources), sources, strict=True):
        length, ids, duplicates = source["length"], source["ids"], source["duplicates"]
        bytes_each = source["bytes_per_token"]
        cells = [name, f"{source['num_documents']:,}", f"{source['num_tokens']:,}",
                 f"{bytes_each:.3f}" if bytes_each else "-", f"{length['mean']:,.1f}",
                 f"{length['quantiles']['0.5']:,}", f"{length['longest']:,}",
                 f"{ids['unused']:,} of {ids['vocab_size']:,}", f"{ids['eos_inside_documents']:,}",
                 f"{duplicates['again']:,} ({duplicates['share']:.2%})"]  # fmt: skip
        table += "</tr><tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    body = f'<div class=scroll><img alt="histograms" src="data:image/png;base64,{image}"></div>'
    body += f"<div class=scroll><table><tr>{table}</tr></table></div>" + "".join(
        _section(name, source, decode)
        for name, source, decode in zip(_names(sources), sources, decoders, strict=True)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Token shards</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><h1>Token shards</h1>{body}</html>\n"
    )


def _section(name: str, source: Statistics, decode: Decode | None) -> str:
    tokens, documents = source["num_tokens"], source["num_documents"]
    longer = "".join(
        f"<tr><td>{limit['tokens']:,}</td><td>{limit['documents']:,}</td>"
        f"<td>{limit['documents'] / documents:.2%}</td><td>{limit['of_tokens'] / tokens:.2%}</td>"
        for limit in source["length"]["longer_than"]
    )
    frequent = " ".join(
        f"<span><code>{html.escape(_text(each['id'], decode))}</code> "
        f"{each['times'] / tokens:.2%}</span>"
        for each in source["ids"]["most_frequent"]
    )
    repeats = "".join(
        f"<tr><td>document {each['document']}</td><td>{each['times']:,} times</td>"
        for each in source["duplicates"]["most_repeated"]
    )
    shown = f"<h3>Most repeated documents</h3><table>{repeats}</table>" if repeats else ""
    return (
        f"<h2>{html.escape(name)}</h2>"
        f"<p>{count(tokens)} tokens in {count(documents)} documents.</p><h3>Long documents</h3>"
        f"<div class=scroll><table><tr><th>above</th><th>documents</th><th>of documents</th>"
        f"<th>of tokens</th></tr>"
        f"{longer}</table></div><h3>Most frequent ids</h3><p class=ids>{frequent}</p>{shown}"
    )


def _text(token_id: int, decode: Decode | None) -> str:
    if decode is None:
        return str(token_id)
    text = repr(decode([token_id]))[1:-1]
    spaces = len(text) - len(text.strip(" "))
    return f"{spaces} spaces" if spaces == len(text) > 3 else text.replace(" ", "␣")
