"""How often a run will read each of its sources: the table that is printed, and what is too often.

Counts of zerolm/order.py, laid beside what there is. Pure.
"""

from collections.abc import Sequence

from zerolm.mixture import Mixture
from zerolm.order import Order, exact_shares
from zerolm.settings import REDISTRIBUTE, WARN, Settings
from zerolm.skipped import Windows, counts
from zerolm.values import count, parse_number


def cap_problems(
    mixture: Mixture,
    order: Order,
    names: Sequence[str],
    total_sequences: int,
    settings: Settings,
) -> tuple[list[str], list[str]]:
    """Return what is wrong with the length of a run for its mixture, and what is only notable."""
    problems = [
        f"{settings.where('data_stage')}: {spec}, begins at or after the end of the run, "
        f"{count(total_sequences * (settings.seq_len or 1))} tokens. Remove it, or train longer."
        for spec in settings.data_stage
        if parse_number(spec.partition(":")[0]) >= total_sequences * (settings.seq_len or 1)
    ]
    where, tokens = settings.where("max_epochs"), settings.seq_len or 1
    if mixture.supply is not None and mixture.supply < total_sequences:
        problems.append(
            f"{where}: {', '.join(settings.max_epochs)}, leaves {mixture.supply * tokens:,} tokens "
            f"for a run of {total_sequences * tokens:,}. Raise it, add data, or train on fewer "
            f"tokens."
        )
    lines = []
    taken, windows = order.counts(total_sequences).tolist(), order.num_windows.tolist()
    for name, cap, sequences, size in zip(names, mixture.caps, taken, windows, strict=True):
        if cap is None or sequences <= cap * size or settings.over_max_epochs == REDISTRIBUTE:
            continue
        lines.append(
            f"{where}: {float(cap):g}, source {name} would be read {sequences / size:.4g} times "
            f"({sequences * tokens:,} tokens of {size * tokens:,}). Lower its weight or the length "
            f"of the run, raise --max_epochs {name}=N, or say --over_max_epochs redistribute or "
            f"warn."
        )
    return (problems, lines) if settings.over_max_epochs == WARN else (problems + lines, [])


def left_out_notices(
    mixture: Mixture,
    order: Order,
    names: Sequence[str],
    end: int,
    skipped_windows: Windows,
    settings: Settings,
) -> list[str]:
    """Return what is notable of sources that stand in for windows that a rollback left out.

    Args:
        end: the position at which the run ends; it takes sequences behind this number for those
            that it left out, of which the plan before the run knew nothing.
    """
    if not len(skipped_windows):
        return []
    left_out = sum(stop - start for start, stop in skipped_windows)
    taken = counts(order, end, skipped_windows).tolist()
    return [
        f"{settings.where('max_epochs')}: {float(cap):g}, source {name} will be read "
        f"{sequences / size:.4g} times, since {left_out:,} sequences that rollbacks left out are "
        f"made up for behind the plan's end"
        for name, cap, sequences, size in zip(
            names, mixture.caps, taken, order.num_windows.tolist(), strict=True
        )
        if cap is not None and sequences > cap * size
    ]


def table(
    mixture: Mixture, order: Order, names: Sequence[str], total_sequences: int, seq_len: int
) -> list[str]:
    """Return the plan of epochs, a line a source: what it has, its share in each stage of the run,
    what is taken of it there, the epochs, the cap."""
    stages = [stage for stage in mixture.stages if stage.start < total_sequences]
    edges = [stage.start for stage in stages] + [total_sequences]
    taken = [order.counts(edge) for edge in edges]
    several = len(stages) > 1
    rows = [["source", "tokens"]]
    for start in edges[:-1]:
        since = f" from {count(start * seq_len)}" if several else ""
        rows[0] += [f"share{since}", "epochs"] if several else [f"share{since}"]
    rows[0] += ["taken", "epochs", "at most"]
    shares = [exact_shares(stage.weights, may_rest=True) for stage in stages]
    for number, (name, size) in enumerate(zip(names, order.num_windows.tolist(), strict=True)):
        row = [name, f"{size * seq_len:,}"]
        for stage, share in enumerate(shares):
            row.append(f"{float(share[number]):.3%}" if share[number] else "-")
            if several:
                row.append(f"{(taken[stage + 1] - taken[stage])[number] / size:.3g}")
        row += [f"{taken[-1][number] * seq_len:,}", f"{taken[-1][number] / size:.3g}"]
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
