"""The coefficients of a merge, and what the merge command refuses."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.zerolm.checkpoint.written_checkpoints import write
from zerolm.__main__ import main
from zerolm.export.merge import ema_coefficients, mean_coefficients, wsm_coefficients
from zerolm.optim.schedule import DECAY_SHAPES, LearningRate
from zerolm.run_dir.files import MANIFEST

EVEN = [1000, 1100, 1200, 1300, 1400]
UNEVEN = [1000, 1010, 1300, 1310, 1400]
# Integrals from 0 of the three shapes.
INTEGRALS = {
    "linear": lambda x: x - x**2 / 2,
    "cosine": lambda x: x / 2 + math.sin(math.pi * x) / (2 * math.pi),
    "sqrt": lambda x: x - 2 / 3 * x**1.5,
}


@pytest.mark.parametrize("tokens", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("shape", sorted(DECAY_SHAPES))
def test_wsm_implies_the_mean_of_the_decay_over_each_interval(shape, tokens) -> None:
    coefficients = wsm_coefficients(tokens, DECAY_SHAPES[shape])
    assert math.isclose(sum(coefficients), 1.0) and min(coefficients) >= 0.0
    implied = np.cumsum(coefficients[::-1])[::-1][1:]  # of each update between two checkpoints
    done = (np.array(tokens) - tokens[0]) / (tokens[-1] - tokens[0])
    whole = np.array([INTEGRALS[shape](x) for x in done])
    np.testing.assert_allclose(implied, np.diff(whole) / np.diff(done), atol=2e-4)


def test_wsm_of_a_linear_decay_is_the_trapezoid_rule() -> None:
    found = wsm_coefficients(EVEN, DECAY_SHAPES["linear"])
    np.testing.assert_allclose(found, [1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8], atol=1e-12)


@pytest.mark.parametrize(("schedule", "shape"), [("wsd", "linear"), ("cosine", "cosine")])
def test_shapes_are_those_of_the_schedules(schedule, shape) -> None:
    curve = LearningRate(schedule, 1.0, 0.0, 0, 400, 400)
    for tokens in (0, 100, 250, 400):
        assert curve(tokens) == DECAY_SHAPES[shape](tokens / 400)


def test_ema_coefficients_are_those_of_its_recursion() -> None:
    decay, values = 0.7, np.array([2.0, -1.0, 5.0, 3.0])
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    assert math.isclose(np.dot(ema_coefficients(EVEN[:4], decay), values), average)
    assert mean_coefficients(EVEN) == [0.2] * 5


def edit(checkpoint: Path, **changes: object) -> None:
    """Rewrite a manifest, with its digest."""
    from zerolm.checkpoint.manifest import manifest_digest

    path = checkpoint / MANIFEST
    manifest = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({**manifest, "digest": manifest_digest(manifest)}))


def test_every_problem_is_reported_at_once_and_nothing_is_written(tmp_path, capsys) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    for step in (100, 200, 300):
        config = {"model_type": "llama", "hidden_size": 64 if step < 300 else 32, "use_cache": step}
        edit(write(run, step, tokens=min(step, 200)), model_config=config)

    def refused(*arguments: object) -> str:
        assert main(["merge", *map(str, arguments)]) == 2
        assert not out.exists() and not list(tmp_path.glob(".*"))
        return capsys.readouterr().err

    error = refused(f"{run}@150,200,x", f"{run}@400:", tmp_path / "none", out)
    assert "no complete checkpoint of step 150. It has checkpoints of steps: 100, 200, 300" in error
    assert "'x' is not a step" in error and "of step 400:." in error and "none" in error
    error = refused(run, out)
    assert "hidden_size: 32, but 64 in" in error and "use_cache" not in error
    assert "step 200" not in error
    assert "have the same number of tokens" in refused(run, out, "--method", "wsm")
    assert "a merge needs at least two" in refused(f"{run}@100", out)
    assert "is listed twice" in refused(f"{run}@:200", f"{run}@100", out)
    error = refused(run, out, "--method", "ema", "--decay_shape", "sqrt")
    assert (
        "needs --ema_decay" in error and "--decay_shape sqrt: applies only to --method wsm" in error
    )
    assert "below 1" in refused(run, out, "--method", "ema", "--ema_decay", "1.5")
    (run / "checkpoints" / "step-00000100" / "model.pt").write_bytes(b"other")
    assert "the manifest says" in refused(f"{run}@:200", out)
    (run / "checkpoints" / "step-00000200" / MANIFEST).write_text("{")
    assert "step-00000200" in refused(f"{run}@200", out)
    out.write_text("")
    assert main(["merge", f"{run}@:200", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
