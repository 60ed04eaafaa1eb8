"""How often a run reads each source: a table for display, and the `--max_epochs` check. Pure."""

from collections.abc import Sequence

from zerolm.common.values import count, parse_number
from zerolm.config.settings import REDISTRIBUTE, WARN, Settings
from zerolm.data.mixture import Mixture
from zerolm.data.order import Order
from zerolm.data.quotas import exact_shares
from zerolm.data.skips import SkippedRanges, source_counts


def times(number: float, digits: int = 3) -> str:
    """Return a number of epochs as text without an exponent: 0.5, 3.25, 21,700."""
    text = f"{number:.{digits}g}"
    return f"{number:,.0f}" if float(text) >= 1000 else text


def cap_problems(
    mixture: Mixture,
    order: Order,
    names: Sequence[str],
    total_sequences: int,
    settings: Settings,
) -> tuple[list[str], list[str]]:
    """Return problems and notices about blends and caps that do not fit the length of the run."""
    where, seq_len = settings.where("max_epochs"), settings.seq_len or 1
    problems = [
        f"{settings.where('data_stage')}: {spec} starts at or after the end of the run, "
        f"{count(total_sequences * seq_len)} tokens. Remove it, or train longer."
        for spec in settings.data_stage
        if parse_number(spec.partition(":")[0]) >= total_sequences * seq_len
    ]
    if mixture.supply is not None and mixture.supply < total_sequences:
        problems.append(
            f"{where}: {', '.join(settings.max_epochs)} leaves {mixture.supply * seq_len:,} "
            f"tokens for a run of {total_sequences * seq_len:,}. Raise it, add data, or train on "
            f"fewer tokens."
        )
    lines = []
    used, windows = order.counts(total_sequences).tolist(), order.num_windows.tolist()
    for name, cap, sequences, size in zip(names, mixture.caps, used, windows, strict=True):
        if cap is None or sequences <= cap * size or settings.over_max_epochs == REDISTRIBUTE:
            continue
        lines.append(
            f"{where}: {float(cap):g}: source {name} would be read {times(sequences / size, 4)} "
            f"times ({sequences * seq_len:,} tokens of {size * seq_len:,}). Lower its weight or "
            f"the length of the run, raise --max_epochs {name}=N, or use --over_max_epochs "
            f"redistribute or warn."
        )
    return (problems, lines) if settings.over_max_epochs == WARN else (problems + lines, [])


def skipped_data_notices(
    mixture: Mixture,
    order: Order,
    names: Sequence[str],
    end: int,
    skipped_windows: SkippedRanges,
    settings: Settings,
) -> list[str]:
    """Return a notice for each source that will exceed its cap because rollbacks skipped data.

    Args:
        end: the position at which the run ends. The sequences that replace skipped ones come after
            this position, so the check before the run could not count them.
    """
    if not len(skipped_windows):
        return []
    num_skipped = sum(stop - start for start, stop in skipped_windows)
    used = source_counts(order, end, skipped_windows).tolist()
    return [
        f"{settings.where('max_epochs')}: {float(cap):g}: source {name} will be read "
        f"{times(sequences / size, 4)} times, because {num_skipped:,} sequences that rollbacks "
        "skipped are replaced after the planned end"
        for name, cap, sequences, size in zip(
            names, mixture.caps, used, order.num_windows.tolist(), strict=True
        )
        if cap is not None and sequences > cap * size
    ]


def table(
    mixture: Mixture, order: Order, names: Sequence[str], total_sequences: int, seq_len: int
) -> list[str]:
    """Return the lines of a table of planned epochs, with one row per source.

    Columns: tokens in the source, its share (and epochs) in each blend of the run, total number of
    tokens read, total epochs, and the cap.
    """
    blends = [blend for blend in mixture.blends if blend.start < total_sequences]
    edges = [blend.start for blend in blends] + [total_sequences]
    taken = [order.counts(edge) for edge in edges]
    several = len(blends) > 1
    rows = [["source", "tokens"]]
    for start in edges[:-1]:
        since = f" from {count(start * seq_len)}" if several else ""
        rows[0] += [f"share{since}", "epochs"] if several else [f"share{since}"]
    rows[0] += ["taken", "epochs", "at most"]
    shares = [exact_shares(blend.weights, allow_zero=True) for blend in blends]
    for number, (name, size) in enumerate(zip(names, order.num_windows.tolist(), strict=True)):
        row = [name, f"{size * seq_len:,}"]
        for blend, share in enumerate(shares):
            row.append(f"{float(share[number]):.3%}" if share[number] else "-")
            if several:
                row.append(f"{times((taken[blend + 1] - taken[blend])[number] / size)}")
        row += [f"{taken[-1][number] * seq_len:,}", f"{times(taken[-1][number] / size)}"]
        cap = mixture.caps[number]
        rows.append([*row, "-" if cap is None else f"{float(cap):g}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
