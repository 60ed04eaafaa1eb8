"""Fits the step time of `zerolm plan` to published benchmarks, and judges the fit.

    python -m benchmarks.published_runs.fit

It prints the errors, and the fitted numbers as lines of runs.json.

Fitted are `COSTS` of launch/estimate/step_time.py and the attained share of the peak of each group
of devices and years, to the logarithm of tokens per second. Sources that are not `fitted` only
judge the result (benchmarks/results/published_runs.md). Every other source has the same weight,
however many rows it has, and large errors count less (soft L1). Mixtures of experts are predicted,
but not fitted: two rows of one implementation say little about others. Two errors are printed:

    10-fold          each row is predicted by a fit to the other nine tenths of the rows
    leave-one-out    the rows of a source are predicted by a fit to the other sources; a group of
                     devices that no other source has takes the share of the group named in OTHERS
"""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from benchmarks import require, tables
from benchmarks.published_runs.rows import Benchmark, read
from launch.estimate.step_time import COSTS, Costs

FOLDS, SEED = 10, 0
ERROR_SCALE = 0.05  # errors below count quadratically
LARGEST_WEIGHT = 5.0  # of a row, relative to the mean
NAMES = [field.name for field in dataclasses.fields(Costs) if field.name != "experts"]
BOUNDS = {"fp8": (0.3, 1.0)}  # of the others: 0 to 30
OTHERS = {
    "A100, 2023": "Hopper, 2025",
    "H100, 2023": "Hopper, 2025",
    "H100 of 500 W, 2024": "Hopper, 2025",
    "Hopper, 2025": "Blackwell, 2025",
    "Blackwell, 2025": "Hopper, 2025",
}


def split(values: Sequence[float], groups: Sequence[str]) -> tuple[dict[str, float], Costs]:
    shares = dict(zip(groups, values, strict=False))
    return shares, Costs(**dict(zip(NAMES, values[len(groups) :], strict=True)))


def errors(values: Sequence[float], rows: Sequence[Benchmark], groups: Sequence[str]) -> np.ndarray:
    shares, costs = split(values, groups)
    return np.log([row.predict(shares, costs) / row.reported for row in rows])


def fit(
    rows: Sequence[Benchmark], groups: Sequence[str], start: np.ndarray | None = None
) -> np.ndarray:
    """Return the attained shares of the groups, then the costs; experts do not count."""
    rows = [row for row in rows if not row.run.routed_flops]
    sources = [row.entry["source"] for row in rows]
    weights = np.array([len(rows) / len(set(sources)) / sources.count(each) for each in sources])
    weights = np.sqrt(np.minimum(weights, LARGEST_WEIGHT))
    limits = [BOUNDS.get(name, (0.0, 30.0)) for name in NAMES]
    begin = (
        [0.6] * len(groups) + [getattr(COSTS, name) for name in NAMES] if start is None else start
    )
    low, high = zip(*([(0.2, 1.0)] * len(groups) + limits), strict=True)
    inside = np.clip(begin, np.array(low) + 1e-6, np.array(high) - 1e-6)
    from scipy.optimize import least_squares  # not of the run's own requirements

    return least_squares(
        lambda values: weights * errors(values, rows, groups),
        inside, bounds=(low, high), loss="soft_l1", f_scale=ERROR_SCALE, xtol=1e-3, ftol=1e-4,
    ).x  # fmt: skip


def ten_fold(rows: list[Benchmark], groups: Sequence[str], start: np.ndarray) -> np.ndarray:
    """Return each row's error from a fit without the row; `start` saves iterations."""
    order = np.random.default_rng(SEED).permutation(len(rows))
    found = np.zeros(len(rows))
    for fold in range(FOLDS):
        left_out = order[fold::FOLDS]
        kept = [rows[each] for each in order if each not in set(left_out)]
        found[left_out] = errors(
            fit(kept, groups, start), [rows[each] for each in left_out], groups
        )
    return found


def leave_one_out(rows: list[Benchmark], groups: Sequence[str]) -> dict[str, np.ndarray]:
    """Return each source's errors from a fit to the other sources."""
    found = {}
    for source in dict.fromkeys(row.entry["source"] for row in rows):
        kept = [row for row in rows if row.entry["source"] != source]
        fitted = fit(kept, groups)
        values = dict(zip(groups, fitted, strict=False))
        known = {row.entry["attained"] for row in kept}
        for number, group in enumerate(groups):
            if group not in known:
                fitted[number] = values[OTHERS[group]]
        left_out = [row for row in rows if row.entry["source"] == source]
        found[source] = errors(fitted, left_out, groups)
    return found


def summary(found: np.ndarray) -> str:
    return f"median {np.median(abs(found)):.1%}, maximum {abs(found).max():.1%}"


def main() -> None:
    tables.parser(__doc__, has_table=False).parse_args()
    require("scipy")
    rows = [row for row in read()[0] if row.is_fitted]
    groups = list(dict.fromkeys(row.entry["attained"] for row in rows))
    fitted = fit(rows, groups)
    shares, costs = split(fitted, groups)
    print({name: round(float(getattr(costs, name)), 3) for name in NAMES})
    held_out, alone = ten_fold(rows, groups, fitted), leave_one_out(rows, groups)
    own = errors(fitted, rows, groups)
    print(f"fitted: {summary(own)}; 10-fold: {summary(held_out)}")
    sources = np.array([row.entry["source"] for row in rows])
    for source, left_out in alone.items():
        which = sources == source
        print(
            f"{source} ({which.sum()} rows): fitted {summary(own[which])}; "
            f"10-fold {summary(held_out[which])}; left out {summary(left_out)}"
        )
    reported = np.array([row.reported for row in rows])
    found = {
        "attained": {key: round(float(value), 3) for key, value in shares.items()},
        "held_out": np.round(np.exp(held_out) * reported).astype(int).tolist(),
        "left_out": {
            source: round(float(np.median(abs(each))), 3) for source, each in alone.items()
        },
    }
    for key, value in found.items():
        print(f'  "{key}": {json.dumps(value)},')


if __name__ == "__main__":
    main()
