"""What the chunks of the campaign train: a rotation of tiny runs that covers the features."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.encode.pack import pack
from tests import ROOT, tracked
from tests.end_to_end.recipe import BATCH, CLIPPING, SEQ_LEN, STEP_TOKENS, recipe
from tests.end_to_end.test_expert_balance import DEEPSEEK, MIXTRAL
from tests.launching import EOS, LLAMA, VOCABULARY, write_json, write_shards
from zerolm.common.provenance import versions
from zerolm.engine.reduction_choice import KEY
from zerolm.shards.reader import open_source

SAVE_INTERVAL = 25
SOURCES = {"web": 1200, "code": 500, "math": 300}  # {name: documents}
HELD_OUT = "held_out"
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
}
DEEP = {**LLAMA, "num_hidden_layers": 4}
MODELS = {
    "llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "deepseek": DEEPSEEK, "deep": DEEP,
    "tied": {**DEEP, "tie_word_embeddings": True},
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One kind of run.

    Attributes:
        mixture: of all sources, with weights that change.
        ramp: the batch grows during the first half of the run.
        muon: Muon instead of AdamW.
        buckets: gradients are reduced to their owners in many buckets, during the backward pass.
        offload: optimizer states and its step on the CPU, by DeepSpeed's own Adam.
        workers: loader processes per rank.
        small_disk: the run directory is on a file system of its own, which can be filled.
        layers: of each pipeline stage; none: no stages.
        flags: further flags of pretrain.py.
    """

    name: str
    stage: int
    bf16: bool
    ranks: int = 2
    model: str = "llama"
    mixture: bool = False
    ramp: bool = False
    muon: bool = False
    buckets: bool = False
    offload: bool = False
    workers: int = 1
    small_disk: bool = False
    layers: tuple[int, ...] = ()
    flags: tuple[object, ...] = field(default=())


PACKED = ("--packing", "best_fit", "--document_mask")
EMA = ("--ema_tokens", 20 * STEP_TOKENS)
WAITING = ("--no-async_checkpoint",)
KEEP = ("--checkpoint_keep", 1, "--checkpoint_keep_tokens", 16 * SAVE_INTERVAL * STEP_TOKENS)
WANDB = ("--wandb", "offline")
BOARD = ("--wandb", "off", "--tensorboard")
NONE = ("--wandb", "off")
REPORTS = ("--report_interval", "10s")
COPIES = ("--memory_checkpoint_interval", 10)  # in memory, from which a restart resumes
DIVIDED = ("--expert_parallel", 2)
CHECKS = ("--corruption_checks", "--replay_interval", 100)

ROTATION = (
    Configuration(
        "zero2-bf16-mixture", 2, True, mixture=True, workers=2, small_disk=True,
        flags=(*WANDB, *REPORTS),
    ),
    Configuration(
        "zero3-fp32-packed-ramp", 3, False, ramp=True, flags=(*PACKED, *BOARD, *REPORTS)
    ),
    Configuration(
        "zero2-bf16-compile", 2, True, small_disk=True,
        flags=("--compile", *COPIES, *WAITING, *BOARD),
    ),
    Configuration(
        "zero3-fp32-mixture-ema", 3, False, mixture=True, ramp=True,
        flags=(*EMA, *KEEP, *CHECKS, *WANDB),
    ),
    Configuration(
        "zero1-bf16-muon-packed", 1, True, muon=True, workers=2, small_disk=True,
        flags=(*PACKED, *EMA, *WANDB, *REPORTS),
    ),
    Configuration(
        "zero2-bf16-dropout-ramp", 2, True, model="gpt2", ramp=True, mixture=True,
        flags=(*KEEP, *COPIES, *BOARD, *REPORTS),
    ),
    Configuration(
        "zero3-fp32-compile-mixture", 3, False, mixture=True, flags=("--compile", *WANDB)
    ),
    Configuration(
        "zero2-bf16-offload-packed", 2, True, offload=True, mixture=True, small_disk=True,
        flags=("--packing", "best_fit", *CHECKS, *BOARD, *REPORTS),
    ),
    Configuration(
        "zero3-fp32-one-rank", 3, False, ranks=1, ramp=True, mixture=True, workers=2,
        flags=("--document_mask", *EMA, *COPIES, *WANDB, *REPORTS),
    ),
    Configuration(
        "zero3-bf16-dropout-keep-best", 3, True, model="gpt2", small_disk=True, workers=0,
        flags=(*EMA, "--checkpoint_keep_best", 1, *WAITING, *WANDB),
    ),
    Configuration(
        "zero1-bf16-buckets-mixture", 1, True, buckets=True, mixture=True, small_disk=True,
        flags=(*CHECKS, *BOARD, *REPORTS),
    ),
    Configuration(
        "zero1-bf16-groups", 1, True, ranks=4, buckets=True, mixture=True,
        flags=("--shard_within", 2, *EMA, *WANDB),
    ),
    Configuration(
        "zero1-bf16-experts", 1, True, model="deepseek", mixture=True, small_disk=True,
        flags=(*DIVIDED, "--balance_rate", 0.02, *CHECKS, *BOARD, *REPORTS),
    ),
    Configuration(
        "zero2-fp32-experts-packed", 2, False, model="mixtral", ramp=True, workers=2,
        flags=(*DIVIDED, "--global_router_loss", *PACKED, *EMA, *COPIES, *WANDB),
    ),
    Configuration(
        "zero1-fp32-experts-groups", 1, False, ranks=4, model="deepseek", mixture=True,
        flags=(*DIVIDED, "--balance_rate", 0.02, *EMA, *WAITING, *WANDB),
    ),
    Configuration(
        "zero1-fp32-stages", 1, False, ranks=4, model="tied", layers=(2, 2), mixture=True,
        small_disk=True, flags=(*WANDB, *REPORTS),
    ),
    Configuration(
        "zero2-fp32-stages-packed", 2, False, ranks=4, model="deep", layers=(3, 1), workers=2,
        flags=(*PACKED, *EMA, *KEEP, "--gradient_checkpointing", "full", *BOARD),
    ),
    Configuration(
        "zero1-bf16-three-stages", 1, True, ranks=3, model="deep", layers=(1, 2, 1), mixture=True,
        flags=("--gradient_checkpointing", "selective", "--z_loss", 0.01, *WAITING, *BOARD),
    ),
)  # fmt: skip


def write_data(directory: Path) -> None:
    """Write the shards of all configurations, with their packing indexes, unless they exist."""
    done = directory / "complete"
    if done.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for seed, (name, documents) in enumerate([*SOURCES.items(), (HELD_OUT, 40)]):
        if not (directory / name / "manifest.json").exists():
            write_shards(directory / name, documents, seed)
        pack(open_source(directory / name), SEQ_LEN)
    done.touch()


def profile(configuration: Configuration) -> dict[str, Any]:
    """Return the DeepSpeed JSON."""
    zero: dict[str, Any] = {"stage": configuration.stage}
    if configuration.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    content: dict[str, Any] = {
        "zero_optimization": zero,
        "bf16": {"enabled": configuration.bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 0.0 if configuration.muon else CLIPPING,
    }
    if configuration.layers:
        content["pipeline"] = {
            "stages": len(configuration.layers), "layers": list(configuration.layers),
        }  # fmt: skip
    if configuration.buckets or configuration.muon:
        content["communication_data_type"] = "fp32"
    if configuration.buckets:
        zero |= {KEY: False, "reduce_bucket_size": 10_000}
    if configuration.muon:
        zero["reduce_scatter"] = True
        content["optimizer"] = {"type": "Muon", "params": {"lr": "auto", "muon_lr": 0.02}}
    return content


def flags(configuration: Configuration, base: Path, run_dir: Path, steps: int) -> list[object]:
    """Return the flags of pretrain.py for a run in `run_dir`.

    Args:
        base: directory with `data/`; the model's config and the profile are written there.
        steps: steps with the full batch; a ramp adds some.
    """
    name, data = configuration.name, base / "data"
    model = write_json(base / f"{name}-model.json", MODELS[configuration.model])
    ds_json = write_json(base / f"{name}-ds.json", profile(configuration))
    arguments = recipe(model, data / "web", run_dir, ds_json, steps, micro=2)
    total = steps * STEP_TOKENS
    if configuration.mixture:
        arguments[arguments.index("--data") + 1] = f"{data / 'web'}=7"
        arguments += ["--data", f"{data / 'code'}=3", "--data", f"{data / 'math'}=0"]
        arguments += ["--data_stage", f"{total * 2 // 5}:web=1,code=1,math=2"]
        arguments += ["--data_stage", f"{total * 4 // 5}:web=1,math=3"]
    if configuration.ramp:
        arguments += ["--batch_ramp_start", STEP_TOKENS // 2, "--batch_ramp_tokens", total // 4]
    arguments += ["--val_data", data / HELD_OUT, "--eval_tokens", 640]
    arguments += ["--eval_interval", 4 * SAVE_INTERVAL, "--checkpoint_interval", SAVE_INTERVAL]
    arguments += ["--num_workers", configuration.workers]
    arguments += ["--hang_timeout", "60s" if "--compile" in configuration.flags else "30s"]
    assert BATCH % (2 * configuration.ranks // max(1, len(configuration.layers))) == 0
    return [*arguments, *configuration.flags]


def code_version() -> str:
    """Return a digest of everything that decides what a run without faults computes."""
    digest = hashlib.sha256(repr(sorted(versions().items())).encode())
    for path in tracked("pretrain.py", "zerolm/**/*.py", "tests/soak/configurations.py"):
        digest.update(f"{path.relative_to(ROOT)}".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
