"""What benchmarks/gpu.py measures, the most important first, and the command of each case."""

import argparse
import copy
import functools
import importlib.util
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS, TRAINER, PLAIN = "pretrain.py", "Trainer + DeepSpeed", "plain PyTorch, compiled"
BASE = "--compile"  # what the levers are compared with
LARGEST_MICRO_BATCH = 16  # at 2,048 tokens a sequence
STEPS = 1_000_000  # more than a case takes: it ends by being killed
MODELS = {
    "1.3B": "model_configs/llama-1.3b.json",
    "160M": "model_configs/llama-160m.json",
    "1.6B MoE": "model_configs/moe-1.6b.json",
}
TOY_MODELS = {"1.3B": "model_configs/tiny.json", "160M": "model_configs/tiny.json"}
TOY_MODELS |= {"1.6B MoE": "model_configs/mixtral-tiny.json"}
FUSED_ADAM = "fused_adam"
JSON = r"\d+|true|false"
# Of pretrain.py, each alone beside BASE, by what it may change on one GPU. Torch (2.11) prefers
# cuDNN's attention on Hopper, and is told by this variable not to (pytorch, aten/src/ATen/native/
# transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention`).
FIRST_LEVERS = (
    ("", "nothing is compiled"),
    ("--compile TORCH_CUDNN_SDPA_DEPRIORITIZED=1", "torch's FlashAttention, not cuDNN's"),
)
LEVERS = (
    ("--compile micro/2", "half of the micro-batch"),
    ("--compile --loss_chunk_tokens 2048", "the loss in chunks"),
    ("--compile zero_optimization.overlap_comm=false", "no second stream"),
    ("--compile zero_optimization.reduce_bucket_size=500000000", "ten times the bucket"),
    ("--compile zero_optimization.stage=1", "gradients are not cut"),
    (
        "--compile data_types.grad_accum_dtype=bf16 communication_data_type=bf16",
        "gradients summed in bf16: less exact",
    ),
    ("--gradient_checkpointing=selective", "recomputing norms and activation functions"),
    ("--compile --gradient_checkpointing", "recomputing whole blocks"),
)
SDPA = ("--compile --attn_implementation sdpa", "torch's attention, not FlashAttention's package")
LAST_LEVER = (f"--compile {FUSED_ADAM}", "DeepSpeed's FusedAdam, which nvcc builds first")


@dataclass(frozen=True)
class Case:
    """One contender on one model.

    Attributes:
        model: a name of `MODELS`.
        words: flags of its own; keys of the JSON (`a.b=value`), variables of the environment
            (`A=value`), `micro/2`, and `FUSED_ADAM` for DeepSpeed's instead of torch's.
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

    @property
    def patience(self) -> int:
        """How many times the usual seconds it may take."""
        return 2 if FUSED_ADAM in self.words else 1


@dataclass
class Words:
    """The words of a case, by what they are."""

    flags: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    micro_divisor: int = 1
    deepspeeds_adam: bool = False


def read_words(words: str) -> Words:
    """Sort a case's words."""
    found = Words()
    for word in words.split():
        name, equals, value = word.partition("=")
        if word == FUSED_ADAM:
            found.deepspeeds_adam = True
        elif word.startswith("micro/"):
            found.micro_divisor = int(word.removeprefix("micro/"))
        elif equals and name.isupper():
            found.environment[name] = value
        elif equals and not word.startswith("-"):
            found.keys[name] = json.loads(value) if re.fullmatch(JSON, value) else value
        else:
            found.flags.append(word)
    return found


def cases(lengths: tuple[int, int]) -> list[Case]:
    """Return all cases, the most important first."""
    short, long = lengths
    found = [
        Case("1.3B", short, OURS, BASE, "the fastest here"),
        Case("1.3B", short, TRAINER, "", "as most people train"),
        Case("1.3B", short, PLAIN, "", "a script of one's own"),
        *(Case("1.3B", short, OURS, *lever) for lever in FIRST_LEVERS),
    ]
    for model in ("160M", "1.6B MoE"):
        found += [Case(model, short, OURS, BASE), Case(model, short, TRAINER)]
    packages = any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_interface")))
    levers = (*LEVERS, SDPA) if packages else LEVERS  # else `auto` is sdpa
    found += [Case("1.3B", short, OURS, *lever) for lever in levers]
    for model in ("1.3B", "160M", "1.6B MoE"):
        found += [Case(model, long, OURS, BASE), Case(model, long, TRAINER)]
    found += [Case(model, short, PLAIN) for model in ("160M", "1.6B MoE")]
    found.append(Case("1.3B", short, TRAINER, "--compile", "Trainer with torch_compile"))
    found += [Case(model, long, PLAIN) for model in ("1.3B", "160M", "1.6B MoE")]
    found.append(Case("1.3B", short, OURS, *LAST_LEVER))
    return found


def command(
    case: Case, micro_batch: int, accumulation: int, arguments: argparse.Namespace, scratch: Path
) -> list[str]:
    """Return the command of a case; the same model, batch, JSON and tokens for every contender."""
    words = read_words(case.words)
    tokens = case.seq_len * micro_batch * accumulation
    model = str(model_file(case, arguments.toy, scratch))
    common = ["--model_config", model, "--seq_len", str(case.seq_len)]
    common += ["--log_interval", str(arguments.log_interval)]
    common += ["--micro_batch_size", str(micro_batch)]
    shard = str(shards_of(case, scratch) / "shard-00000.bin")
    peer = ["--shard", shard, "--steps", str(STEPS), "--accumulation", str(accumulation)]
    if case.contender == PLAIN:
        return [sys.executable, "benchmarks/plain_loop.py", *common, *peer, *words.flags]
    profile = scratch / "profile.json"
    profile.write_text(json.dumps(ds_config(arguments.deepspeed_config, words)))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    launcher += ["--master_port", str(arguments.port)]
    common += ["--deepspeed_config", str(profile)]
    if case.contender == TRAINER:
        return [*launcher, "benchmarks/hf_trainer.py", *common, *peer, *words.flags]
    return [
        *launcher, "pretrain.py", *common, "--data", str(shards_of(case, scratch)),
        "--run_dir", str(scratch / "run"), "--batch_tokens", str(tokens),
        "--total_tokens", str(STEPS * tokens), "--checkpoint_interval", str(STEPS),
        "--wandb", "off", "--report_interval", "0", *words.flags,
    ]  # fmt: skip


def shards_of(case: Case, scratch: Path) -> Path:
    return scratch / f"shards-{case.model.replace(' ', '-')}"


def model_file(case: Case, toy: bool, scratch: Path) -> Path:
    """Return the model's config, with as many positions as the case has: rotary ones cost none."""
    path = Path((TOY_MODELS if toy else MODELS)[case.model])
    config = json.loads(path.read_text())
    if config["max_position_embeddings"] >= case.seq_len:
        return path
    longer = scratch / path.name
    longer.write_text(json.dumps(config | {"max_position_embeddings": case.seq_len}))
    return longer


def ds_config(path: str, words: Words) -> dict[str, Any]:
    """Return the profile with a case's keys, and the AdamW that is asked for.

    DeepSpeed's own is compiled for a minute on first use.
    """
    found = copy.deepcopy(json.loads(Path(path).read_text()))
    found.setdefault("optimizer", {"type": "AdamW", "params": {}})
    if not words.deepspeeds_adam:
        found["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    for dotted, value in words.keys.items():
        *blocks, key = dotted.split(".")
        inner = found
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[key] = value
    return found


@functools.cache
def peak_flops() -> float:
    """Return the FLOP/s of the device, once: where it is timed, all cases have the same."""
    import torch

    from zerolm.throughput import device_peak_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device_peak_flops(device, "bf16")[0]


def about(case: Case, arguments: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """Return a model's figures, with a micro-batch that fits every contender; and the peak."""
    import torch

    from zerolm import ds_config, flops, memory
    from zerolm.architecture import load_model_config, parameter_shapes

    with tempfile.TemporaryDirectory() as scratch:
        config = load_model_config(model_file(case, arguments.toy, Path(scratch)))
    shapes = parameter_shapes(config)
    micro = 2
    if torch.cuda.is_available():
        micro = memory.fitting_micro_batch(
            LARGEST_MICRO_BATCH * 2048 // max(2048, case.seq_len),
            case.seq_len,
            config=config,
            shapes=shapes,
            ds=ds_config.load_ds_config(arguments.deepspeed_config),
            world_size=1,
            memory_bytes=int(0.85 * torch.cuda.get_device_properties(0).total_memory),
            checkpointing=False,
        )
    model = {
        "flops_per_token": flops.flops_per_token(config, shapes, case.seq_len),
        "micro_batch": micro,
    }
    return model, peak_flops()
