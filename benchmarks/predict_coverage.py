"""Measures how often the interval of `zerolm predict` contains the loss, on simulated ladders.

    python -m benchmarks.predict_coverage --output benchmarks/results/predict_coverage.md

A ladder consists of losses from a known law with normal noise relative to the loss. Its target has
four times the parameters and tokens of the largest run, and a loss with the same noise.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks.machine import processor
from benchmarks.tables import parser, show, table
from launch.estimate.scaling import BESIROGLU, LossFit
from launch.experiments.law import Fitted, Observed

LADDERS, NOISES, FARTHER = 200, (0.001, 0.005, 0.02), 4.0
SMALL = LossFit("small models", 1.5, 60.0, 200.0, 0.4, 0.4)
SIZES, TOKENS = (5e7, 2e8, 8e8), (1e9, 4e9, 1.6e10)
Shape = list[tuple[float, float]]
KINDS: dict[str, tuple[LossFit, Shape]] = {
    "Besiroglu et al., 3 sizes x 3": (BESIROGLU, [(n, d) for n in SIZES for d in TOKENS]),
    "small models, 4 sizes x 3": (
        SMALL, [(n, d) for n in (2e4, 6e4, 1.8e5, 5e5) for d in (1e6, 4e6, 1.6e7)],
    ),
    "Besiroglu et al., 7 sizes, 20 tokens per parameter": (
        BESIROGLU, [(n, 20 * n) for n in np.geomspace(2e7, 1.3e9, 7)],
    ),
}  # fmt: skip


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    rows = list(measured())
    head = ["ladder", "noise", "holds the loss", "median half width", "median error",
            "not to be trusted"]  # fmt: skip
    about = (
        f"{LADDERS} simulated ladders in each row, each with a target of {FARTHER:g} times the "
        f"parameters and the tokens of its largest run. The intervals are 80% intervals. `not to "
        f"be trusted`: share of the ladders with that notice from `zerolm predict`."
    )
    show([about, table(head, rows)], processor(), arguments.output)


def measured() -> Iterator[list[str]]:
    for name, (law, shape) in KINDS.items():
        for noise in NOISES:
            yield [name, f"{noise:.1%}", *coverage(law, shape, noise, LADDERS)[1]]


def coverage(law: LossFit, shape: Shape, noise: float, ladders: int) -> tuple[float, list[str]]:
    """Return the share of the intervals that contain the target's loss, and a row of figures."""
    generator = np.random.default_rng(round(noise * 1000))
    held, halves, errors, distrusted = list[bool](), list[float](), list[float](), list[bool]()
    size, tokens = FARTHER * max(n for n, _ in shape), FARTHER * max(d for _, d in shape)
    for _ in range(ladders):
        noisy = np.exp(noise * generator.standard_normal(len(shape) + 1))
        points = [Observed(n, d, law.loss(n, d) * each)
                  for (n, d), each in zip(shape, noisy, strict=False)]  # fmt: skip
        fitted, loss = Fitted.of(points), law.loss(size, tokens) * float(noisy[-1])
        found = fitted.predict(size, tokens)
        held.append(found.low <= loss <= found.high)
        halves.append((found.high - found.low) / 2 / loss)
        errors.append(abs(found.loss / loss - 1))
        distrusted.append(bool(fitted.implausible()))
    share = float(np.mean(held))
    return share, [f"{share:.1%}", f"{np.median(halves):.1%}", f"{np.median(errors):.1%}",
                   f"{np.mean(distrusted):.1%}"]  # fmt: skip


if __name__ == "__main__":
    main()
