"""Figures of token shards, shown: lines for a terminal, a picture, a page of both."""

import base64
import html
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zerolm.values import count

Figures = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;
color:#222;background:#fff}table{border-collapse:collapse;margin:1rem 0}td,th{text-align:right;
padding:.2rem .6rem;border-bottom:1px solid #ddd;white-space:nowrap}
td:first-child,th:first-child{text-align:left;padding-left:0}h2{overflow-wrap:anywhere}
.scroll{overflow-x:auto}.scroll img{min-width:46rem;max-width:100%}.ids span{white-space:nowrap;
display:inline-block;margin-right:.7rem}code{background:#f3f3f3;padding:0 .2rem}"""


def lines(found: Sequence[Figures]) -> Iterator[str]:
    """Yield what a terminal shows of the figures of `data_prep.stats.measure`."""
    for figures in found:
        length, ids, twice = figures["length"], figures["ids"], figures["duplicates"]
        quantiles = ", ".join(
            f"{float(share):.0%} {tokens:,}" for share, tokens in length["quantiles"].items()
        )
        yield f"{figures['shards']}:"
        yield (
            f"    documents      {figures['num_documents']:,}, {figures['num_tokens']:,} tokens"
            + (f", {figures['bytes_per_token']:.3f} bytes a token" if figures["bytes_per_token"]
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
                    f"({limit['documents'] / figures['num_documents']:.2%}), "
                    f"{limit['of_tokens'] / figures['num_tokens']:.2%} of the tokens"
                )
        yield (
            f"    ids            {ids['unused']:,} of {ids['vocab_size']:,} unused; "
            f"{ids['half_of_tokens']:,} ids are half of the tokens"
            + (f"; Zipf exponent {ids['zipf_exponent']:.2f}" if ids["zipf_exponent"] else "")
        )
        if ids["eos_inside_documents"]:
            yield f"    EOS            {ids['eos_inside_documents']:,} inside of documents"
        yield (
            f"    duplicates     {twice['again']:,} documents ({twice['share']:.2%}) are copies of "
            f"another one, in {twice['groups']:,} groups"
        )
        for repeat in twice["most_repeated"][:3]:
            yield f"                   {repeat['times']:,} times: document {repeat['document']}"


def picture(found: Sequence[Figures]) -> bytes:
    """Return a PNG: documents and tokens by length, and frequencies of ids by rank."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure = Figure(figsize=(14, 4.2), layout="constrained", dpi=110)
    axes = figure.subplots(1, 3)
    names = _names(found)
    for name, figures in zip(names, found, strict=True):
        for axis, column, total in ((axes[0], 1, "num_documents"), (axes[1], 2, "num_tokens")):
            bins = _octave_quarters(figures["length"]["histogram"])
            shares = [row[column] / figures[total] for row in bins]
            axis.step([row[0] for row in bins], shares, where="post", label=name)
        ranks, times = zip(*figures["ids"]["by_rank"], strict=True)
        axes[2].plot(ranks, [many / figures["num_tokens"] for many in times], label=name)
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


def _octave_quarters(histogram: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return a histogram with bins four times as wide, and an empty one at its end."""
    rows: list[list[float]] = []
    for number, (edge, documents, tokens) in enumerate(histogram):
        if number % 4 == 0:
            rows.append([edge, 0, 0])
        rows[-1][1] += documents
        rows[-1][2] += tokens
    return [*rows, [rows[-1][0] * 2**0.25, 0, 0]]


def _names(found: Sequence[Figures]) -> list[str]:
    short = [figures["shards"].rstrip("/").rpartition("/")[2] for figures in found]
    return short if len(set(short)) == len(short) else [figures["shards"] for figures in found]


def page(found: Sequence[Figures], decoders: Sequence[Decode | None]) -> str:
    """Return an HTML page that loads nothing.

    Args:
        decoders: of each source's ids; None where there is no tokenizer beside its shards.
    """
    image = base64.b64encode(picture(found)).decode()
    rows = ["source", "documents", "tokens", "bytes a token", "mean length", "median", "longest",
            "unused ids", "EOS inside", "copies"]  # fmt: skip
    table = "".join(f"<th>{name}</th>" for name in rows)
    for name, figures in zip(_names(found), found, strict=True):
        length, ids, twice = figures["length"], figures["ids"], figures["duplicates"]
        bytes_each = figures["bytes_per_token"]
        cells = [name, f"{figures['num_documents']:,}", f"{figures['num_tokens']:,}",
                 f"{bytes_each:.3f}" if bytes_each else "-", f"{length['mean']:,.1f}",
                 f"{length['quantiles']['0.5']:,}", f"{length['longest']:,}",
                 f"{ids['unused']:,} of {ids['vocab_size']:,}", f"{ids['eos_inside_documents']:,}",
                 f"{twice['again']:,} ({twice['share']:.2%})"]  # fmt: skip
        table += "</tr><tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    body = f'<div class=scroll><img alt="histograms" src="data:image/png;base64,{image}"></div>'
    body += f"<div class=scroll><table><tr>{table}</tr></table></div>" + "".join(
        _section(name, figures, decode)
        for name, figures, decode in zip(_names(found), found, decoders, strict=True)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Token shards</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style><h1>Token shards</h1>{body}</html>\n"
    )


def _section(name: str, figures: Figures, decode: Decode | None) -> str:
    tokens, documents = figures["num_tokens"], figures["num_documents"]
    longer = "".join(
        f"<tr><td>{limit['tokens']:,}</td><td>{limit['documents']:,}</td>"
        f"<td>{limit['documents'] / documents:.2%}</td><td>{limit['of_tokens'] / tokens:.2%}</td>"
        for limit in figures["length"]["longer_than"]
    )
    frequent = " ".join(
        f"<span><code>{html.escape(_text(each['id'], decode))}</code> "
        f"{each['times'] / tokens:.2%}</span>"
        for each in figures["ids"]["most_frequent"]
    )
    repeats = "".join(
        f"<tr><td>document {each['document']}</td><td>{each['times']:,} times</td>"
        for each in figures["duplicates"]["most_repeated"]
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
