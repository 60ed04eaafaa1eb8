"""The runs that benchmarks/transfer wants next, and the best rates that it reads from losses."""

import json
import math

from benchmarks.transfer import optima
from benchmarks.transfer.__main__ import SEEDS, TOY, wanted
from benchmarks.transfer.optima import COMPLETEP, STANDARD, Run

CURVE = {-8: 3.0, -7: 2.0, -6: 2.5}
EDGE = {-8: 3.0, -7: 2.0, -6: 1.0}


def test_the_best_rate_is_the_vertex_of_a_parabola_unless_it_is_at_an_end() -> None:
    exact = {each: (each + 6.6) ** 2 for each in range(-9, -4)}
    assert math.isclose(optima.vertex(exact), -6.6)
    assert optima.vertex(EDGE) == -6.0 and optima.edges(EDGE, (-9, -5)) == [-5]
    assert optima.edges(EDGE, (-9, -6)) == [] == optima.edges(CURVE, (-9, -5))
    assert optima.vertex({-7: 1.0, -6: 0.5, -5: math.inf}) == -6.0


def test_seeds_follow_at_the_best_rate_and_rates_beyond_an_end(tmp_path) -> None:
    lines = {(*TOY.sizes[0], STANDARD): CURVE, (*TOY.sizes[0], COMPLETEP): EDGE}
    assert {run.line for run in wanted({}, TOY)} == {*lines, (*TOY.base, STANDARD)}
    losses = {Run(*line, at): loss for line, curve in lines.items() for at, loss in curve.items()}
    later = wanted(losses, TOY)[len(TOY.exponents) * 3 :]
    seeds = [Run(*TOY.sizes[0], STANDARD, -7, seed) for seed in SEEDS[1:]]
    assert later == [Run(*TOY.sizes[0], COMPLETEP, -5), *seeds]
    path = tmp_path / "runs.jsonl"
    rows = [json.dumps(run._asdict() | {"loss": loss}) for run, loss in losses.items()]
    path.write_text("\n".join([*rows, '{"torn']))
    assert optima.read(path) == losses
    assert len(optima.show(losses, TOY.base)) == 2
