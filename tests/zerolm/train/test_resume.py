"""The progress from which a run continues after loading a checkpoint."""

from pathlib import Path

from zerolm.checkpoint.directory import Checkpoint
from zerolm.checkpoint.manifest import Progress
from zerolm.run_dir.records import Rollback
from zerolm.train.resume import continued

OLD = {"seq_len": 32, "seed": 1, "weights": [1.0], "data_fingerprint": "a"}
OTHER_SEED = {**OLD, "seed": 2}
LATER_STAGE = {**OLD, "weights": [0.5, 0.5], "stages": [[128, [0.25, 0.75]]]}


def checkpoint(order: dict, **more) -> Checkpoint:
    progress = vars(Progress(step=10, position=80, tokens=2560, **more))
    return Checkpoint(Path("step-00000010"), {"progress": progress, "order": order})


def entry(number: int, window: list[int], **more) -> Rollback:
    return {
        "number": number, "from_step": 20, "to_step": 10, "skipped_steps": 0, "spikes": 2,
        "skipped_windows": [window], **more,
    }  # fmt: skip


def test_a_rollback_to_a_checkpoint_of_another_order_skips_its_data() -> None:
    recorded = entry(1, [120, 136], order=OTHER_SEED)
    progress = continued(checkpoint(OLD), [recorded], OTHER_SEED)
    assert (progress.position, progress.rollbacks) == (80, 1)
    assert progress.skipped_windows == [[120, 136]]


def test_a_rollback_into_a_stage_that_was_changed_before_it_began_skips_its_data() -> None:
    found = checkpoint({**LATER_STAGE, "stages": [[128, [0.75, 0.25]]]})
    recorded = entry(1, [136, 152], order=LATER_STAGE)
    assert continued(found, [recorded], LATER_STAGE).skipped_windows == [[136, 152]]


def test_another_order_drops_what_rollbacks_before_it_skip_and_keeps_the_others() -> None:
    longer = {**OTHER_SEED, "seq_len": 64}
    before, after = entry(1, [120, 136], order=OLD), entry(2, [60, 70], order=longer)
    progress = continued(checkpoint(OLD, skipped_windows=[[8, 16]]), [before, after], longer)
    assert (progress.position, progress.rollbacks) == (40, 2)
    assert progress.skipped_windows == [[60, 70]] and progress.history == {"anomalies": []}
    assert continued(checkpoint(OLD), [before], longer).skipped_windows == []


def test_a_rollback_of_an_early_release_has_the_order_of_the_checkpoint() -> None:
    recorded = entry(1, [120, 136])
    assert continued(checkpoint(OLD), [recorded], OLD).skipped_windows == [[120, 136]]
    assert continued(checkpoint(OLD), [recorded], OTHER_SEED).skipped_windows == []
