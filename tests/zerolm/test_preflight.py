"""Preflight: bad input is refused with everything that is wrong; good input becomes one plan."""

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.launching import LLAMA, ROOT, environment, free_port, kill_session, write_json
from zerolm import preflight, run_directory
from zerolm.errors import ConfigError
from zerolm.flags import parse_settings
from zerolm.model_rules import model_problems
from zerolm.shards import ShardWriter

PROFILES = ROOT / "ds_configs"


def shards(directory, *, tokens=20_000, vocab_size=512, fingerprint="a", seed=0):
    tokenizer = {"name": "test", "fingerprint": fingerprint * 64, "files": []}
    with ShardWriter(directory, vocab_size=vocab_size, eos_id=0, tokenizer=tokenizer) as writer:
        writer.add(np.random.default_rng(seed).integers(1, vocab_size, tokens))
    return directory


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A directory of good and bad inputs, for all tests to read."""
    base = tmp_path_factory.mktemp("inputs")
    shards(base / "web", seed=1)
    shards(base / "code", seed=2)
    shards(base / "val", seed=3, tokens=1000)
    shards(base / "wide", seed=4, vocab_size=600)
    shards(base / "other", seed=5, fingerprint="b")
    shards(base / "short", seed=6, tokens=20)
    shutil.copytree(base / "web", base / "cut")
    with open(base / "cut" / "shard-00000.bin", "r+b") as file:
        file.truncate(100)
    shutil.copytree(base / "web", base / "holed")
    (base / "holed" / "shard-00000.bin").unlink()
    (base / "a_file").write_text("")
    write_json(base / "llama.json", LLAMA)
    write_json(base / "typo.json", {**LLAMA, "hiden_size": 64})
    write_json(base / "dropout.json", {**LLAMA, "attention_dropout": 0.1})
    write_json(base / "mistral.json", {**LLAMA, "model_type": "mistral", "sliding_window": 16,
        "architectures": ["MistralForCausalLM"]})  # fmt: skip
    write_json(base / "mixtral.json", {**LLAMA, "model_type": "mixtral", "num_local_experts": 4,
        "architectures": ["MixtralForCausalLM"], "output_router_logits": True})  # fmt: skip
    write_json(base / "ds_typo.json", {"zero_optimization": {"stage": 2, "overlap_com": True}})
    write_json(base / "ds_offload.json", {"zero_optimization": {"stage": 2, "offload_param": {
        "device": "cpu"}}})  # fmt: skip
    write_json(base / "ds_fixed.json", {"train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}})  # fmt: skip
    write_json(base / "ds_total.json", {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4})  # fmt: skip
    write_json(base / "ds_scheduler.json", {"scheduler": {"type": "WarmupDecayLR", "params": {
        "total_num_steps": 50, "warmup_num_steps": 5, "warmup_max_lr": 0.001}}})  # fmt: skip
    write_json(base / "fp32.json", {"gradient_clipping": 0.5})
    write_json(base / "adagrad.json", {"optimizer": {"type": "Adagrad"}})
    write_json(base / "lion.json", {"optimizer": {"type": "Lion"}, "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu"}}})  # fmt: skip
    (base / "torn.json").write_text('{"zero_optimization": ')
    write_json(base / "settings.json", {"batch_size": 8})
    return base


def command(base: Path, change: str = "") -> list[str]:
    """Return a good command line, with flags replaced or added; `-flag` leaves one out."""
    words = {
        "data": ["web"],
        "model_config": ["llama.json"],
        "deepspeed_config": [str(PROFILES / "zero2.json")],
        "run_dir": ["run"],
        "seq_len": ["32"],
        "batch_tokens": ["512"],
        "total_tokens": ["51200"],
    }
    named = {"data", "val_data", "model_config", "deepspeed_config", "run_dir", "settings"}
    changed: dict[str, list[str]] = {}
    for flag, value in (pair.partition(" ")[::2] for pair in change.split(" --") if pair):
        flag = flag.removeprefix("--")
        if flag.startswith("-"):
            words.pop(flag[1:])
        else:
            changed.setdefault(flag, []).append(value)
    command = []
    for flag, values in {**words, **changed}.items():
        for value in values:
            path = os.path.join(base, value) if flag in named and value else value  # noqa: PTH118
            command += [f"--{flag}", *([path] if path else [])]
    return command


def snapshot(base: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [base, *base.rglob("*")]}


def refusal(base: Path, change: str, **launcher: str) -> list[str]:
    """Return the problems of a command, after making sure that nothing was written."""
    before = snapshot(base)
    with pytest.raises(ConfigError) as caught:
        preflight.check(command(base, change), launcher)
    assert snapshot(base) == before
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


# What is wrong: (flags, what the one line must say).
BAD = {
    "typo of a flag": ("--batch_tokns 64", ["--batch_tokns", '"--batch_tokens"']),
    "typo in the model": ("--model_config typo.json", ["typo.json", "hiden_size", "hidden_size"]),
    "typo in the profile": (
        "--deepspeed_config ds_typo.json",
        ["ds_typo.json: zero_optimization.overlap_com", '"overlap_comm"'],
    ),
    "typo in settings": (
        "--settings settings.json",
        ["settings.json: settings.batch_size: 8", "batch_"],
    ),
    "no data": ("---data", ["--data: missing", "--data PATH"]),
    "no model": ("---model_config", ["--model_config: missing", "config.json"]),
    "no profile": ("---deepspeed_config", ["--deepspeed_config: missing", "ds_configs/"]),
    "no run directory": ("---run_dir", ["--run_dir: missing", "runs/first"]),
    "absent model": ("--model_config none.json", ["none.json", "no such file"]),
    "absent profile": ("--deepspeed_config none.json", ["none.json: no such file", "zero2.json"]),
    "torn profile": ("--deepspeed_config torn.json", ["torn.json", "JSON", "Correct"]),
    "absent shards": ("--data none", ["none", "manifest.json", "data_prep tokenize"]),
    "a file as shards": ("--data a_file", ["a_file", "manifest.json"]),
    "truncated shard": ("--data cut", ["cut/shard-00000.bin: 100 bytes", "manifest says 40000"]),
    "missing shard": ("--data holed", ["holed/shard-00000.bin", "missing", "Restore"]),
    "bad weight": ("--data web=much", ["--data", "web=much", "not a number", "=0.7"]),
    "weight of zero": ("--data web=0 --data code=1", ["--data", "web=0", "above 0"]),
    "weight for one only": ("--data web=0.5 --data code", ["code", "no weight", "all of them"]),
    "tiny weight": ("--data web=1e-9 --data code=1", ["1e-09", "2^-20"]),
    "data twice": ("--data web=1 --data web=2", ["holds the same tokens", "give it once"]),
    "validation on training data": ("--val_data web", ["--val_data", "held out", "Remove one"]),
    "ids beyond the vocabulary": (
        "--data wide",
        ["wide/manifest.json: vocab_size: 600", "vocab_size 512", "llama.json"],
    ),
    "another tokenizer": (
        "--val_data other",
        ["other/manifest.json: tokenizer.fingerprint: bbbb", "aaaa", "same one"],
    ),
    "less than a window": ("--val_data short", ["short/manifest.json: num_tokens: 20", "33"]),
    "sequence too long": (
        "--seq_len 128",
        ["--seq_len: 128", "max_position_embeddings 64", "llama.json"],
    ),
    "batch not of sequences": ("--batch_tokens 500", ["--batch_tokens: 500", "480 or 512"]),
    "batch not of micro-batches": (
        "--micro_batch_size 3",
        ["--batch_tokens: 512", "micro-batch 3", "480 or 576", "1 or 2 or 4 or 8 or 16"],
    ),
    "ramp without start": ("--batch_ramp_tokens 512", ["--batch_ramp_tokens", "_ramp_start"]),
    "ramp that does not divide": ("--batch_ramp_start 96", ["--batch_ramp_start: 96", "512"]),
    "warm-up beyond the end": ("--warmup_tokens 60k", ["--warmup_tokens: 60000", "51200"]),
    "decay without wsd": ("--decay_tokens 1k", ["--decay_tokens: 1000", "wsd"]),
    "decay beyond the end": (
        "--schedule wsd --decay_tokens 51k --warmup_tokens 512",
        ["--decay_tokens: 51000", "at most 50688"],
    ),
    "minimum above peak": (
        "--learning_rate 1e-4 --min_learning_rate 1e-3",
        ["--min_learning_rate: 0.001", "0.0001"],
    ),
    "evaluation of nothing": ("--eval_interval 5", ["--eval_interval: 5", "--val_data"]),
    "offload below stage 3": (
        "--deepspeed_config ds_offload.json",
        ["ds_offload.json: zero_optimization.offload_param", "zero3_offload.json"],
    ),
    "learning rate twice": (
        "--deepspeed_config ds_fixed.json --batch_tokens 256 --learning_rate 3e-4",
        ["ds_fixed.json: optimizer.params.lr: 0.001", "--learning_rate 0.0003", '"auto"'],
    ),
    "micro-batch twice": (
        "--deepspeed_config ds_fixed.json --batch_tokens 256 --micro_batch_size 4",
        ["ds_fixed.json: train_micro_batch_size_per_gpu: 2", "--micro_batch_size 4"],
    ),
    "batch twice": (
        "--deepspeed_config ds_fixed.json --batch_tokens 512",
        ["ds_fixed.json", "gradient_accumulation_steps 4", "256", "--batch_tokens 512"],
    ),
    "batch that is not its product": (
        "--deepspeed_config ds_total.json ---batch_tokens",
        ["ds_total.json: train_batch_size: 10", "= 8"],
    ),
    "schedule twice": (
        "--deepspeed_config ds_scheduler.json --schedule cosine --total_tokens 25600",
        ["ds_scheduler.json: scheduler.type: WarmupDecayLR (linear)", "--schedule cosine"],
    ),
    "length twice": (
        "--deepspeed_config ds_scheduler.json",
        ["scheduler.params.total_num_steps: 50", "25600", "--total_tokens 51200"],
    ),
    "betas for an optimizer without": (
        "--deepspeed_config adagrad.json --beta2 0.9",
        ["--beta2: 0.9", "Adagrad has no betas", "adagrad.json: optimizer.type"],
    ),
    "flash attention on a CPU": (
        "--attn_implementation flash_attention_2",
        ["--attn_implementation: flash_attention_2", "GPU", "auto"],
    ),
    "a file as run directory": ("--run_dir a_file", ["--run_dir", "a_file", "not a directory"]),
    "a file above the run directory": ("--run_dir a_file/x/y", ["--run_dir", "a_file"]),
    "online without a key": ("--wandb online", ["--wandb: online", "wandb login", "offline"]),
}


@pytest.mark.parametrize(("change", "parts"), BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(inputs, change, parts):
    problems = refusal(inputs, change, NETRC=str(inputs / "no_netrc"))
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0]


def test_a_run_directory_that_cannot_be_written_is_refused(inputs):
    with pytest.raises(ConfigError, match=r"--run_dir: /proc/run, cannot write in /proc"):
        preflight.check([*command(inputs), "--run_dir", "/proc/run"], {})


def test_every_problem_is_found_at_once(inputs):
    change = "--data cut --deepspeed_config ds_typo.json --seq_len 128 --batch_tokens 500 --sed 1"
    problems = refusal(inputs, change)
    assert len(problems) == 5
    for part in ("--sed", "cut/", "overlap_com", "max_position_embeddings", "--batch_tokens"):
        assert sum(part in problem for problem in problems) == 1, (part, problems)


def test_a_batch_that_the_ranks_cannot_share_is_refused(inputs):
    (problem,) = refusal(inputs, "--micro_batch_size 2", WORLD_SIZE="3")
    assert "3 rank(s) x micro-batch 2" in problem and "384 or 576" in problem


def test_a_broken_launcher_environment_is_refused(inputs):
    (problem,) = refusal(inputs, "", WORLD_SIZE="many")
    assert "environment: WORLD_SIZE: 'many'" in problem


def test_the_lock_of_a_killed_build_is_refused_and_a_live_one_is_named(inputs, tmp_path):
    for name, age in (("cpu_adam", 3600), ("shm_comm", 0)):
        lock = tmp_path / name / "lock"
        lock.parent.mkdir()
        lock.touch()
        os.utime(lock, times=(time.time() - age,) * 2)
    (problem,) = refusal(inputs, "", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert f"{tmp_path}/cpu_adam/lock" in problem and "Delete it" in problem
    (tmp_path / "cpu_adam" / "lock").unlink()
    plan = preflight.check(command(inputs), {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert any(f"{tmp_path}/shm_comm/lock" in notice for notice in plan.notices)


def test_a_device_that_is_missing_is_refused(inputs):
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    (problem,) = refusal(inputs, "", DS_ACCELERATOR="cuda")
    assert "environment: DS_ACCELERATOR: cuda" in problem and "Unset it" in problem


def test_a_good_command_becomes_a_plan(inputs):
    change = "--data web=3 --data code=1 --val_data val --micro_batch_size 4 --wandb off"
    plan = preflight.check(command(inputs, change), {"WORLD_SIZE": "2"})
    assert (plan.world_size, plan.micro_batch_size, plan.accumulation) == (2, 4, 2)
    assert (plan.batch_sequences, plan.total_steps, plan.total_sequences) == (16, 100, 1600)
    assert plan.ds_config["train_batch_size"] == 16 and plan.zero_stage == 2
    assert plan.weights == [3, 1] and plan.source_names == ["web", "code"]
    assert plan.val_sequences == 31 and plan.val_source_names == ["val"]
    assert plan.learning_rate(51200) == pytest.approx(0.1 * plan.settings.learning_rate)
    assert plan.precision == "bf16" and plan.weight_decay == 0.1
    assert json.loads(json.dumps(plan.settings.to_json())) == plan.settings.to_json()
    assert f"{plan.num_parameters:,} parameters" in plan.summary()
    assert not (inputs / "run").exists()


def test_the_betas_of_run_json_are_those_of_the_optimizer(inputs):
    lion = preflight.check(command(inputs, "--deepspeed_config lion.json --beta1 0.8"), {})
    assert lion.ds_config["optimizer"]["params"]["betas"] == [0.8, 0.99]
    assert (lion.settings.beta1, lion.settings.beta2) == (0.8, 0.99)
    adagrad = preflight.check(command(inputs, "--deepspeed_config adagrad.json"), {})
    assert (adagrad.settings.beta1, adagrad.settings.beta2) == (None, None)


def test_unweighted_sources_are_drawn_by_their_tokens(inputs):
    plan = preflight.check(command(inputs, "--data web --data val"), {})
    assert plan.weights == [20_000, 1000]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_what_is_learned_does_not_depend_on_the_world_size(inputs, world_size):
    change = "---batch_tokens ---total_tokens ---seq_len"
    plan = preflight.check(command(inputs, change), {"WORLD_SIZE": str(world_size)})
    alone = preflight.check(command(inputs, change), {})
    assert plan.batch_schedule == alone.batch_schedule
    assert plan.learning_rate == alone.learning_rate
    assert plan.settings.total_tokens == 20 * plan.num_parameters
    assert plan.batch_sequences == plan.micro_batch_size * plan.accumulation * world_size


def test_check_plans_for_devices_that_are_not_here(inputs):
    change = "--check --world_size 512 ---batch_tokens --deepspeed_config ds_fixed.json"
    plan = preflight.check(command(inputs, change), {})
    assert plan.world_size == 512 and plan.batch_sequences == 2 * 4 * 512
    assert "torch_adam" not in plan.ds_config["optimizer"]["params"]
    assert any("80 GiB" in notice for notice in plan.notices)


def test_a_scheduler_of_the_json_is_left_to_deepspeed(inputs):
    change = "--deepspeed_config ds_scheduler.json ---total_tokens"
    plan = preflight.check(command(inputs, change), {})
    assert plan.learning_rate is None
    assert (plan.settings.schedule, plan.settings.total_tokens) == ("linear", 25600)
    assert plan.total_steps == 50


def test_a_ramp_counts_its_steps(inputs):
    change = "--batch_ramp_start 128 --batch_ramp_tokens 5120"
    plan = preflight.check(command(inputs, change), {})
    position = steps = 0
    while position < 1600:
        position += plan.batch_schedule(position)
        steps += 1
    assert (plan.total_steps, plan.total_sequences) == (steps, position)


def test_document_masks_choose_attention_that_takes_them(inputs):
    plan = preflight.check(command(inputs, "--document_mask"), {})
    assert plan.settings.attn_implementation == "sdpa"


def layers(model_type, **more):
    """Return a small config of two layers."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CONFIG_MAPPING[model_type](**sizes, **more)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (layers("mistral", sliding_window=32), None),
        (layers("mistral", sliding_window=31), None),
        (layers("mistral", sliding_window=None), None),
        (layers("qwen2", sliding_window=8), None),  # without use_sliding_window
        (layers("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=0), None),
        (layers("gpt_oss", layer_types=["full_attention"] * 2, num_local_experts=2), None),
        (layers("llama4_text", attention_chunk_size=16, num_local_experts=2), None),
        (layers("mamba"), "a state that runs on"),
        (layers("qwen3_next"), "a state that runs on"),
        (layers("minimax", num_local_experts=2), "layers of linear_attention"),
        (layers("bloom", n_layer=2), "no positions"),
        (layers("llama"), None),
        (layers("gpt2"), None),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_document_masks_are_refused_where_a_model_has_another_mask_or_a_state(config, said):
    settings, _ = parse_settings(["--document_mask", "--seq_len", "32"])
    problems = model_problems(settings, config)
    assert len(problems) == (said is not None)
    for problem in problems:
        assert "--document_mask: true" in problem and said in problem and "Remove" in problem


def test_a_window_below_the_sequence_goes_with_document_masks(inputs):
    words = command(inputs, "--document_mask --model_config mistral.json")
    assert preflight.check(words, {}).settings.attn_implementation == "sdpa"


def test_chunks_and_flash_attention_do_not_go_with_document_masks():
    settings, _ = parse_settings(
        ["--document_mask", "--seq_len", "32", "--attn_implementation", "flash_attention_2"]
    )
    chunked = layers("llama4_text", attention_chunk_size=16, num_local_experts=2)
    (problem,) = model_problems(settings, chunked)
    assert "flash_attention_2 knows no chunks" in problem
    assert model_problems(settings, layers("mistral", sliding_window=8)) == []


def test_rows_without_an_index_are_refused_by_the_command_that_makes_it(inputs):
    (problem,) = refusal(inputs, "--packing best_fit")
    assert "python -m data_prep pack" in problem and "--seq_len 32 needs it" in problem


def test_a_routers_loss_is_a_notice(inputs):
    plan = preflight.check(command(inputs, "--model_config mixtral.json"), {})
    assert any("output_router_logits is true" in notice for notice in plan.notices)


def test_a_routers_loss_ties_a_run_to_its_micro_batch_and_world_size(inputs, tmp_path):
    change = f"--run_dir {tmp_path} --model_config mixtral.json --micro_batch_size 2"
    write_record(tmp_path, preflight.check(command(inputs, change), {}))
    preflight.check(command(inputs, change), {})
    other = change.replace("size 2", "size 4")
    (problem,) = refusal(inputs, other)
    assert "settings.micro_batch_size: 2 -> 4" in problem
    (problem,) = refusal(inputs, change, WORLD_SIZE="2")
    assert "world_size: 1 -> 2 (output_router_logits)" in problem


def test_hosts_that_differ_in_what_they_read_have_other_fingerprints(inputs):
    plan = preflight.check(command(inputs, "--val_data val"), {})
    assert (
        plan.fingerprint() == preflight.check(command(inputs, "--val_data val"), {}).fingerprint()
    )
    model = copy.deepcopy(plan.model_config)
    model.rms_norm_eps *= 2
    for change in ({"model_config": model}, {"val_sources": plan.sources}):
        assert dataclasses.replace(plan, **change).fingerprint() != plan.fingerprint()


def test_a_disk_too_small_for_one_checkpoint_is_refused_and_for_all_a_notice(inputs, tmp_path):
    keep = preflight.check(command(inputs, "--checkpoint_keep 1000000000"), {})
    assert any("its file system has" in notice for notice in keep.notices)
    assert keep.derived["checkpoint size"]
    huge = {**LLAMA, "hidden_size": 1 << 20, "intermediate_size": 1 << 24}
    model = write_json(tmp_path / "huge.json", huge)
    (problem,) = refusal(inputs, f"--model_config {model}")
    assert "a checkpoint needs about" in problem and "TiB" in problem and "--run_dir" in problem


def test_dropout_is_a_notice(inputs):
    plan = preflight.check(command(inputs, "--model_config dropout.json"), {})
    assert any("attention_dropout is 0.1" in notice for notice in plan.notices)


# -------------------------------------------------------------------------------------------------
# A run directory that holds a run


@pytest.fixture
def a_run(inputs, tmp_path):
    """A run directory with the run.json of the good command."""
    write_record(tmp_path, preflight.check(command(inputs, f"--run_dir {tmp_path}"), {}))
    return tmp_path


def write_record(run_dir, plan):
    write_json(run_dir / run_directory.RECORD, run_directory.record(plan))


@pytest.mark.parametrize(
    "change",
    [
        "",
        "--micro_batch_size 1 --num_workers 2 --log_interval 3 --checkpoint_interval 7",
        f"--deepspeed_config {PROFILES / 'zero3.json'}",
        "--val_data val",
    ],
)
def test_what_does_not_shape_the_curve_may_change(inputs, a_run, change):
    preflight.check(command(inputs, f"--run_dir {a_run} {change}".strip()), {})


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
def test_what_shapes_the_curve_is_refused_as_a_difference(inputs, a_run, change, parts):
    text = "\n".join(refusal(inputs, f"--run_dir {a_run} {change}"))
    for part in parts:
        assert part in text
    assert f"{a_run}/run.json: " in text and "another --run_dir" in text


@pytest.mark.parametrize("kind", ["constant", "wsd", "cosine"])
def test_only_a_constant_schedule_may_be_made_longer(inputs, tmp_path, kind):
    change = f"--run_dir {tmp_path} --schedule {kind} --learning_rate 1e-3 --warmup_tokens 512"
    change += " --decay_tokens 5k" if kind == "wsd" else ""
    write_record(tmp_path, preflight.check(command(inputs, change), {}))
    longer = f"{change} --total_tokens 102400"
    if kind == "constant":
        assert preflight.check(command(inputs, longer), {}).total_steps == 200
    else:
        (problem,) = refusal(inputs, longer)
        assert f"a {kind} schedule looks ahead to it" in problem


def test_changes_of_the_curve_are_gone_on_with_when_accepted(inputs, a_run):
    change = f"--run_dir {a_run} --seed 1 --seq_len 16 --data code --accept_changes"
    plan = preflight.check(command(inputs, change), {})
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
def test_what_cannot_be_carried_over_is_refused_even_when_accepted(inputs, a_run, change, part):
    (problem,) = refusal(inputs, f"--run_dir {a_run} {change} --accept_changes")
    assert part in problem and "--accept_changes" not in problem


def test_run_json_replays_to_the_same_plan(inputs, a_run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("replay")
    first = preflight.check(command(inputs, f"--run_dir {a_run}"), {})
    words = ["--settings", str(a_run / "run.json"), "--run_dir", str(elsewhere)]
    again = preflight.check(words, {})
    assert again.ds_config == first.ds_config
    old, new = first.settings.to_json(), again.settings.to_json()
    assert {key for key in old if old[key] != new[key]} == {"run_dir"}


# -------------------------------------------------------------------------------------------------
# The real launcher


def test_fewer_hosts_than_asked_for_are_refused_by_the_real_launcher(inputs, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    before = snapshot(inputs)
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_nodes", "2"]
    runner += ["--hostfile", str(hostfile), "--no_ssh_check", "--master_addr", "127.0.0.1"]
    runner += ["--master_port", str(free_port()), str(ROOT / "pretrain.py")]
    process = subprocess.Popen(
        [*runner, *command(inputs)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        kill_session(process.pid)
    assert process.returncode == 2, output
    assert f"{hostfile}: --num_nodes: 2 nodes were asked for, but the hostfile gives 1" in output
    assert "Traceback" not in output
    assert snapshot(inputs) == before
