"""What a draw becomes: data, a model config, a DeepSpeed JSON, and the flags of pretrain.py."""

import json
import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.encode.pack import pack
from tests.combinations.draws import EXPERTS, FACTORS, ON, Draw, divides_experts, has_stages
from tests.end_to_end.recipe import MINIMUM, PEAK, SEED, SEQ_LEN, STEP_TOKENS
from tests.launching import LLAMA, VOCABULARY, run_module, write_json
from zerolm.shards.reader import open_source

STEPS, INTERVAL, CLIPPING, WARMUP_STEPS = 6, 2, 0.5, 2
TOTAL = STEPS * STEP_TOKENS
SOURCES = {"web": 700, "code": 300, "math": 200, "held_out": 60}  # {name: documents}
SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.05, "num_experts_per_tok": 2}


class Topology(NamedTuple):
    """What a resume may change, and the curve must not depend on."""

    profile: str
    ranks: int
    micro_batch: int
    workers: int
    recompute: str
    compile: bool


@cache
def models() -> dict[str, dict[str, Any]]:
    from tests.model_families.toy_configs import toy_config

    gpt2 = {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
    }  # fmt: skip
    found = {
        "llama": LLAMA,
        "qwen3": toy_config("qwen3") | {"tie_word_embeddings": True},
        "gpt2": gpt2,
        "mixtral": LLAMA | ROUTERS | {"model_type": "mixtral", "num_local_experts": 4},
        "qwen3_next": toy_config("qwen3_next") | ROUTERS,
        "deepseek_v3": toy_config("deepseek_v3")
        | {"output_router_logits": False, "first_k_dense_replace": 1},
        **{name: toy_config(name) for name in ("gpt_neox", "gemma3_text", "phi", "mamba2")},
    }
    del found["mamba2"]["time_step_limit"]  # has an infinity, which JSON has not
    common = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    return {name: each | common | {"pad_token_id": None} for name, each in found.items()}


def texts(seed: int, number: int) -> list[str]:
    """Return made-up documents of 20 to 120 words, with a vocabulary of their own."""
    random_ = random.Random(seed)
    words = ["".join(random_.choices(SYLLABLES, k=random_.randint(1, 3))) for _ in range(80)]
    return [" ".join(random_.choices(words, k=random_.randint(20, 120))) for _ in range(number)]


def write_data(directory: Path) -> None:
    """Write a tokenizer, shards, packing indexes and prompts, unless they exist."""
    done = directory / "complete"
    if done.exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for seed, (name, number) in enumerate(SOURCES.items()):
        lines = [json.dumps({"text": text}) + "\n" for text in texts(seed, number)]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    inputs = [word for name in SOURCES for word in ("--input", directory / f"{name}.jsonl")]
    tokenizer = directory / "tokenizer"
    command("train-tokenizer", *inputs, "--vocab_size", VOCABULARY, "--output", tokenizer)
    for name in SOURCES:
        shards = directory / name
        command("tokenize", "--input", f"{shards}.jsonl", "--tokenizer", tokenizer,
                "--output", shards, "--workers", 1)  # fmt: skip
        pack(open_source(shards), SEQ_LEN)
    (directory / "prompts.txt").write_text(f"{texts(0, 1)[0][:20]}\n")
    done.touch()


def command(*arguments: object) -> None:
    done = run_module("data_prep", *arguments)
    assert done.returncode == 0, done.stderr


# ---- Flags


def topology_of(draw: Draw) -> Topology:
    return Topology(
        draw["profile"], int(draw["ranks"]), 2, int(draw["workers"]), draw["recompute"],
        draw["compile"] == ON,
    )  # fmt: skip


def other_topologies(draw: Draw, number: int) -> Iterator[Topology]:
    """Yield topologies that differ from that of a draw, at random, the most different ones first.

    The router loss of a micro-batch depends on its size, Lion exists on the CPU only, and states of
    Muon cannot be resharded.
    """
    random_ = random.Random(f"topology {number}")
    fixed = draw["model"] in EXPERTS and draw["experts"] != "global_router_loss"
    profiles = [each for each in FACTORS["profile"] if each != draw["profile"]]
    muon = draw["optimizer"] == "muon"
    if draw["optimizer"] == "lion":
        profiles = [each for each in profiles if each.endswith("offload")]
    if not divides_experts({**draw, "ranks": "2" if draw["ranks"] == "1" else "1"}):
        profiles = [each for each in profiles if not each.endswith("experts")]
    if not has_stages({**draw, "ranks": "2" if draw["ranks"] == "1" else "1"}):
        profiles = [each for each in profiles if not each.endswith("stages")]
    while True:
        compiled = draw["compile"] == ON and random_.random() < 0.5
        yield Topology(
            profile=draw["profile"] if muon else random_.choice(profiles),
            ranks=int(draw["ranks"]) if muon else 3 - int(draw["ranks"]),
            micro_batch=2 if fixed else random_.choice((1, 2, 4)),
            workers=random_.choice((0, 1)),
            recompute=random_.choice(("off", "full") if compiled else FACTORS["recompute"]),
            compile=compiled,
        )


def ds_config(draw: Draw, profile: str) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a draw for a profile."""
    stage, muon = int(profile[4]), draw["optimizer"] == "muon"
    zero: dict[str, Any] = {"stage": stage}
    if profile.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    if profile == "zero3_all_sharded":
        zero |= {
            "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5000,
            "stage3_max_live_parameters": 20000, "stage3_max_reuse_distance": 5000,
            "reduce_bucket_size": 10000, "sub_group_size": 20000,
        }  # fmt: skip
    if muon:
        zero["reduce_scatter"] = stage != 3
    kind = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion"}[draw["optimizer"]]
    found: dict[str, Any] = {
        "zero_optimization": zero,
        "bf16": {"enabled": draw["precision"] == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0 if muon else CLIPPING,
        "optimizer": {"type": kind, "params": {"muon_lr": 0.02} if muon else {}},
    }
    if profile.endswith("stages"):
        found["pipeline"] = {"stages": 2}
    if draw["schedule"] == "warmup_lr":
        rates = {"warmup_min_lr": 0.0, "warmup_max_lr": PEAK, "warmup_num_steps": WARMUP_STEPS}
        found["scheduler"] = {"type": "WarmupLR", "params": rates}
    return found


def flags(draw: Draw, topology: Topology, base: Path, run_dir: Path) -> list[object]:
    """Return the flags of pretrain.py; the model config and the JSON are written beside the run.

    Args:
        base: directory that has `data/`.
    """
    directory, data = run_dir.parent, base / "data"
    directory.mkdir(parents=True, exist_ok=True)
    model = write_json(directory / "model.json", models()[draw["model"]])
    ds = ds_config(draw, topology.profile)
    found: list[object] = [
        "--deepspeed_config", write_json(run_dir.with_suffix(".ds.json"), ds),
        "--model_config", model, "--run_dir", run_dir, "--seq_len", SEQ_LEN,
        "--batch_tokens", STEP_TOKENS, "--micro_batch_size", topology.micro_batch,
        "--total_tokens", TOTAL, "--weight_decay", 0.1, "--seed", SEED, "--log_interval", 1,
        "--report_interval", 0, "--wandb", "off", "--hang_timeout", "120s",
        "--checkpoint_interval", INTERVAL, "--checkpoint_keep", 9,
        "--num_workers", topology.workers, f"--gradient_checkpointing={topology.recompute}",
        "--spike_threshold", 0, "--eval_interval", 1 if draw["between"] == "evaluation" else 1000,
        "--val_data", data / "held_out", "--eval_tokens", 640,
    ]  # fmt: skip
    found += ["--compile"] * topology.compile
    found += ["--expert_parallel", 2] * topology.profile.endswith("experts")
    found += _data_flags(draw["data"], data)
    found += _schedule_flags(draw)
    found += _feature_flags(draw, data)
    return found


def _data_flags(kind: str, data: Path) -> list[object]:
    found: list[object] = ["--data", data / "web"]
    if kind == "mixture":
        found = [word for name, share in (("web", 7), ("code", 3), ("math", 0))
                 for word in ("--data", f"{data / name}={share}")]  # fmt: skip
        found += ["--data_stage", f"{TOTAL // 2}:web=1,code=1,math=2"]
    found += ["--packing", "best_fit"] if kind.startswith("packed") else []
    found += ["--document_mask"] if kind.endswith("masked") else []
    if kind == "ramp":
        found += ["--batch_ramp_start", STEP_TOKENS // 2, "--batch_ramp_tokens", TOTAL // 4]
    return found


def _schedule_flags(draw: Draw) -> list[object]:
    kind = draw["schedule"]
    if kind == "warmup_lr":
        return []
    found = ["--schedule", kind, "--learning_rate", PEAK]
    found += ["--warmup_tokens", WARMUP_STEPS * STEP_TOKENS]
    found += ["--min_learning_rate", MINIMUM] if kind != "constant" else []
    return [*found, "--decay_tokens", 2 * STEP_TOKENS] if kind == "wsd" else found


def _feature_flags(draw: Draw, data: Path) -> list[object]:
    values: dict[tuple[str, str], list[object]] = {
        ("ema", ON): ["--ema_tokens", 2 * STEP_TOKENS],
        ("z_loss", ON): ["--z_loss", 0.01],
        ("qk_clip", ON): ["--qk_clip", 0.05],
        ("completep", ON): [
            "--parametrization", "completep", "--base_hidden_size", 48, "--base_layers", 1
        ],
        ("chunked_loss", ON): ["--loss_chunk_tokens", 16],
        ("integrity", ON): ["--corruption_checks", "--replay_interval", 2],
        ("memory_copies", ON): ["--memory_checkpoint_interval", 1],
        ("fp8", ON): ["--fp8"],
        ("experts", "global_router_loss"): ["--global_router_loss"],
        ("experts", "router_z_loss"): ["--router_z_loss", 0.02],
        ("experts", "balance_rate"): ["--balance_rate", 0.02],
        ("between", "samples"): [
            "--prompts", data / "prompts.txt", "--sample_interval", STEP_TOKENS,
            "--sample_length", 4,
        ],
        ("between", "skipped_step"): ["--cooldown_after", 0, "--rollback_after", 0],
        ("between", "rollback"): ["--cooldown_after", 0, "--rollback_after", 1],
    }  # fmt: skip
    return [word for item in draw.items() for word in values.get(item, [])]
