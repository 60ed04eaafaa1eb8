"""Where a run is in its data after it goes on with another order."""

from zerolm.checkpoint.directory import Progress
from zerolm.preflight.run_record import carry_over

ORDER = {"seq_len": 512, "seed": 1, "weights": [0.7, 0.3], "data_fingerprint": "a"}
HERE = Progress(
    step=10, position=641, tokens=320_000, skipped_windows=[[50, 60]], history={"losses": [2.0]}
)


def test_the_same_order_keeps_everything() -> None:
    assert carry_over(HERE, ORDER, {**ORDER, "weights": (0.7, 0.3)}) == HERE


def test_another_sequence_length_keeps_the_tokens_and_rounds_up() -> None:
    longer = carry_over(HERE, ORDER, {**ORDER, "seq_len": 1024})
    assert longer.position == 321 and longer.position * 1024 >= 641 * 512
    assert carry_over(HERE, ORDER, {**ORDER, "seq_len": 256}).position == 2 * 641
    assert (longer.step, longer.tokens) == (10, 320_000)


def test_another_order_forgets_windows_of_the_old_one() -> None:
    for change in ({"seed": 2}, {"data_fingerprint": "b"}, {"weights": [0.5, 0.5]}):
        there = carry_over(HERE, ORDER, {**ORDER, **change})
        assert there.position == HERE.position
        assert there.skipped_windows == [] and there.history == {}


def test_a_stage_that_has_not_begun_may_change() -> None:
    """The checkpoint is at sequence 651: ten windows were left out before it."""
    old = {**ORDER, "stages": [[704, [0.1, 0.9]]]}
    for stages in ([[704, [1, 1]]], [[768, [0.1, 0.9]]], []):
        assert carry_over(HERE, old, {**ORDER, "stages": stages}) == HERE
    assert carry_over(HERE, old, ORDER) == HERE and carry_over(HERE, ORDER, old) == HERE
    begun = {**ORDER, "stages": [[128, [0.1, 0.9]]]}
    there = carry_over(HERE, begun, {**ORDER, "stages": [[128, [0.2, 0.8]]]})
    assert there.skipped_windows == [] and there.position == HERE.position
    assert (
        carry_over(HERE, old, {**ORDER, "stages": [[660, [0.1, 0.9]]]}).history == {}
    )  # cuts a block
