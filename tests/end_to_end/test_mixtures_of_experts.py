"""Mixtures of experts: losses, with the router's, and router metrics equal plain PyTorch's.

Each micro-batch has 16 tokens and 32 experts, of which each token uses two: some experts get no
token, and different ones on each rank. Under ZeRO-3, a rank that did not take part in gathering the
weights of such an expert would hang.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import plain_optimizers, plain_pytorch, runs_in_one_process, step_comparison
from tests.end_to_end.recipe import CLIPPING, profile
from tests.launching import LLAMA, ROOT, rows, run_ranks, write_json

EXPERTS, TOP_K, STEPS = 32, 2, 20
SEQ_LEN, BATCH, MICRO, SEED, PEAK, MINIMUM = 8, 8, 2, 5, 3e-3, 3e-4
WARMUP_TOKENS = 2 * BATCH * SEQ_LEN
COMMON = {"output_router_logits": True, "router_aux_loss_coef": 0.05, "num_experts_per_tok": TOP_K}
MODELS = {
    "mixtral": {
        **LLAMA, **COMMON, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_local_experts": EXPERTS,
    },
    "olmoe": {  # the shipped config with the sizes of the others; its router does not normalise
        **json.loads((ROOT / "model_configs" / "olmoe-1b-7b.json").read_text()), **COMMON,
        **{name: LLAMA[name] for name in LLAMA if name not in ("model_type", "architectures")},
        "num_experts": EXPERTS,
    },
    "qwen3_moe": {
        **LLAMA, **COMMON, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS, "moe_intermediate_size": 64,
    },
}  # fmt: skip


MUON = {"type": "Muon", "params": {"muon_lr": 0.02}}
PLAIN_MUON = plain_optimizers.muon(0.02 / PEAK)
# Newton-Schulz in fp16 changes plain PyTorch's own losses by 4.2e-4, its auxiliary loss by 2.9e-3
# (test_rounding.py). A few tokens give a gradient of rank 16, whose other singular values are
# rounding errors: five iterations multiply them by 485, in float32 to 7e-5 of the update.
FP16, AUXILIARY_FP16, MATRICES = 2e-3, 5e-3, 2e-4


def job(base: Path, corpus: Path, model: str, stage: int, bf16: bool, muon: str = "") -> dict:
    """Return a job for `runs_in_one_process`; `muon`: "fp16" as in DeepSpeed, or "exact"."""
    name = f"{model}-{stage}-{'bf16' if bf16 else 'fp32'}{muon and '-muon-' + muon}"
    config = write_json(base / f"{name}.config.json", MODELS[model])
    json_file = profile(base / f"{name}.json", stage, bf16)
    if muon:
        ds = json.loads(json_file.read_text())
        ds |= {"optimizer": MUON, "gradient_clipping": 0.0}
        ds["zero_optimization"]["reduce_scatter"] = stage != 3
        write_json(json_file, ds)
    flags = [
        "--deepspeed_config", json_file, "--model_config", config, "--data", corpus,
        "--run_dir", base / name, "--seq_len", SEQ_LEN, "--batch_tokens", BATCH * SEQ_LEN,
        "--micro_batch_size", MICRO, "--total_tokens", STEPS * BATCH * SEQ_LEN,
        "--learning_rate", PEAK, "--min_learning_rate", MINIMUM, "--weight_decay", 0.1,
        "--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--seed", SEED,
        "--log_interval", 1, "--wandb", "off", "--report_interval", 0,
    ]  # fmt: skip
    job = {"flags": flags, "name": name, "curve": (model, bool(bf16), muon != "")}
    if muon == "exact":
        (base / f"{name}-weights").mkdir()
        job |= {"exact": True, "weights": base / f"{name}-weights"}
    return job


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "offload"), [(2, False), (3, False), (3, True)])
def test_compiled_blocks_with_experts_give_the_curve_of_plain_pytorch(
    tmp_path, corpus, stage, offload
) -> None:
    run = job(tmp_path, corpus, "mixtral", stage, bf16=False)
    if offload:
        json_file = tmp_path / f"{run['name']}.json"
        ds = json.loads(json_file.read_text())
        ds["zero_optimization"] |= {
            "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}
        }  # fmt: skip
        write_json(json_file, ds)
    done = run_ranks(2, *run["flags"], "--compile", timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "compile: 2 blocks" in done.stdout and "graph breaks" not in done.stdout
    curve = plain_curve("mixtral", corpus)
    assert not differences(tmp_path / run["name"], curve, 1e-5)


def plain_curve(
    model: str, corpus: Path, bf16: bool = False, muon: bool = False, optimizer_of: Any = None
) -> list[plain_pytorch.Step]:
    return plain_pytorch.train(
        MODELS[model], corpus, seed=SEED, seq_len=SEQ_LEN, batch_sequences=BATCH,
        micro_batch_size=MICRO, steps=STEPS, peak=PEAK, minimum=MINIMUM,
        warmup_tokens=WARMUP_TOKENS, clipping=0.0 if muon else CLIPPING, bf16=bf16,
        optimizer_of=optimizer_of or (PLAIN_MUON if muon else plain_pytorch.adamw),
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("world_size", "models"),
    [
        *(
            pytest.param(
                2, [(model, stage, bf16) for stage in (1, 2, 3) for bf16 in (0, 1)], id=model
            )
            for model in MODELS
        ),
        pytest.param(
            2,
            [("mixtral", stage, False, muon) for stage in (2, 3) for muon in ("exact", "fp16")],
            id="two ranks, Muon",
        ),
        pytest.param(1, [("mixtral", 3, False)], id="one rank"),
    ],
)
def test_losses_and_router_metrics_equal_plain_pytorch(
    tmp_path, corpus, world_size, models
) -> None:
    jobs = [job(tmp_path, corpus, *which) for which in models]
    runs_in_one_process.launch(jobs, tmp_path, world_size)
    curves: dict = {}
    wrong = []
    for run in jobs:
        model, bf16, muon = key = run["curve"]
        if key not in curves:
            curves[key] = plain_curve(model, corpus, bf16, muon)
        tolerance = 2e-2 if bf16 else FP16 if muon and "exact" not in run else 1e-6
        wrong += differences(tmp_path / run["name"], curves[key], tolerance)
        if "weights" in run:
            follower = step_comparison.RunFollower(PLAIN_MUON, run["weights"])
            plain_curve(model, corpus, bf16, muon, follower)
            largest = [
                max(value for name, value in step.updates.items() if "proj" in name)
                for step in follower.steps
            ]
            name = run["name"]
            print(f"{name}: updates of a matrix at most {max(largest):.1e} from plain PyTorch")
            if max(largest) > MATRICES:
                wrong.append(f"{name}: updates of a matrix by step: {largest}")
    assert not wrong, "\n".join(wrong)


def differences(run_dir: Path, curve: list[plain_pytorch.Step], tolerance: float) -> list[str]:
    """Return one line for each metric of a run that differs from plain PyTorch's."""
    expected = {
        "train/loss": [step.loss for step in curve],
        "train/auxiliary_loss": [step.auxiliary for step in curve],
        "train/grad_norm": [step.grad_norm for step in curve],
        "train/param_norm": [step.param_norms[""] for step in curve],
        "router/entropy": [step.entropies.mean() / math.log(EXPERTS) for step in curve],
        "router/load_imbalance": [imbalances(step).mean() for step in curve],
        "router/load_imbalance/router.1": [imbalances(step)[1] for step in curve],
        "router/unused_experts": [(step.routed.sum(0) == 0).mean() for step in curve],
    }
    wrong = []
    if "muon" in run_dir.name:  # Muon logs the norm of the update
        del expected["train/grad_norm"]
    for key, values in expected.items():
        found = np.array(list(rows(run_dir, key).values()))
        difference = float(np.abs(found - values).max() / max(np.abs(values).max(), 1e-3))
        # in bf16 the router may choose another expert for a token: 1 of 64 tokens more or less
        allowed = {"train/grad_norm": 10}.get(key, 1) * tolerance
        if key == "train/auxiliary_loss" and tolerance == FP16:
            allowed = AUXILIARY_FP16
        if key.startswith("router/") and tolerance > 1e-3:
            allowed = 0.5
        print(f"{run_dir.name}: {key}: at most {difference:.1e} from plain PyTorch")
        if difference > allowed:
            wrong.append(f"{run_dir.name}: {key}: {difference:.1e} from plain PyTorch")
    assert expected["train/loss"][0] - expected["train/loss"][-1] > 0.02
    assert min(expected["train/auxiliary_loss"]) > 0.05, (
        "the auxiliary loss must be large enough to matter"
    )
    for step in curve:  # the premise: each rank has other experts without a token
        without = [{*zip(*np.where(chunk == 0), strict=True)} for chunk in step.routed]
        assert all(without) and len({frozenset(each) for each in without}) == len(without)
    return wrong


def imbalances(step: plain_pytorch.Step) -> np.ndarray:
    """Return (layers,) the tokens of the busiest expert, divided by the mean over experts."""
    counts = step.routed.sum(0)
    return counts.max(1) / counts.mean(1)
