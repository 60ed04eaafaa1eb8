"""Resuming a run with changed settings: which are allowed, refused, or need --accept_changes."""

import pytest

from tests.launching import LLAMA, write_json
from tests.zerolm.preflight.preflight_inputs import PROFILES, command, refusal, write_record
from zerolm.optim.schedule import SCHEDULES
from zerolm.preflight import check, run_record


def test_with_a_router_loss_micro_batch_and_world_size_cannot_change(inputs, tmp_path):
    change = f"--run_dir {tmp_path} --model_config mixtral.json --micro_batch_size 2"
    write_record(tmp_path, check.check(command(inputs, change), {}))
    check.check(command(inputs, change), {})
    other = change.replace("size 2", "size 4")
    (problem,) = refusal(inputs, other)
    assert "settings.micro_batch_size: 2 -> 4" in problem
    (problem,) = refusal(inputs, change, WORLD_SIZE="2")
    assert "world_size: 1 -> 2 (output_router_logits)" in problem


def test_disk_too_small_for_one_checkpoint_is_refused_and_for_all_reported(inputs, tmp_path):
    keep = check.check(command(inputs, "--checkpoint_keep 1000000000"), {})
    assert any("its file system has" in notice for notice in keep.notices)
    assert keep.derived["checkpoint size"]
    huge = {**LLAMA, "hidden_size": 1 << 20, "intermediate_size": 1 << 24}
    model = write_json(tmp_path / "huge.json", huge)
    (problem,) = refusal(inputs, f"--model_config {model}")
    assert "a checkpoint needs about" in problem and "TiB" in problem and "--run_dir" in problem


@pytest.fixture
def a_run(inputs, tmp_path):
    """A run directory with the run.json of the good command."""
    write_record(tmp_path, check.check(command(inputs, f"--run_dir {tmp_path}"), {}))
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        "",
        "--micro_batch_size 1 --num_workers 2 --log_interval 3 --checkpoint_interval 7",
        f"--deepspeed_config {PROFILES / 'zero3.json'}",
        "--val_data val",
    ],
)
def test_settings_that_do_not_affect_the_curve_may_change(inputs, a_run, change):
    check.check(command(inputs, f"--run_dir {a_run} {change}".strip()), {})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("--seed 1", ["settings.seed: 0 -> 1 (command line: --seed). "]),
        ("--learning_rate 0.5", ["settings.learning_rate", "0.5", "settings.min_learning_rate"]),
        ("--total_tokens 102400", ["settings.total_tokens: 51200", "102400"]),
        ("--data code", ["data_fingerprint"]),
        ("--model_config dropout.json", ["model_config.attention_dropout", "0.1"]),
        ("--deepspeed_config fp32.json", ["ds_config precision: bf16", "fp32", "clipping: 1.0"]),
    ],
)
def test_changes_that_affect_the_curve_are_refused(inputs, a_run, change, parts):
    text = "\n".join(refusal(inputs, f"--run_dir {a_run} {change}"))
    for part in parts:
        assert part in text
    assert f"{a_run}/run.json: " in text and "another --run_dir" in text


@pytest.mark.parametrize("kind", SCHEDULES)
def test_only_a_schedule_that_ignores_the_total_can_be_extended(inputs, tmp_path, kind):
    change = f"--run_dir {tmp_path} --schedule {kind} --learning_rate 1e-3 --warmup_tokens 512"
    change += " --decay_tokens 5k" if SCHEDULES[kind].uses_decay_tokens else ""
    write_record(tmp_path, check.check(command(inputs, change), {}))
    longer = f"{change} --total_tokens 102400"
    if not SCHEDULES[kind].needs_total:
        assert check.check(command(inputs, longer), {}).total_steps == 200
    else:
        (problem,) = refusal(inputs, longer)
        assert f"a {kind} schedule depends on it" in problem


def test_changes_that_affect_the_curve_are_allowed_if_accepted(inputs, a_run):
    change = f"--run_dir {a_run} --seed 1 --seq_len 16 --data code --accept_changes"
    plan = check.check(command(inputs, change), {})
    assert plan.changed["settings.seed"] == (0, 1)
    assert set(plan.changed) == {"settings.seed", "settings.seq_len", "data_fingerprint"}
    assert f"note: changed since {a_run}/run.json: settings.seed: 0 -> 1" in plan.summary()
    assert "accept_changes" not in plan.settings.to_json(), "it is no standing permission"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("--model_config dropout.json", "attention_dropout: 0.0 -> 0.1 (--model_config), cannot"),
        ("--deepspeed_config fp32.json", "precision: bf16 -> fp32 (--deepspeed_config), cannot"),
    ],
)
def test_changes_that_invalidate_the_states_are_refused_even_if_accepted(
    inputs, a_run, change, part
):
    (problem,) = refusal(inputs, f"--run_dir {a_run} {change} --accept_changes")
    assert part in problem and "--accept_changes" not in problem


def test_settings_from_run_json_give_the_same_plan(inputs, a_run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("replay")
    first = check.check(command(inputs, f"--run_dir {a_run}"), {})
    words = ["--settings", str(a_run / "run.json"), "--run_dir", str(elsewhere)]
    again = check.check(words, {})
    assert again.profile == first.profile
    old, new = first.settings.to_json(), again.settings.to_json()
    assert {key for key in old if old[key] != new[key]} == {"run_dir"}


def test_a_checkpoint_records_the_order_of_the_data_and_later_stages_if_there_are_any(inputs):
    plan = check.check(command(inputs, "--seed 7"), {})
    assert run_record.data_order(plan) == {
        "seq_len": plan.settings.seq_len, "packing": plan.settings.packing, "seed": 7,
        "weights": [20_000.0], "data_fingerprint": plan.data_fingerprint,
    }  # fmt: skip
