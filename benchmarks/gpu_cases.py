"""What benchmarks/gpu.py measures, the most important first, and the command of each case."""

import argparse
import copy
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, TRAINER, PLAIN = "pretrain.py", "Trainer + DeepSpeed", "plain PyTorch, compiled"
BASE = "--compile"  # what the levers are compared with
STEPS = 1_000_000  # more than a case takes: it ends by being killed
MODELS = {
    "1.3B": "model_configs/llama-1.3b.json",
    "160M": "model_configs/llama-160m.json",
    "1.6B MoE": "model_configs/moe-1.6b.json",
}
TOY_MODELS = {"1.3B": "model_configs/tiny.json", "160M": "model_configs/tiny.json"}
TOY_MODELS |= {"1.6B MoE": "model_configs/mixtral-tiny.json"}
LEVERS = (  # of pretrain.py, each alone beside BASE; the last three without the compiler
    ("", "nothing is compiled"),
    ("--compile --loss_chunk_tokens 2048", "the loss in chunks"),
    ("--gradient_checkpointing=selective", "recomputing norms and activation functions"),
    ("--compile --gradient_checkpointing", "recomputing whole blocks"),
    ("--compile --attn_implementation sdpa", "torch's own attention"),
    ("--compile fused_adam", "DeepSpeed's FusedAdam, which nvcc builds first"),
)


@dataclass(frozen=True)
class Case:
    """One contender on one model.

    Attributes:
        model: a name of `MODELS`.
        words: flags of its own; `fused_adam` among them is a change of the JSON.
        about: what it shows.
    """

    model: str
    seq_len: int
    contender: str
    words: str = ""
    about: str = ""

    @property
    def title(self) -> str:
        return f"{self.model}, {self.seq_len}: {self.contender} {self.words}".strip()


def cases(lengths: tuple[int, int]) -> list[Case]:
    """Return all cases, the most important first."""
    short, long = lengths
    found = []
    for model, seq_len in (("1.3B", short), ("160M", short), ("1.6B MoE", short)):
        found += [
            Case(model, seq_len, OURS, BASE, "the fastest here"),
            Case(model, seq_len, TRAINER, "", "as most people train"),
        ]
    found.insert(2, Case("1.3B", short, PLAIN, "", "a script of one's own"))
    found += [Case("1.3B", short, OURS, *lever) for lever in LEVERS]
    for model in ("1.3B", "160M", "1.6B MoE"):
        found += [Case(model, long, OURS, BASE), Case(model, long, TRAINER)]
    for model in ("160M", "1.6B MoE"):
        found.append(Case(model, short, PLAIN))
    found.append(Case("1.3B", short, TRAINER, "--compile", "Trainer with torch_compile"))
    found += [Case(model, long, PLAIN) for model in ("1.3B", "160M", "1.6B MoE")]
    return found


def command(
    case: Case, micro_batch: int, arguments: argparse.Namespace, scratch: Path
) -> list[str]:
    """Return the command of a case; the same model, batch, JSON and tokens for every contender."""
    models = TOY_MODELS if arguments.toy else MODELS
    tokens = case.seq_len * micro_batch * arguments.accumulation
    common = ["--model_config", models[case.model], "--seq_len", str(case.seq_len)]
    common += ["--log_interval", str(arguments.log_interval)]
    common += ["--micro_batch_size", str(micro_batch)]
    shard = str(shards_of(case, scratch) / "shard-00000.bin")
    peer = ["--shard", shard, "--steps", str(STEPS), "--accumulation", str(arguments.accumulation)]
    words = [word for word in case.words.split() if word != "fused_adam"]
    if case.contender == PLAIN:
        return [sys.executable, "benchmarks/plain_loop.py", *common, *peer, *words]
    profile = scratch / f"{'fused_adam' if 'fused_adam' in case.words else 'profile'}.json"
    profile.write_text(json.dumps(ds_config(arguments.deepspeed_config, "fused" in profile.stem)))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    launcher += ["--master_port", str(arguments.port)]
    common += ["--deepspeed_config", str(profile)]
    if case.contender == TRAINER:
        return [*launcher, "benchmarks/hf_trainer.py", *common, *peer, *words]
    return [
        *launcher, "pretrain.py", *common, "--data", str(shards_of(case, scratch)),
        "--run_dir", str(scratch / "run"), "--batch_tokens", str(tokens),
        "--total_tokens", str(STEPS * tokens), "--checkpoint_interval", str(STEPS),
        "--wandb", "off", "--report_interval", "0", *words,
    ]  # fmt: skip


def shards_of(case: Case, scratch: Path) -> Path:
    return scratch / f"shards-{case.model.replace(' ', '-')}"


def ds_config(path: str, deepspeeds_adam: bool) -> dict[str, Any]:
    """Return the profile with the AdamW that is asked for: DeepSpeed's is compiled for a minute."""
    found = copy.deepcopy(json.loads(Path(path).read_text()))
    found.setdefault("optimizer", {"type": "AdamW", "params": {}})
    if not deepspeeds_adam:
        found["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return found
