"""Which checkpoint a run is rolled back to, and when it gives up instead."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.zerolm.upload.published import publish
from zerolm.checkpoint.manifest import Progress
from zerolm.common.errors import GaveUp
from zerolm.config.settings import Settings
from zerolm.optim.spikes import COOL_DOWN, GIVE_UP, ROLL_BACK, History, Policy, SpikeGuard
from zerolm.train import recovery, resume

STEP, SEQUENCES = 33, 8  # the step after which a rollback is planned, and the size of each batch


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def run_dir(tmp_path: Path, process_group: None) -> Path:
    for step in (10, 20, STEP):
        publish(tmp_path, step)
    return tmp_path


def guard_after(*anomalies: int, applied: bool = False, **policy: int) -> SpikeGuard:
    """Return the guard of a run whose loss was NaN in these steps."""
    guard = SpikeGuard(Policy(**policy), History())
    for step in anomalies:
        guard.check_loss(math.nan)
        guard.end_step(step, math.nan, 1.0, applied)
    return guard


def plan(run_dir: Path, guard: SpikeGuard, response: str | None, rollbacks: int = 0, rank: int = 0):
    run = SimpleNamespace(
        spike_guard=guard, anomaly_response=response, run_dir=run_dir, rank=rank,
        progress=Progress(step=STEP, position=STEP * SEQUENCES, rollbacks=rollbacks),
        settings=Settings(rollback_margin=2, max_rollbacks=5, max_skips=guard.policy.max_skips),
        plan=SimpleNamespace(batch_schedule=lambda _: SEQUENCES),
        finish_checkpoint=lambda: None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "position_after", lambda plan, found: found.progress.position)
        patch.setattr(recovery.run_record, "data_order", lambda plan: {"seed": 1})
        return recovery.plan_rollback(run)


def test_a_rollback_is_to_before_the_first_anomaly_of_the_window(run_dir) -> None:
    guard = guard_after(5, 31, STEP, window=20)
    entry = plan(run_dir, guard, ROLL_BACK, rollbacks=4)
    assert entry["checkpoint"] == "step-00000020" and entry["number"] == 5
    assert entry["skipped_window"] == [(31 - 1 - 2) * SEQUENCES, STEP * SEQUENCES]
    assert entry["reason"] == "train/loss is nan."
    assert entry["order"] == {"seed": 1}
    assert plan(run_dir, guard, ROLL_BACK, rank=1) is None, "only rank 0 reads the disk"
    assert plan(run_dir, guard, COOL_DOWN) is plan(run_dir, guard, None) is None


def test_a_run_without_an_older_checkpoint_continues_while_steps_may_be_refused(run_dir) -> None:
    assert plan(run_dir, guard_after(5, STEP), ROLL_BACK) is None


@pytest.mark.parametrize(
    ("guard", "response", "rollbacks", "why"),
    [
        (
            guard_after(31, STEP), ROLL_BACK, 5,
            "train/loss is nan. The limit --max_rollbacks 5 is reached. The last good checkpoint "
            "is {run_dir}/checkpoints/step-00000020. ",
        ),
        (
            guard_after(21, STEP, max_skips=2), GIVE_UP, 0,
            "train/loss is nan. The limit --max_skips 2 in 1000 steps is reached. The last good "
            "checkpoint is {run_dir}/checkpoints/step-00000020. ",
        ),
        (
            guard_after(), GIVE_UP, 0,
            "40 consecutive fp16 overflows. The last good checkpoint is "
            "{run_dir}/checkpoints/step-00000020. ",
        ),
        (
            guard_after(5, STEP, max_skips=2), ROLL_BACK, 0,
            "train/loss is nan. No checkpoint predates the spike. The last good checkpoint "
            "is {run_dir}/checkpoints/step-00000033. ",
        ),
        (
            guard_after(5, STEP, applied=True), ROLL_BACK, 0,
            "train/loss is nan. No checkpoint predates the spike. The last good checkpoint "
            "is {run_dir}/checkpoints/step-00000033. ",
        ),
    ],
)  # fmt: skip
def test_a_run_that_cannot_recover_names_the_limit_and_the_last_good_checkpoint(
    run_dir, guard, response, rollbacks, why
) -> None:
    with pytest.raises(GaveUp) as gave_up:
        plan(run_dir, guard, response, rollbacks)
    assert str(gave_up.value).startswith(f"step {STEP}: {why.format(run_dir=run_dir)}A lower")


def test_a_run_that_loses_its_weights_before_the_first_checkpoint_says_so(
    tmp_path, process_group
) -> None:
    with pytest.raises(GaveUp, match=r"predates the spike\. There is no checkpoint\. A lower"):
        plan(tmp_path, guard_after(STEP, applied=True), ROLL_BACK)
