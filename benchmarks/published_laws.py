"""Fit published losses with `zerolm predict`'s law, and predict the largest runs from small ones.

    python -m benchmarks.published_laws svg_extracted_data.csv

The file contains the losses of Hoffmann et al. 2022, read off their figure 4 by Besiroglu et al.
2024: https://github.com/epoch-research/analyzing-chinchilla, data/svg_extracted_data.csv.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from benchmarks.tables import table
from launch.estimate.scaling import BESIROGLU, LossFit
from launch.experiments.law import Fitted, Observed, fit

OUTLIERS = 5  # runs with the fewest tokens per parameter, which Besiroglu et al. also leave out
SMALL_FLOPS, LARGE_FLOPS, RUNGS, LADDERS = 1e20, 1e21, 12, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    points = sorted(read(parser.parse_args().file), key=lambda one: one.tokens / one.parameters)
    points = points[OUTLIERS:]
    laws = {"Besiroglu et al. 2024": BESIROGLU, f"here, {len(points)} runs": fit(points)}
    print(table(["fit", "E", "A", "alpha", "B", "beta"],
                [[name, *coefficients(law)] for name, law in laws.items()]))  # fmt: skip
    small = [one for one in points if flops(one) < SMALL_FLOPS]
    large = [one for one in points if flops(one) > LARGE_FLOPS]
    generator, errors, inside = np.random.default_rng(0), [], []
    for _ in range(LADDERS):
        chosen = [small[place] for place in generator.choice(len(small), RUNGS, replace=False)]
        fitted = Fitted.of(chosen)
        for one in large:
            found = fitted.predict(one.parameters, one.tokens)
            errors.append(found.loss / one.loss - 1)
            inside.append(found.low <= one.loss <= found.high)
    sizes = np.abs(errors)
    print(f"\n{LADDERS} ladders of {RUNGS} of the {len(small)} runs below {SMALL_FLOPS:.0e} FLOPs "
          f"predict each of the {len(large)} above {LARGE_FLOPS:.0e}: median error "
          f"{np.median(sizes):.1%}, 90% below {np.quantile(sizes, 0.9):.1%}; in the 80% interval "
          f"{np.mean(inside):.0%}")  # fmt: skip


def read(path: Path) -> list[Observed]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        size = float(row["Model Size"])
        found.append(Observed(size, float(row["Training FLOP"]) / 6 / size, float(row["loss"])))
    return found


def flops(one: Observed) -> float:
    return 6 * one.parameters * one.tokens


def coefficients(law: LossFit) -> list[str]:
    return [f"{law.entropy:.4f}", f"{law.model:.1f}", f"{law.alpha:.4f}", f"{law.data:.1f}",
            f"{law.beta:.4f}"]  # fmt: skip


if __name__ == "__main__":
    main()
