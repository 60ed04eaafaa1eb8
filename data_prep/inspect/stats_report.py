"""Formats statistics of token shards as lines for a terminal, a plot, and an HTML report."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.values import count
from zerolm.report.page import page

Statistics = dict[str, Any]
Decode = Callable[[Sequence[int]], str]

TEMPLATE = Path(__file__).with_name("stats.html")


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
        decoders: one per source; None if there is no tokenizer beside its shards.
    """
    texts = [
        [_text(each["id"], decode) for each in source["ids"]["most_frequent"]]
        for source, decode in zip(sources, decoders, strict=True)
    ]
    return page(
        TEMPLATE,
        title="Token shards",
        image=base64.b64encode(plot(sources)).decode(),
        sources=list(zip(_names(sources), sources, texts, strict=True)),
        short=count,
    )


def _text(token_id: int, decode: Decode | None) -> str:
    if decode is None:
        return str(token_id)
    text = repr(decode([token_id]))[1:-1]
    spaces = len(text) - len(text.strip(" "))
    return f"{spaces} spaces" if spaces == len(text) > 3 else text.replace(" ", "␣")
