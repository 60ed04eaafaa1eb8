"""Where evaluations ended a run twice, nothing more is measured, and nothing else is left out."""

from types import SimpleNamespace

import pytest
import torch

from zerolm.evaluate.attempts import Begun
from zerolm.evaluate.evaluator import LOSS, Evaluations


def test_what_was_begun_and_not_ended_is_known_to_every_later_start(tmp_path) -> None:
    begun = Begun(tmp_path)
    assert begun.settle() is None
    begun.begin(5, 500, "loss")
    begun.end()
    assert not (tmp_path / "evaluation_begun.json").exists()
    begun.begin(5, 500, "piqa")
    entry = {"step": 5, "tokens": 500, "what": "piqa"}
    for left in (entry, None, None):
        again = Begun(tmp_path)
        assert again.settle() == left and again.failed == [entry]
        again.begin(3, 300, "loss")
        again.end()
    again.begin(6, 600, "loss")
    last = Begun(tmp_path)
    assert last.settle()["step"] == 6 and [each["step"] for each in last.failed] == [5, 6]
    assert last.given_up() == {}
    last.begin(6, 600, "piqa")
    third = Begun(tmp_path)
    third.settle()
    assert third.given_up() == {6: 600}
    (tmp_path / "evaluation_begun.json").write_text('{"be')
    assert Begun(tmp_path).settle() is None


class Log:
    def __init__(self) -> None:
        self.events: list = []

    def event(self, event, step, **what) -> None:
        self.events.append((event, step, what))

    def has(self, step, key) -> bool:
        return False

    def sampled_tokens(self) -> int:
        return 0


@pytest.fixture
def group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def evaluations(run_dir, zero_stage: int) -> Evaluations:
    """What a start has, with a validation loss that fails."""
    engine = SimpleNamespace(
        global_rank=0, world_size=1, device=torch.device("cpu"), eval=lambda: 0, train=lambda: 0
    )
    settings = SimpleNamespace(
        hellaswag=None, eval_tasks=[], prompts=None, eval_interval=1,
        downstream_interval=None,
    )  # fmt: skip
    profile = SimpleNamespace(zero_stage=zero_stage)
    plan = SimpleNamespace(settings=settings, run_dir=run_dir, profile=profile, val_sources=[1])
    found = Evaluations(plan, engine, "cpu", {}, lambda *_: None)

    def fail(progress, log) -> None:
        raise MemoryError("a forward pass")

    found.validate = fail
    return found


def test_an_evaluation_that_ends_the_run_is_tried_once_more(tmp_path, group) -> None:
    def begin(step: int) -> None:
        start.begin(log, step)
        progress = SimpleNamespace(step=step, tokens=100 * step)
        start.if_due(progress, log, lambda interval: True, lambda: None)

    log = Log()
    for _ in range(2):
        start = evaluations(tmp_path, zero_stage=3)
        with pytest.raises(MemoryError):
            begin(4)
    start = evaluations(tmp_path, zero_stage=3)
    begin(4)
    again = {"evaluation": LOSS, "error": "the run ended in it, again at this step"}
    assert log.events == [
        ("evaluation_interrupted", 4, {"evaluation": LOSS}),
        ("evaluation_failed", 4, again),
    ]
    assert start.sampled_tokens == 400, "no samples are made up for what was left out"
    with pytest.raises(MemoryError):
        begin(5)


def test_a_rank_of_its_own_goes_on_after_a_failed_forward_pass(tmp_path, group) -> None:
    log, start = Log(), evaluations(tmp_path, zero_stage=2)
    start.begin(log, 4)
    progress = SimpleNamespace(step=4, tokens=400)
    start.if_due(progress, log, lambda interval: True, lambda: None)
    assert log.events[0][2]["error"] == "MemoryError: a forward pass"
    assert not (tmp_path / "evaluation_begun.json").exists()
