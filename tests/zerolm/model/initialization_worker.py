"""One rank that builds every family on every ZeRO stage and writes the results to a file.

Usage: initialization_worker.py RESULT.json
"""

import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from tests.zerolm.model.initialization_families import (
    FAMILIES,
    SEED,
    family_config,
    sha256_of,
    write_result,
)
from zerolm.attention.choice import choose_attention
from zerolm.engine import shared_memory
from zerolm.model import build as zerolm_model
from zerolm.routers.biased_routers import ExpertLoads, biased_routers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def ds_config(stage, precision, **zero):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50, **zero},
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }


def build(family, stage, precision, **zero):
    config = family_config(family)
    attention = choose_attention(config, "auto", "cpu", DTYPES[precision])
    return config, zerolm_model.build_model(
        config,
        seed=SEED,
        dtype=DTYPES[precision],
        zero3_config=ds_config(stage, precision, **zero) if stage == 3 else None,
        attn_implementation=attention,
        gradient_checkpointing=True,
        device="cpu",
    )


def described(model, config):
    """Every rank must call."""
    hashes = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            hashes[name] = sha256_of(parameter)
    report = zerolm_model.check_initialization(model, config)
    return {
        "sha256": hashes,
        "partitioned": all(hasattr(parameter, "ds_id") for parameter in model.parameters()),
        "fingerprint": zerolm_model.weights_fingerprint(model),
        "report": str(report),
        "problems": list(report.problems),
        "buffers": {
            name: [str(buffer.dtype), sha256_of(buffer)] for name, buffer in model.named_buffers()
        },
    }


def in_engine(model, stage, precision, **changes):
    """Return the model from a DeepSpeed engine, after a forward pass."""
    saved = zerolm_model.float32_buffers(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**ds_config(stage, precision), **changes},
    )
    zerolm_model.restore_float32_buffers(engine.module, saved)
    ids = torch.arange(8).reshape(1, 8)
    loss = engine(input_ids=ids, labels=ids).loss
    return engine, loss.item()


def bare_zero_init(precision):
    """Build a model as in DeepSpeed's documentation, with uninitialised weights."""
    config = family_config("llama")
    with deepspeed.zero.Init(config_dict_or_path=ds_config(3, precision)):
        model = AutoModelForCausalLM.from_config(config)
    report = zerolm_model.check_initialization(model, config)
    return {"report": str(report), "problems": list(report.problems)}


def spoiled_on_the_last_rank():
    """Return rank 0's report on a model that is wrong on the last rank."""
    config, model = build("llama", 2, "fp32")
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        model.model.norm.weight.data.zero_()
    return list(zerolm_model.check_initialization(model, config).problems)


def main(result_path):
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.distributed.barrier()
    shared_memory.release()
    result = {"world size": torch.distributed.get_world_size()}
    generator_before = torch.get_rng_state()
    for family in FAMILIES:
        for precision in DTYPES:
            for stage in (2, 3):  # 1 is built as 2 is
                config, model = build(family, stage, precision)
                result[f"{family} zero{stage} {precision}"] = described(model, config)
    result["generator untouched"] = torch.equal(generator_before, torch.get_rng_state())
    config, model = build("llama", 3, "bf16", offload_param={"device": "cpu"})
    result["llama zero3 bf16 offloaded"] = described(model, config)
    for family in ("llama", "gpt2", "ernie4_5_moe"):
        for stage in (1, 2, 3):
            config, model = build(family, stage, "bf16")
            engine, loss = in_engine(model, stage, "bf16")
            result[f"{family} zero{stage} bf16 in engine"] = described(engine.module, config)
            result[f"{family} zero{stage} bf16 in engine"]["loss"] = loss
            loads = ExpertLoads(biased_routers(engine.module))
            result[f"{family} zero{stage} bf16 in engine"]["experts"] = loads.num_experts
            engine.destroy()
    config, model = build("llama", 2, "bf16")
    cast = {"data_types": {"buffer_dtype": "bf16"}}
    engine, _ = in_engine(model, 2, "bf16", **cast)
    result["llama zero2 bf16 with buffer_dtype"] = described(engine.module, config)
    engine.destroy()
    result["spoiled on the last rank"] = spoiled_on_the_last_rank()
    result["bare zero.Init"] = bare_zero_init("bf16")
    if torch.distributed.get_rank() == 0:
        write_result(result_path, result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
