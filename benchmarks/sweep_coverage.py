"""Measures how often the interval of `zerolm sweep` contains the true optimum, on simulated sweeps.

    python -m benchmarks.sweep_coverage --output benchmarks/results/sweep_coverage.md

A sweep has five learning rates, a factor of two apart. The loss is a parabola over their logarithm
(or half as steep below the optimum), with a random optimum between the second and fourth rate, and
normal noise relative to the loss. In half of the sweeps the largest rates blow up without ending
the run: from a random multiple of the optimum on, each run has a loss of 6.5 to 7.5 nats.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks.machine import processor
from benchmarks.tables import parser, show, table
from launch.experiments.optimum import find_optimum

SWEEPS, NOISES, SEEDS = 1000, (0.001, 0.005, 0.02), (1, 2, 3)
RATES = np.array([5e-4, 1e-3, 2e-3, 4e-3, 8e-3])
LEAST, RISE = 3.3, 0.05  # loss at the optimum; its rise a factor of e away
BLOWS_UP = (1.4, 4.0)  # range of the rate from which runs blow up, relative to the optimum


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    rows = list(measured())
    head = ["curve", "blows up", "noise", "seeds", "interval", "holds the optimum", "median width",
            "median error of the optimum"]  # fmt: skip
    about = (
        f"{SWEEPS:,} simulated sweeps in each row. `interval`: share of the sweeps with an "
        f"interval; the others have one seed, or a best value at the edge of the values that "
        f"could be fitted. The intervals are 90% intervals; their width and the error of the "
        f"optimum are factors."
    )
    show([about, table(head, rows)], processor(), arguments.output)


def measured() -> Iterator[list[str]]:
    for curve in ("parabola", "half as steep below"):
        for blows_up in (False, True):
            for noise in NOISES:
                for seeds in SEEDS:
                    yield [curve, "yes" if blows_up else "no", f"{noise:.1%}", str(seeds),
                           *coverage(curve, blows_up, noise, seeds)]  # fmt: skip


def coverage(curve: str, blows_up: bool, noise: float, seeds: int) -> list[str]:
    generator = np.random.default_rng([seeds, round(noise * 1000), blows_up, len(curve)])
    held, widths, errors = list[bool](), list[float](), list[float]()
    for _ in range(SWEEPS):
        best = float(np.exp(generator.uniform(*np.log(RATES[[1, 3]]))))
        found = find_optimum(simulated(generator, best, curve, blows_up, noise, seeds))
        assert found is not None
        errors.append(abs(np.log(found.value / best)))
        if found.interval is not None:
            low, high = found.interval
            assert low <= found.measured <= high
            held.append(low <= best <= high)
            widths.append(np.log(high / low))
    share = f"{np.mean(held):.1%}" if held else "-"
    width = f"{np.exp(np.median(widths)):.2f}" if held else "-"
    return [f"{len(held) / SWEEPS:.0%}", share, width, f"{np.exp(np.median(errors)):.3f}"]


def simulated(
    generator: np.random.Generator,
    best: float,
    curve: str,
    blows_up: bool,
    noise: float,
    seeds: int,
) -> dict[float, list[float]]:
    """Return a sweep's losses by learning rate."""
    away = np.log(RATES / best)
    rise = RISE * away**2
    if curve != "parabola":
        rise[away < 0] /= 2
    means = (LEAST + rise)[:, None] * (1 + noise * generator.standard_normal((len(RATES), seeds)))
    if blows_up:
        from_rate = best * np.exp(generator.uniform(*np.log(BLOWS_UP)))
        high = from_rate < RATES
        means[high] = generator.uniform(6.5, 7.5, means[high].shape)
    return {float(rate): list(map(float, row)) for rate, row in zip(RATES, means, strict=True)}


if __name__ == "__main__":
    main()
