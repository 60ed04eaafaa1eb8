"""Features of DeepSpeed that pretrain.py refuses, each against plain PyTorch.

    python benchmarks/declined_features.py [--steps 20] [--cases zenflow lamb ...] [--output FILE]

A tiny Llama (or Mixtral) is trained by a bare DeepSpeed loop, on a CPU with Gloo, and compared with
a single plain PyTorch process: same initial weights, same sequences, fp32. The table has the
largest relative difference of a loss, that of the first loss (before any update), and for a feature
that does not run here the error. `none` is ZeRO-2 without any feature: the difference to expect.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

BATCH, SEQ_LEN, VOCABULARY, LR, BETAS = 8, 32, 256, 2e-3, (0.9, 0.95)
SECONDS = 240  # of one case; SuperOffload waits 60 s for its optimizer process
OFFLOAD = {"device": "cpu", "pin_memory": False}
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 4, "update_interval": 4}
EXPERT_PARALLEL = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
DATA_EFFICIENCY = {
    "enabled": True,
    "data_sampling": {
        "enabled": True,
        "curriculum_learning": {
            "enabled": True,
            "curriculum_metrics": {
                "seqlen": {
                    "difficulty_type": "value",
                    "clustering_type": "single_cluster",
                    "min_difficulty": 8,
                    "max_difficulty": SEQ_LEN,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
                }
            },
        },
    },
}
# Name: (ranks, optimizer, changes to the DeepSpeed JSON).
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "none": (2, "adamw", {}),
    "offload": (2, "adamw", {"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD}}),
    "zenflow": (
        2,
        "adamw",
        {"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD, "zenflow": ZENFLOW}},
    ),
    "superoffload": (
        2,
        "adamw",
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {**OFFLOAD, "super_offload": True},
            }
        },
    ),
    "deepcompile": (2, "adamw", {"compile": {"deepcompile": True}}),
    "autoep": (2, "adamw", {"expert_parallel": EXPERT_PARALLEL}),
    "data_efficiency": (2, "adamw", {"data_efficiency": DATA_EFFICIENCY}),
    "lamb_1_rank": (1, "lamb", {}),
    "lamb_2_ranks": (2, "lamb", {}),
}


class Lamb(torch.optim.Optimizer):
    """LAMB without weight decay (You et al. 2019, arXiv 1904.00962, algorithm 2)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=0, m=torch.zeros_like(param), v=torch.zeros_like(param))
                state["step"] += 1
                state["m"].lerp_(param.grad, 1 - beta1)
                state["v"].lerp_(param.grad.square(), 1 - beta2)
                update = state["m"] / (1 - beta1 ** state["step"])
                update /= (state["v"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                trust = param.norm() / update.norm()
                param.add_(update * (trust if trust > 0 else 1.0), alpha=-group["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        train(arguments.one, arguments.steps)
    table = compare(arguments.cases, arguments.steps)
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


def compare(cases: list[str], steps: int) -> str:
    """Run each case and plain PyTorch, and return the table."""
    import deepspeed
    import transformers

    lines = [
        f"{date.today()}, {platform.processor() or platform.machine()}, DeepSpeed "
        f"{deepspeed.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; `python benchmarks/declined_features.py --steps {steps}`\n",
        "| feature | ranks | first loss | all losses | last loss (plain) |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        ranks, optimizer, _ = CASES[case]
        plain = plain_losses(case, optimizer, steps)
        losses, error = run_case(case, ranks, steps)
        if error:
            lines.append(f"| {case} | {ranks} | does not run: {error} | | |")
            continue
        differences = [
            abs(ours - theirs) / theirs for ours, theirs in zip(losses, plain, strict=True)
        ]
        lines.append(
            f"| {case} | {ranks} | {differences[0]:.1e} | {max(differences):.1e} "
            f"| {losses[-1]:.5f} ({plain[-1]:.5f}) |"
        )
    return "\n".join(lines) + "\n"


def run_case(case: str, ranks: int, steps: int) -> tuple[list[float], str]:
    """Return (losses, error) of a case in its own processes."""
    with tempfile.TemporaryDirectory() as work:
        argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        argv += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", __file__]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "LOSSES": f"{work}/losses"}
        output = Path(work, "output")
        with output.open("w") as file:
            try:
                subprocess.run(
                    [*argv, "--one", case, "--steps", str(steps)],
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return [], f"no result in {SECONDS} s"
        losses = Path(work, "losses")
        if losses.exists():
            return [float(line) for line in losses.read_text().split()], ""
        lines = [line for line in output.read_text().splitlines() if "Error: " in line]
        return [], lines[0].partition("]: ")[2].strip()[:160] if lines else "ended without an error"


def train(case: str, steps: int) -> None:
    """Train one case in this rank; rank 0 writes the mean loss of each step."""
    import deepspeed
    from deepspeed import comm

    ranks, optimizer, changes = CASES[case]
    model = tiny_model(case)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 2},
        **changes,
    }
    own = None
    if optimizer == "lamb":
        own = Lamb(model.parameters(), lr=LR, betas=BETAS)
        config["zero_allow_untested_optimizer"] = True
    else:
        offloaded = "offload_optimizer" in config["zero_optimization"]
        params = {"lr": LR, "betas": BETAS, "weight_decay": 0.0}
        params |= {} if offloaded else {"torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": params}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=own, model_parameters=model.parameters(), config=config
    )
    if case == "deepcompile":
        engine.compile()
    rank = comm.get_rank()
    losses = []
    for step in range(steps):
        mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        loss = loss_of(engine, sequences(step)[mine])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        comm.all_reduce(mean)
        losses.append(mean.item() / ranks)
    if rank == 0:
        Path(os.environ["LOSSES"]).write_text("\n".join(map(repr, losses)))
    comm.barrier()
    os._exit(0)  # DeepSpeed's threads may abort at interpreter shutdown


def plain_losses(case: str, optimizer: str, steps: int) -> list[float]:
    """Return the losses of the same training in plain PyTorch."""
    model = tiny_model(case)
    step_with: torch.optim.Optimizer = (
        Lamb(model.parameters(), lr=LR, betas=BETAS)
        if optimizer == "lamb"
        else torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    )
    losses = []
    for step in range(steps):
        loss = loss_of(model, sequences(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step_with.step()
        step_with.zero_grad()
        losses.append(loss.item())
    return losses


def tiny_model(case: str) -> torch.nn.Module:
    """Return a model with two layers, always with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if case == "autoep":
        return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4))
    return LlamaForCausalLM(LlamaConfig(**shape))


def sequences(step: int) -> torch.Tensor:
    """Return the batch of a step, (BATCH, SEQ_LEN + 1): windows of a fixed random text."""
    text = torch.randint(0, VOCABULARY, (4096,), generator=torch.Generator().manual_seed(1))
    starts = torch.randint(
        0, len(text) - SEQ_LEN, (BATCH,), generator=torch.Generator().manual_seed(100 + step)
    )
    return torch.stack([text[start : start + SEQ_LEN + 1] for start in starts.tolist()])


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


if __name__ == "__main__":
    main()
