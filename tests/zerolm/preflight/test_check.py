"""Invalid input is refused with one line per problem, and nothing is written."""

import json
import subprocess
import sys

import pytest
import torch

from tests.launching import ROOT, environment, free_port, kill_session
from tests.zerolm.preflight.preflight_inputs import command, refusal, snapshot
from zerolm.common.errors import ConfigError
from zerolm.common.values import shown_bytes
from zerolm.distributed import device
from zerolm.optim.schedule import SCHEDULES, Schedule
from zerolm.preflight import check

# {problem: (flags, parts of the one line that reports it)}.
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
    "text instead of shards": (
        "--data ds_scheduler.json",
        [
            "ds_scheduler.json: is a file",
            "tokenize --input ",
            "/ds_scheduler.json --tokenizer DIR --output ",
            "/ds_scheduler-shards",
        ],
    ),
    "absent profile": ("--deepspeed_config none.json", ["none.json: no such file", "zero2.json"]),
    "the two configs exchanged": (
        "--model_config bf16.json --deepspeed_config llama.json",
        [
            "bf16.json is a DeepSpeed JSON, and --deepspeed_config ",
            "llama.json is a model config. Swap the two",
        ],
    ),
    "a profile as model": (
        "--model_config bf16.json",
        ["--model_config: ", "bf16.json is a DeepSpeed JSON. Name the config.json"],
    ),
    "a model as profile": (
        "--deepspeed_config llama.json",
        ["--deepspeed_config: ", "llama.json is a model config", "ds_configs/zero2.json"],
    ),
    "torn profile": ("--deepspeed_config torn.json", ["torn.json", "JSON", "Correct"]),
    "absent shards": ("--data none", ["none", "no such directory", "zerolm data tokenize"]),
    "a file as shards": ("--data a_file", ["a_file", "is a file"]),
    "truncated shard": ("--data cut", ["cut/shard-00000.bin: 100 bytes", "manifest says 40000"]),
    "missing shard": ("--data holed", ["holed/shard-00000.bin", "missing", "Restore"]),
    "bad weight": ("--data web=much", ["--data", "web=much", "not a number", "=0.7"]),
    "weight after a colon": ("--data web:0.8 --data code=1", ["web:0.8: a weight", "web=0.8."]),
    "weight of zero": ("--data web=0 --data code=1", ["--data", "web=0", "above 0"]),
    "weight for one only": ("--data web=0.5 --data code", ["code", "no weight", "all sources"]),
    "tiny weight": ("--data web=1e-9 --data code=1", ["1e-09", "2^-20"]),
    "data twice": ("--data web=1 --data web=2", ["contains the same tokens", "give it once"]),
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
    "warm-up steps beyond the end": (
        "--deepspeed_config ds_long_warmup.json",
        ["warmup_num_steps: 500 steps must not exceed the 100 steps of the run", "example 1, or"],
    ),
    "a precision against the file": (
        "--precision fp32",
        ["bf16.json: bf16.enabled: true contradicts command line: --precision fp32"],
    ),
    "a tracker against the file": (
        "--deepspeed_config ds_trackers.json --no-tensorboard",
        ["ds_trackers.json: tensorboard.enabled: true", "contradicts command line: --tensorboard"],
    ),
    "profile after the end": ("--profile 200:201", ["--profile: step 200", "has 100 steps"]),
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
    "a file that DeepSpeed would overwrite": (
        "--deepspeed_config ds_flops.json",
        ["ds_flops.json: flops_profiler.output_file: ", "a_file", "must be in", "profile"],
    ),
    "learning rate twice": (
        "--deepspeed_config ds_fixed.json --batch_tokens 256 --learning_rate 3e-4",
        ["ds_fixed.json: optimizer.params.lr: 0.001", "--learning_rate 0.0003", '"auto"'],
    ),
    "a negative learning rate": (
        "--deepspeed_config ds_negative.json",
        ["ds_negative.json: optimizer.params.lr: -2.5 must not be negative"],
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
    "a run directory with an impossible name": (
        f"--run_dir {'x' * 300}",
        ["--run_dir", "File name too long"],
    ),
    "shards as run directory": ("--run_dir web", ["--run_dir", "token shards", "manifest.json"]),
    "an empty profile": ("--deepspeed_config a_file", ["a_file", "empty"]),
    "more tokens than 64 bits": ("--total_tokens 1e30", ["--total_tokens", "10^18"]),
    "a file above the run directory": ("--run_dir a_file/x/y", ["--run_dir", "a_file"]),
    "online without a key": ("--wandb online", ["--wandb: online", "wandb login", "offline"]),
}


@pytest.mark.parametrize(("change", "parts"), BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(inputs, change, parts):
    problems = refusal(inputs, change, NETRC=str(inputs / "no_netrc"))
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0]


def test_the_file_of_another_project_runs_with_notices_of_what_was_decided(inputs, monkeypatch):
    monkeypatch.setattr(device, "bf16_ratio", lambda where: 0.5)
    plan = check.check(command(inputs, "--deepspeed_config ds_trackers.json"), {})
    assert plan.settings.tensorboard and plan.settings.wandb_project == "theirs"
    assert not {"_comment", "tensorboard", "wandb"} & plan.ds.json.keys()
    assert (plan.ds.precision, plan.ds.zero_stage) == ("bf16", 1)
    assert plan.derived["profile"].startswith("ZeRO-1, bf16")
    assert "there is no --val_data" in plan.derived["evaluation"]
    told = "\n".join(plan.notices)
    for part in ('training in bf16, since fp16.enabled is "auto"', "stage is 0: using stage 1"):
        assert part in told
    plan = check.check(command(inputs, "--deepspeed_config ds_trackers.json --precision fp32"), {})
    assert plan.ds.precision == "fp32" and plan.settings.to_json()["precision"] == "fp32"


def test_unwritable_run_directory_is_refused(inputs):
    with pytest.raises(ConfigError, match=r"--run_dir: /proc/run: cannot write in /proc"):
        check.check([*command(inputs), "--run_dir", "/proc/run"], {})


def test_all_problems_are_reported_at_once(inputs):
    change = "--data cut --deepspeed_config ds_typo.json --seq_len 128 --batch_tokens 500 --sed 1"
    problems = refusal(inputs, change)
    assert len(problems) == 5
    for part in ("--sed", "cut/", "overlap_com", "max_position_embeddings", "--batch_tokens"):
        assert sum(part in problem for problem in problems) == 1, (part, problems)


def test_batch_that_is_not_divisible_over_ranks_is_refused(inputs):
    (problem,) = refusal(inputs, "--micro_batch_size 2", WORLD_SIZE="3")
    assert "3 rank(s) x micro-batch 2" in problem and "384 or 576" in problem


def test_the_second_weights_of_hpz_are_among_the_estimated_model_states(inputs):
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    (inputs / "hpz.json").write_text(
        json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero})
    )
    plan = check.check(command(inputs, "--deepspeed_config hpz.json"), {"WORLD_SIZE": "2"})
    second = shown_bytes(plan.model.num_parameters)  # two bytes of half of them
    assert (
        f"(including {second} for hpZ's second copy of the weights)"
        in plan.derived["memory per rank"]
    )
    plan = check.check(command(inputs), {"WORLD_SIZE": "2"})
    assert "hpZ" not in plan.derived["memory per rank"]


def test_invalid_launcher_environment_is_refused(inputs):
    (problem,) = refusal(inputs, "", WORLD_SIZE="many")
    assert "environment: WORLD_SIZE: 'many'" in problem


def test_missing_device_is_refused(inputs):
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    (problem,) = refusal(inputs, "", DS_ACCELERATOR="cuda")
    assert "environment: DS_ACCELERATOR: cuda" in problem and "Unset it" in problem


def test_missing_packing_index_is_refused_with_the_command_that_creates_it(inputs):
    (problem,) = refusal(inputs, "--packing best_fit")
    assert "zerolm data pack" in problem and "--seq_len 32 needs it" in problem


@pytest.mark.soak
def test_fewer_hosts_than_requested_are_refused_under_the_real_launcher(inputs, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=1\n")
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
    assert f"{hostfile}: --num_nodes: 2, but the hostfile has 1 node(s)" in output
    assert "Traceback" not in output
    assert snapshot(inputs) == before


def test_a_schedule_that_ignores_the_minimum_says_so_by_its_attributes(inputs, monkeypatch):
    """One that falls, but not to the minimum."""
    falling = Schedule(lambda curve, tokens: curve.peak / max(1, tokens) ** 0.5, uses_minimum=False)
    monkeypatch.setitem(SCHEDULES, "linear", falling)
    plan = check.check([*command(inputs), *["--schedule", "linear", "--min_learning_rate", "1e-5"]])
    assert any(
        "--min_learning_rate: has no effect with --schedule linear" in line for line in plan.notices
    )
