"""Compares DeepSpeed's expert parallelism (AutoEP) with plain PyTorch, and resumes and exports it.

    python -m benchmarks.autoep

Two ranks train a tiny Mixtral with router loss for 20 steps, in float32, with the experts divided
among them; then five more, which a fresh engine repeats from a checkpoint. pretrain.py refuses
AutoEP (docs/experts.md); this shows what works of it by itself. DeepSpeed 0.19.8 calls a method of
transformers with arguments that 5.23 no longer takes; it is replaced here.
"""

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

STEPS, REPEATED, ROWS = 20, 5, 2
MIXTRAL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "sliding_window": None,
    "output_router_logits": True, "router_aux_loss_coef": 0.02,
}  # fmt: skip
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def accept_names_of_classes() -> None:
    """Let the registry of recorded outputs be read and written by the name of a class too."""
    from transformers.utils import output_capturing

    registry: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    if registry is dict:  # transformers 5.17
        return

    def name(key: Any) -> str:
        return key if isinstance(key, str) else str(key.__class__)

    registry.get = lambda self, key, default=None: dict.get(self, name(key)) or default or {}
    registry.__setitem__ = lambda self, key, value: dict.__setitem__(self, name(key), value)


def start(stage: int, seed: int) -> Any:
    """Return an engine with a new model, and a copy of the model before its experts are divided."""
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model("mixtral", **MIXTRAL)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    ).train()
    plain = copy.deepcopy(model)
    profile = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "expert_parallel": {
            "enabled": True, "autoep_size": dist.get_world_size(), "preset_model": "mixtral",
        },
    }  # fmt: skip
    return deepspeed.initialize(model=model, config=profile)[0], plain


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def step(engine: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Take a step on this rank's rows; return the mean loss of all ranks and the gradient norm."""
    loss = loss_of(engine, ids.chunk(dist.get_world_size())[dist.get_rank()])
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size(), float(engine.get_global_grad_norm())


def work(stage: int, directory: str) -> None:
    """Print the row of a stage, on rank 0."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    accept_names_of_classes()
    generator, ranks = torch.Generator().manual_seed(1), dist.get_world_size()
    shape = STEPS + REPEATED, ROWS * ranks, 32
    batches = torch.randint(0, 256, shape, generator=generator)
    engine, plain = start(stage, seed=0)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    losses, norms = [], []
    for ids in batches[:STEPS]:
        loss, norm = step(engine, ids)
        expected = sum(loss_of(plain, part) for part in ids.chunk(ranks)) / ranks
        expected.backward()
        reference = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(abs(loss / float(expected) - 1))
        norms.append(abs(norm / float(reference) - 1))
    engine.save_checkpoint(directory, tag="saved")
    dist.barrier()
    following = [step(engine, ids) for ids in batches[STEPS:]]
    resumed, _ = start(stage, seed=5)
    resumed.load_checkpoint(directory, tag="saved")
    same = following == [step(resumed, ids) for ids in batches[STEPS:]]
    if dist.get_rank() == 0:
        try:
            get_fp32_state_dict_from_zero_checkpoint(directory, tag="saved")
            export = "works"
        except (NotImplementedError, ValueError) as error:
            export = "fails: " + str(error).replace(f"{directory}/saved/", "").split(". ")[0]
        resume = "bit-identical" if same else "differs"
        row = f"| {stage} | {max(losses):.1e} | {max(norms):.1e} | {resume} | {export} |"
        Path(directory, "row").write_text(row)
    dist.barrier()
    os._exit(0)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    from tests.launching import run_workers

    print("| ZeRO | losses | gradient norms | resume | DeepSpeed's export |\n|---|---|---|---|---|")
    for stage in (1, 2, 3):
        with tempfile.TemporaryDirectory() as directory:
            run_workers(2, Path(__file__), "--worker", str(stage), directory, timeout=300)
            print(Path(directory, "row").read_text(), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), sys.argv[3])
    main()
