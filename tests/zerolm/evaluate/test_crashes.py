"""Evaluation is skipped at a step where it has crashed the run twice, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.launching import LLAMA
from zerolm.distributed.layout import Layout
from zerolm.evaluate.crashes import EvaluationAttempts
from zerolm.evaluate.evaluator import Evaluations
from zerolm.evaluate.samples import Samples
from zerolm.parts.settings import RunSettings


def test_every_later_launch_knows_the_attempts_that_crashed(tmp_path) -> None:
    attempts = EvaluationAttempts(tmp_path)
    assert attempts.load() is None
    attempts.start(5, 500, "loss")
    attempts.finish()
    assert not (tmp_path / "evaluation_begun.json").exists()
    attempts.start(5, 500, "piqa")
    crashed = {"step": 5, "tokens": 500, "what": "piqa"}
    for expected in (crashed, None, None):
        later = EvaluationAttempts(tmp_path)
        assert later.load() == expected and later.crashed == [crashed]
        later.start(3, 300, "loss")
        later.finish()
    later.start(6, 600, "loss")
    last = EvaluationAttempts(tmp_path)
    assert last.load()["step"] == 6 and [each["step"] for each in last.crashed] == [5, 6]
    assert last.disabled_steps() == {}
    last.start(6, 600, "piqa")
    third = EvaluationAttempts(tmp_path)
    third.load()
    assert third.disabled_steps() == {6: 600}
    (tmp_path / "evaluation_begun.json").write_text('{"be')
    assert EvaluationAttempts(tmp_path).load() is None


class Log:
    def __init__(self) -> None:
        self.events: list = []

    def event(self, event, step, **what) -> None:
        self.events.append((event, step, what))

    def has(self, step, key) -> bool:
        return False

    writes = True

    def sampled_tokens(self) -> int:
        return 0


@pytest.fixture
def group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def evaluations(run_dir, zero_stage: int) -> Evaluations:
    """Return evaluations whose validation loss raises an error."""
    engine = SimpleNamespace(
        global_rank=0, world_size=1, device=torch.device("cpu"), eval=lambda: 0, train=lambda: 0
    )
    settings = RunSettings(
        val_data=("shards",), eval_interval=1, micro_batch_size=1, seq_len=8, total_tokens=1000
    )
    plan = SimpleNamespace(
        settings=settings, run_dir=run_dir, ds=SimpleNamespace(zero_stage=zero_stage),
        model=SimpleNamespace(config=AutoConfig.for_model(**LLAMA)), layout=Layout(1),
        val_sources=[], val_source_names=[], val_sequences=1,
    )  # fmt: skip
    created = Evaluations(plan, engine, "cpu", {}, (), lambda *_: None)

    def fail(runner, step) -> None:
        raise MemoryError("a forward pass")

    created.evaluations[0].measure = fail
    created.evaluations.append(Samples(settings))
    return created


def test_an_evaluation_that_crashes_the_run_is_retried_once(tmp_path, group) -> None:
    def resume_at(step: int) -> None:
        launch.restore(log, step)
        progress = SimpleNamespace(step=step, tokens=100 * step)
        launch.run_due(progress, log, lambda interval: True, lambda: None)

    log = Log()
    for _ in range(2):
        launch = evaluations(tmp_path, zero_stage=3)
        with pytest.raises(MemoryError):
            resume_at(4)
    launch = evaluations(tmp_path, zero_stage=3)
    resume_at(4)
    error = "the run crashed twice during evaluation of this step; skipping it"
    assert log.events == [
        ("evaluation_interrupted", 4, {"evaluation": "loss"}),
        ("evaluation_failed", 4, {"evaluation": "loss", "error": error}),
    ]
    assert launch.evaluations[1].sampled_tokens == 400, "skipped samples are not made up for"
    with pytest.raises(MemoryError):
        resume_at(5)


def test_a_single_rank_continues_after_a_failed_forward_pass(tmp_path, group) -> None:
    log, launch = Log(), evaluations(tmp_path, zero_stage=2)
    launch.restore(log, 4)
    progress = SimpleNamespace(step=4, tokens=400)
    launch.run_due(progress, log, lambda interval: True, lambda: None)
    assert log.events[0][2]["error"] == "MemoryError: a forward pass"
    assert not (tmp_path / "evaluation_begun.json").exists()
