"""Valid and invalid inputs of pretrain.py, and command lines that use them."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from tests.launching import LLAMA, ROOT, write_json
from zerolm.common.errors import ConfigError
from zerolm.preflight import check
from zerolm.run_dir.files import RunFiles
from zerolm.shards.writer import ShardWriter
from zerolm.train import run_directory

PROFILES = ROOT / "ds_configs"


def shards(directory, *, tokens=20_000, vocab_size=512, fingerprint="a", seed=0):
    tokenizer = {"name": "test", "fingerprint": fingerprint * 64, "files": []}
    with ShardWriter(directory, vocab_size=vocab_size, eos_id=0, tokenizer=tokenizer) as writer:
        writer.add(np.random.default_rng(seed).integers(1, vocab_size, tokens))
    return directory


def write_inputs(base: Path) -> Path:
    """Write valid and invalid inputs, which all tests share."""
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
    write_json(base / "blind.json", {**LLAMA, "model_type": "mistral", "sliding_window": 0,
        "architectures": ["MistralForCausalLM"]})  # fmt: skip
    write_json(base / "mixtral.json", {**LLAMA, "model_type": "mixtral", "num_local_experts": 4,
        "architectures": ["MixtralForCausalLM"], "output_router_logits": True})  # fmt: skip
    write_json(base / "padding.json", {**LLAMA, "pad_token_id": 3})
    write_json(base / "stages.json", {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}})
    write_json(base / "ds_typo.json", {"zero_optimization": {"stage": 2, "overlap_com": True}})
    write_json(base / "ds_offload.json", {"zero_optimization": {"stage": 2, "offload_param": {
        "device": "cpu"}}})  # fmt: skip
    write_json(base / "ds_flops.json", {"flops_profiler": {"output_file": "a_file"}})
    write_json(base / "ds_negative.json", {"optimizer": {"type": "AdamW", "params": {"lr": -2.5}}})
    write_json(base / "ds_fixed.json", {"train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}})  # fmt: skip
    write_json(base / "ds_total.json", {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4})  # fmt: skip
    write_json(base / "ds_scheduler.json", {"scheduler": {"type": "WarmupDecayLR", "params": {
        "total_num_steps": 50, "warmup_num_steps": 5, "warmup_max_lr": 0.001}}})  # fmt: skip
    write_json(base / "ds_long_warmup.json", {"scheduler": {"type": "WarmupLR", "params": {
        "warmup_num_steps": 500, "warmup_max_lr": 0.001}}})  # fmt: skip
    write_json(base / "ds_trackers.json", {"fp16": {"enabled": "auto"}, "zero_optimization": {
        "stage": 0}, "_comment": "x", "tensorboard": {"enabled": 1}, "wandb": {"enabled": "true",
        "project": "theirs"}})  # fmt: skip
    zero2 = json.loads((PROFILES / "zero2.json").read_text())
    write_json(base / "bf16.json", {**zero2, "bf16": {"enabled": True}})
    write_json(base / "fp32.json", {"gradient_clipping": 0.5})
    for kind in ("Adagrad", "Lion"):
        write_json(base / f"{kind.lower()}.json", {"optimizer": {"type": kind},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})  # fmt: skip
    (base / "torn.json").write_text('{"zero_optimization": ')
    write_json(base / "settings.json", {"batch_size": 8})
    return base


def command(base: Path, change: str = "") -> list[str]:
    """Return a valid command line, with flags replaced or added; `---flag` removes one."""
    words = {
        "data": ["web"],
        "model_config": ["llama.json"],
        "deepspeed_config": ["bf16.json"],
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
    """Return the problems of a refused command, after checking that it has written nothing."""
    import pytest  # a benchmark uses this module without it

    before = snapshot(base)
    with pytest.raises(ConfigError) as caught:
        check.check(command(base, change), launcher)
    assert snapshot(base) == before
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def write_record(run_dir, plan):
    write_json(RunFiles(run_dir).record, run_directory.record(plan))
