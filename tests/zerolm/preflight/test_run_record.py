"""The progress of a run after it resumes with another data order."""

import dataclasses

from zerolm.checkpoint.manifest import Progress
from zerolm.parts.settings import RunSettings
from zerolm.preflight.run_record import LEGACY_DEFAULTS, Difference, _same, _weights, carry_over

ORDER = {"seq_len": 512, "seed": 1, "weights": [0.7, 0.3], "data_fingerprint": "a"}
PROGRESS = Progress(
    step=10, position=641, tokens=320_000, skipped_windows=[[50, 60]], history={"losses": [2.0]}
)


def test_same_order_keeps_the_progress() -> None:
    assert carry_over(PROGRESS, ORDER, {**ORDER, "weights": (0.7, 0.3)}) == PROGRESS


def test_another_sequence_length_keeps_the_tokens_and_rounds_up() -> None:
    longer = carry_over(PROGRESS, ORDER, {**ORDER, "seq_len": 1024})
    assert longer.position == 321 and longer.position * 1024 >= 641 * 512
    assert carry_over(PROGRESS, ORDER, {**ORDER, "seq_len": 256}).position == 2 * 641
    assert (longer.step, longer.tokens) == (10, 320_000)


def test_another_order_drops_skipped_windows_and_history() -> None:
    for change in ({"seed": 2}, {"data_fingerprint": "b"}, {"weights": [0.5, 0.5]}):
        progress = carry_over(PROGRESS, ORDER, {**ORDER, **change})
        assert progress.position == PROGRESS.position
        assert progress.skipped_windows == [] and progress.history == {}


def test_settings_that_an_old_record_lacks_were_off_as_they_are_by_default() -> None:
    defaults = {each.name: each.default for each in dataclasses.fields(RunSettings)}
    differing = {name for name, value in LEGACY_DEFAULTS.items() if defaults[name] != value}
    assert differing == set(), "an old run would train on otherwise"


def test_stage_that_has_not_started_may_change() -> None:
    """The checkpoint is at sequence 651: ten windows were left out before it."""
    old = {**ORDER, "stages": [[704, [0.1, 0.9]]]}
    for blends in ([[704, [1, 1]]], [[768, [0.1, 0.9]]], []):
        assert carry_over(PROGRESS, old, {**ORDER, "stages": blends}) == PROGRESS
    assert (
        carry_over(PROGRESS, old, ORDER) == PROGRESS
        and carry_over(PROGRESS, ORDER, old) == PROGRESS
    )
    started = {**ORDER, "stages": [[128, [0.1, 0.9]]]}
    progress = carry_over(PROGRESS, started, {**ORDER, "stages": [[128, [0.2, 0.8]]]})
    assert progress.skipped_windows == [] and progress.position == PROGRESS.position
    assert (
        carry_over(PROGRESS, old, {**ORDER, "stages": [[660, [0.1, 0.9]]]}).history == {}
    )  # cuts a block


def test_values_are_compared_as_json_has_them() -> None:
    pairs = [((1, 2), [1, 2]), (1, 1.0), ({1: [0.5]}, {"1": [0.5]}), (None, None)]
    for new, old in pairs:
        assert _same(old, new)
        assert _same({"a": {"b": old}}, {"a": {"b": new}})
    for old, new in (
        (None, {"a": 1}), ({"a": 1}, None), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}), ([1, 2], (1, 3)), ({}, []), ({"a": {"b": 1}}, {"a": {}}),
    ):  # fmt: skip
        assert not _same(old, new) and not _same({"x": old}, {"x": new}), (old, new)


def test_weights_of_sources_are_compared_as_shares_where_all_have_one() -> None:
    assert _weights(["a=7", "b=3"]) == _weights(["a=0.7", "b=0.3"]) == [0.7, 0.3]
    assert _weights(["a", "b"]) == [None, None], "they follow the sizes"
    assert _weights(["a=x", "b=3"]) == [None, None]


def test_a_difference_is_one_printable_line() -> None:
    damaged = Difference("ds_config.data_types.grad_accum_dtype", "a\x00b\n", "fp32", "")
    assert str(damaged) == r'ds_config.data_types.grad_accum_dtype: "a\u0000b\n" -> fp32'
    assert str(Difference("settings.seed", 1, 2, "")) == "settings.seed: 1 -> 2"
