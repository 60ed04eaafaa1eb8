"""RunSettings: how they are read, and that every mistake in them is named at once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from zerolm.common.values import parse_number
from zerolm.config.settings import FIRST_FLAGS, split_weight
from zerolm.engine.launcher_options import LAUNCHER_FLAGS
from zerolm.parts.other_names import OTHER_NAMES
from zerolm.parts.parse import (
    add_all_settings,
    convert,
    help_text,
    parse_settings,
    short_help_text,
)
from zerolm.parts.settings import FLAGS, RunSettings


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3e9", 3 * 10**9),
        ("3B", 3 * 10**9),
        ("2.3b", 2_300_000_000),
        ("500M", 500 * 10**6),
        ("2k", 2000),
        ("1_000", 1000),
        ("3e-4", 3e-4),
        (0.25, 0.25),
        (7.0, 7),
    ],
)
def test_numbers_are_read_exactly(text, number):
    assert parse_number(text) == number
    assert type(parse_number(text)) is type(number)


@pytest.mark.parametrize("text", ["", "x", "1kk", True, None, "0x10"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match="is not a number"):
        parse_number(text)


@pytest.mark.parametrize("text", ["nan", "inf", "1e99999"])
def test_a_number_that_is_not_finite_is_refused(text):
    with pytest.raises(ValueError, match="is too large or not finite"):
        parse_number(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h50m", 13800), ("90s", 90), ("2d", 172800), ("45", 45), ("1.5h", 5400)]
)
def test_durations_are_seconds(text, seconds):
    settings, problems = parse_settings(["--stop_after", text])
    assert not problems and settings.stop_after == seconds


def test_flags_take_dashes_underscores_equals_and_negation():
    words = "--seq-len=128 --batch_tokens 4k --document-mask --no-compile --no_document_mask"
    settings, problems = parse_settings([*words.split(), "--local_rank=1"])
    assert not problems
    assert (settings.seq_len, settings.batch_tokens) == (128, 4000)
    assert settings.document_mask is False and settings.compile is False
    assert settings.explicit == {"seq_len", "batch_tokens", "document_mask", "compile"}
    assert settings.local_rank == 1


def test_sources_repeat_and_carry_weights():
    settings, _ = parse_settings(["--data", "shards/web=0.7", "--data=shards/code"])
    assert [split_weight(source) for source in settings.data] == [
        ("shards/web", 0.7),
        ("shards/code", None),
    ]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--batch_tokns 4096", ["--batch_tokns", 'Did you mean "--batch_tokens"?']),
        ("--learning-rat 1", ['Did you mean "--learning_rate"?']),
        ("--seq 64", ["--seq", "no such flag"]),  # no abbreviations
        ("64", ["64", "not a flag"]),
        ("--run_dir", ["--run_dir", "has no value", "PATH"]),
        ("--run_dir --compile", ["--run_dir", "has no value"]),
        ("--schedule cosin", ["--schedule: cosin", "wsd", 'Did you mean "cosine"?']),
        ("--seq_len 12.5", ["--seq_len: 12.5", "whole number"]),
        ("--seq_len 0", ["--seq_len: 0", "at least 1"]),
        ("--beta2 1", ["--beta2: 1", "below 1"]),
        ("--learning_rate -1", ["--learning_rate: -1", "at least 0"]),
        ("--stop_after 3x", ["--stop_after: 3x", "3h50m"]),
        ("--stop_after 0", ["--stop_after: 0", "at least 1"]),
        ("--profile 3:2", ["--profile: 3:2", "first and the last step"]),
        ("--profile 0", ["--profile: 0", "from 1"]),
        ("--profile 2-3", ["--profile: 2-3", "for example 20:23"]),
        ("--document_mask=maybe", ["--document_mask: maybe", "true or false"]),
        ("--world_size 8", ["--world_size: 8", "--check"]),
        ("--hardware H100", ["--hardware: H100", "--check"]),
        ("--settings absent.json", ["absent.json", "no such file"]),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_fix(words, parts):
    _, problems = parse_settings(words.split())
    assert len(problems) == 1 and "\n" not in problems[0]
    for part in parts:
        assert part in problems[0]


# {what users of other trainers type: what it is here; "" if nothing is near in meaning}
ELSEWHERE = {
    # Hugging Face's Trainer
    "--model_name_or_path": "--init_from", "--per_device_train_batch_size": "--micro_batch_size",
    "--gradient_accumulation_steps": "--batch_tokens", "--num_train_epochs": "--total_tokens",
    "--max_steps": "--total_tokens", "--warmup_steps": "--warmup_tokens",
    "--warmup_ratio": "--warmup_tokens", "--lr_scheduler_type": "--schedule",
    "--output_dir": "--run_dir", "--save_steps": "--checkpoint_interval",
    "--save_total_limit": "--checkpoint_keep", "--logging_steps": "--log_interval",
    "--eval_steps": "--eval_interval", "--bf16": "--precision", "--tf32": "--float32_matmul",
    "--max_grad_norm": "gradient_clipping", "--adam_beta2": "--beta2", "--optim": "optimizer in",
    "--deepspeed": "--deepspeed_config", "--resume_from_checkpoint": "--run_dir",
    "--report_to": "--wandb", "--run_name": "--wandb_name", "--torch_compile": "--compile",
    "--label_smoothing_factor": "", "--group_by_length": "", "--hub_token": "",
    # nanoGPT
    "--lr": "--learning_rate", "--min_lr": "--min_learning_rate", "--max_iters": "--total_tokens",
    "--batch_size": "--batch_tokens", "--block_size": "--seq_len", "--grad_clip": "gradient_clip",
    "--eval_iters": "--eval_tokens", "--out_dir": "--run_dir", "--dtype": "--precision",
    "--n_layer": "--model_config", "--wandb_log": "--wandb", "--dataset": "--data:",
    # torchtitan and litgpt
    "--training.steps": "--total_tokens", "--training.local_batch_size": "--micro_batch_size",
    "--training.seq_len": "--seq_len", "--optimizer.lr": "--learning_rate",
    "--checkpoint.interval": "--checkpoint_interval", "--metrics.log_freq": "--log_interval",
    "--parallelism.tensor_parallel_degree": "tensor_parallel in", "--compile.enable": "--compile",
    "--train.max_tokens": "--total_tokens", "--train.global_batch_size": "--batch_tokens",
    # Megatron-LM
    "--train-iters": "--total_tokens", "--seq-length": "--seq_len", "--save": "--run_dir",
    "--lr-decay-style": "--schedule", "--lr-warmup-fraction": "--warmup_tokens",
    "--clip-grad": "gradient_clipping", "--data-path": "--data:", "--num-layers": "--model_config",
    "--tensor-model-parallel-size": "tensor_parallel in", "--tokenizer-type": "--tokenizer",
    "--pipeline-model-parallel-size": "pipeline.stages in", "--recompute-granularity":
    "--gradient_checkpointing", "--exit-duration-in-mins": "--stop_after", "--swiglu": "config",
    "--no-masked-softmax-fusion": "", "--distributed-timeout-minutes": "",
}  # fmt: skip


@pytest.mark.parametrize("typed", ELSEWHERE)
def test_the_options_of_other_trainers_are_answered_by_meaning(typed, tmp_path):
    (problem,) = parse_settings([typed, "0.3", "a", "0.7", "b"])[1]
    ours = ELSEWHERE[typed]
    assert "Did you mean" not in problem and ("Here it is" in problem) == bool(ours)
    assert ours in problem.partition("Here it is")[2]
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({typed[2:]: 1}))
    (in_file,) = parse_settings(["--settings", str(file)])[1]
    assert problem.partition("Here it is")[2] == in_file.partition("Here it is")[2]


def test_each_answer_names_flags_that_exist_for_names_that_do_not():
    flags = {f"--{name}" for name in (*FLAGS, *LAUNCHER_FLAGS)} | {"--tokenizer", "--val_fraction"}
    names = [name for _, _, names in OTHER_NAMES for name in names.split()]
    assert len(names) == len(set(names)) and not set(names) & (set(FLAGS) | set(LAUNCHER_FLAGS))
    for ours, why, _ in OTHER_NAMES:
        assert set(re.findall(r"--\w+", f"{ours} {why}")) <= flags


@pytest.mark.parametrize("name", FLAGS)
def test_the_help_of_a_flag_shows_the_default_that_it_has(name):
    shown = re.search(r"\(default: (\S+)\)$", FLAGS[name]["help"])
    value = getattr(RunSettings(), name)
    if FLAGS[name]["kind"] == "switch":
        assert shown is not None and value == (shown[1] == "on")
    elif value is not None and value != () and name not in ("gradient_checkpointing", "local_rank"):
        assert shown is not None and convert(name, shown[1]) == value


def test_yaml_is_called_by_its_name(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("seed: 1\n")
    (problem,) = parse_settings(["--settings", str(file)])[1]
    assert f"{file}: is YAML, but JSON is read. Convert it: python -c" in problem


def test_a_home_directory_is_expanded_where_the_shell_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"data": ["~/web=0.5", "code=0.5"], "seed": 3}))
    settings, problems = parse_settings(["--run_dir=~/runs/first", "--settings", str(file)])
    assert not problems
    assert settings.run_dir == f"{tmp_path}/runs/first"
    assert settings.data == (f"{tmp_path}/web=0.5", "code=0.5")


@pytest.mark.parametrize("name", ["a\nb", "a\udcff", "a\x1b[2Jb", "a\0b"])
def test_names_that_no_file_of_the_run_could_hold_are_refused(name):
    _, problems = parse_settings(["--run_dir", name])
    assert len(problems) == 1 and "printable" in problems[0]
    problems[0].encode()  # can be printed


def test_every_mistake_is_found_at_once():
    words = "--sed 1 --beta1 2 --wandb maybe --batch_tokens many"
    _, problems = parse_settings(words.split())
    assert len(problems) == 4


def test_a_settings_file_is_read_and_flags_win(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"seq_len": "2k", "data": "shards/web", "seed": 3, "beta1": None}))
    settings, problems = parse_settings(["--seed", "4", "--settings", str(file)])
    assert not problems
    assert (settings.seq_len, settings.seed, settings.data) == (2000, 4, ("shards/web",))
    assert settings.explicit == {"seq_len", "data", "seed", "settings"}
    assert settings.where("seq_len") == f"{file}: settings.seq_len"
    assert settings.where("seed") == "command line: --seed"


def test_a_settings_file_is_refused_by_key(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text('{"settings": {"sequence_len": 64, "compile": "perhaps", "check": true}}')
    _, problems = parse_settings(["--settings", str(file)])
    assert len(problems) == 3 and all(str(file) in problem for problem in problems)
    assert 'Did you mean "seq_len"?' in problems[0]
    file.write_text('{"seed": 1, "seed": 2}')
    _, problems = parse_settings(["--settings", str(file)])
    assert len(problems) == 1 and "occurs twice" in problems[0]


def test_run_json_replays_to_equal_settings(tmp_path):
    words = "--data a=0.5 --data b=0.5 --seq_len 128 --learning_rate 3e-4 --stop_after 1h --compile"
    settings, _ = parse_settings(words.split())
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"settings": settings.to_json(), "world_size": 8}))
    again, problems = parse_settings(["--settings", str(file)])
    assert not problems
    assert again.to_json() == settings.to_json()
    for ended, number in ((0.0, 0), (2.5, 1)):  # off, and on, in an earlier release
        values = settings.to_json() | {"adaptive_clip": ended}
        file.write_text(json.dumps({"settings": values, "ds_config": {}}))
        again, problems = parse_settings(["--settings", str(file)])
        assert len(problems) == number and again.to_json() == settings.to_json()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--help"], short_help_text()),
        (["--seed", "1", "-h"], short_help_text()),
        (["--help", "all"], help_text()),
        (["--help=all"], help_text()),
    ],
)
def test_help_is_printed_and_exits_0(words, text):
    code = f"from zerolm.parts.parse import *; parse_settings({words})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.rstrip() == text


def test_the_short_help_has_the_flags_of_a_first_run_and_counts_the_others():
    def add_flags(parser):
        group = parser.add_argument_group("launcher")
        group.add_argument("--one", metavar="N")
        group.add_argument("--two", action="store_true")
        add_all_settings(parser)

    text = short_help_text(add_flags=add_flags)
    shown = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    assert tuple(shown) == FIRST_FLAGS and len(shown) == 10
    everything = re.findall(r"^  --(\w+)", help_text(), re.MULTILINE)
    assert f"--help all shows the other {len(everything) + 2 - 10} flags: launcher, " in (
        " ".join(text.split())
    )


def test_help_explains_every_flag():
    for name, about in FLAGS.items():
        assert (f"--{name} " in help_text() + " ") == (about["group"] != "hidden"), name
    assert max(map(len, help_text().splitlines())) <= 100


def test_settings_import_nothing_heavy():
    code = "import sys, zerolm.config.settings; print([m for m in sys.modules if m in sys.argv])"
    heavy = ["torch", "numpy", "deepspeed", "transformers", "pydantic"]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_an_equals_sign_in_the_name_of_an_existing_directory_starts_no_weight(
    tmp_path, monkeypatch
) -> None:
    """Hive writes directories such as `day=20260101`."""
    monkeypatch.chdir(tmp_path)
    Path("parts/day=20260101").mkdir(parents=True)
    assert split_weight("parts/day=20260101") == ("parts/day=20260101", None)
    assert split_weight("parts/day=20260101=0.5") == ("parts/day=20260101", 0.5)
    assert split_weight("parts/day=20260102") == ("parts/day", 20260102)
    assert split_weight("parts/day=monday") == ("parts/day=monday", None)
    assert split_weight("s3://b/day=1/") == ("s3://b/day=1/", None)
    assert split_weight("s3://b/web=0.3") == ("s3://b/web", 0.3)


def test_a_plan_has_every_setting_whose_type_is_not_optional():
    settings, _ = parse_settings(["--seq_len", "64", "--weight_decay", "0"])
    with pytest.raises(AssertionError, match="not resolved") as refusal:
        settings.resolved()
    assert "'batch_tokens'" in str(refusal.value) and "'val_data'" not in str(refusal.value)
    assert "'seq_len'" not in str(refusal.value) and "'weight_decay'" not in str(refusal.value)
