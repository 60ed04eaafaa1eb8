"""CompleteP has the curve of plain PyTorch with multipliers in the forward pass, on every stage."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.end_to_end import killed_runs, plain_pytorch, runs_in_one_process
from tests.end_to_end.recipe import BATCH, MINIMUM, PEAK, SEED, SEQ_LEN, recipe
from tests.launching import LLAMA, rows, write_json
from zerolm.__main__ import main

STEPS, STOP, MICRO = 20, 9, 2
EPSILON = 2e-5  # of the size of gradients, so that its factors count
WIDTH, DEPTH = 64 / 48, 3  # of the model, divided by the base's
MODELS = {
    "llama": {**LLAMA, "num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3,
        "n_head": 4, "n_positions": 64, "vocab_size": LLAMA["vocab_size"], "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
    },
    "mixtral": {
        **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def flags(
    base: Path, corpus: Path, name: str, model: str, stage: int, *more: object,
    offload: bool = False, scaled: bool = True, steps: int = STEPS,
) -> list[Any]:  # fmt: skip
    (base / model).mkdir(exist_ok=True)
    config = write_json(base / model / "config.json", MODELS[model])
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    ds = {
        "zero_optimization": zero, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"eps": EPSILON}},
    }  # fmt: skip
    profile = write_json(base / f"{stage}-{offload}.json", ds)
    if scaled:
        more = (*more, "--parametrization", "completep")
        if "--base_layers" not in more:
            more = (*more, "--base_hidden_size", 48, "--base_layers", 1)
    return [
        *recipe(config, corpus, base / name, profile, steps, MICRO), "--warmup_tokens", 0,
        "--schedule", "cosine", "--wandb", "off", "--report_interval", 0, "--spike_threshold", 0,
        "--checkpoint_interval", 1000, *more,
    ]  # fmt: skip


def multiplied(factor: float, module: Any, arguments: Any, output: Any) -> Any:
    return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor


def table(name: str, value: torch.Tensor) -> tuple[float, float, float, float]:
    """Return factors of deviation, rate, decay and epsilon: table 1 of arXiv 2505.01618."""
    if not any(part.isdigit() for part in name.split(".")):
        return 1, 1, value.ndim > 1, 1 / WIDTH
    epsilon = 1 / (WIDTH * DEPTH)
    if value.ndim == 1 or name.endswith("gate.weight"):  # of a router
        return 1, 1, value.ndim > 1, epsilon
    return WIDTH**-0.5, 1 / WIDTH, WIDTH, epsilon


def multiply_in_the_forward_pass(model: torch.nn.Module) -> None:
    add_multipliers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = table(name, parameter)[0]
            if name.endswith("c_proj.weight"):  # GPT-2 divides it by the layers, here the base's
                deviation *= DEPTH**0.5
            parameter.mul_(deviation)


def take_multipliers_out_of_the_weights(model: torch.nn.Module) -> None:
    """Turn the weights of a run, which contain the multipliers, into those of the table."""
    add_multipliers(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
            if part in ("o_proj", "down_proj", "c_proj"):
                parameter.mul_(DEPTH)
            elif part == "lm_head":
                parameter.mul_(WIDTH)


def add_multipliers(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        part = name.rpartition(".")[2]
        if part in ("self_attn", "attn", "attention", "mlp", "fc2"):
            module.register_forward_hook(partial(multiplied, 1 / DEPTH))
        elif part in (
            "gate",
            "shared_expert_gate",
        ):  # returns chosen experts too, so its input is multiplied
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0] / WIDTH,))
        elif part == "lm_head":
            module.register_forward_hook(partial(multiplied, 1 / WIDTH))


def optimizer_of(masters: dict[str, torch.Tensor], weight_decay: float) -> torch.optim.Optimizer:
    groups = []
    for name, master in masters.items():
        _, rate, decay, epsilon = table(name, master)
        groups.append({
            "params": [master], "ratio": rate, "weight_decay": weight_decay * decay,
            "eps": EPSILON * epsilon,
        })  # fmt: skip
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def plain_curve(
    corpus: Path, model: str, steps: int = STEPS, source: Path | None = None
) -> np.ndarray:
    change = take_multipliers_out_of_the_weights if source else multiply_in_the_forward_pass
    curve = plain_pytorch.train(
        MODELS[model], corpus, seed=SEED, seq_len=SEQ_LEN, batch_sequences=BATCH,
        micro_batch_size=MICRO, steps=steps, peak=PEAK, minimum=MINIMUM, warmup_tokens=0,
        clipping=0.0, optimizer_of=optimizer_of, change=change, source=source,
    )  # fmt: skip
    return np.array([step.loss for step in curve])


def losses(run_dir: Path) -> np.ndarray:
    return np.array(list(rows(run_dir, "train/loss").values()))


def differences(base: Path, names: list[str], curve_of: Callable[[str], np.ndarray]) -> list[str]:
    """Return the runs whose losses are not within 1e-6 of a curve."""
    found = []
    for name in names:
        curve = curve_of(name)
        difference = float(np.abs(losses(base / name) / curve - 1).max())
        print(f"{name}: losses at most {difference:.1e} away")
        assert curve[0] - curve[-1] > 0.05
        found += [f"{name}: {difference:.1e}"] if difference > 1e-6 else []
    return found


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [("mixtral", 3, True)]),  # all families: tests/zerolm/features/test_completep.py
        pytest.param(
            1,
            [(model, stage, False) for model in MODELS for stage in (1, 2, 3)],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            2,
            [*((model, stage, False) for model in MODELS for stage in (1, 2, 3)),
             ("llama", 2, True), ("llama", 3, True), ("mixtral", 2, True)],
            marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_curves_equal_multipliers_in_the_forward_pass(tmp_path, corpus, world_size, cases) -> None:
    names = [f"{model}-{stage}-{offload}" for model, stage, offload in cases]
    jobs = [
        {"flags": flags(tmp_path, corpus, name, model, stage, offload=offload)}
        for name, (model, stage, offload) in zip(names, cases, strict=True)
    ]
    at_base = ("--base_hidden_size", 64, "--base_layers", 3)
    jobs += [
        {"flags": flags(tmp_path, corpus, "base", "llama", 2, *at_base, steps=5)},
        {"flags": flags(tmp_path, corpus, "standard", "llama", 2, scaled=False, steps=5)},
    ]
    runs_in_one_process.launch(jobs, tmp_path, world_size)
    wrong = differences(tmp_path, names, lambda name: plain_curve(corpus, name.split("-")[0]))
    assert not wrong, "\n".join(wrong)
    for key in ("train/loss", "train/grad_norm", "train/param_norm"):  # in every bit
        assert rows(tmp_path / "base", key) == rows(tmp_path / "standard", key)
        assert len(rows(tmp_path / "base", key)) == 5


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_run_resumes_on_another_topology_and_after_a_kill(tmp_path, corpus) -> None:
    topologies = {"first": (2, 2, False), "second": (1, 3, False), "third": (2, 3, True)}
    for end, (world_size, stage, offload) in zip((STOP, 15, 0), topologies.values(), strict=True):
        job = flags(tmp_path, corpus, "moved", "llama", stage, offload=offload)
        runs_in_one_process.launch([{"flags": job, "until": end}], tmp_path, world_size)
    assert not differences(tmp_path, ["moved"], lambda _: plain_curve(corpus, "llama"))

    def arguments(name: str) -> list[object]:
        return flags(tmp_path, corpus, name, "llama", 2, "--checkpoint_interval", 10, steps=60)

    keys = ("train/loss", "train/grad_norm", "train/param_norm")
    killed_runs.compare_with_killed(tmp_path, arguments, keys)


@pytest.mark.soak
def test_a_run_continues_from_a_run_with_the_same_base(tmp_path, corpus) -> None:
    """Its weights have that scale already, so nothing is multiplied but the optimizer's options."""
    trunk = flags(tmp_path, corpus, "trunk", "llama", 2, steps=6)
    source = ("--init_from", tmp_path / "trunk")
    later = flags(tmp_path, corpus, "later", "llama", 2, *source, steps=10)
    standard = flags(tmp_path, corpus, "standard", "llama", 2, steps=6, scaled=False)
    standard += source
    jobs = [{"flags": each} for each in (trunk, later, standard)]
    output = runs_in_one_process.launch(jobs, tmp_path)
    assert main(["export", str(tmp_path / "trunk"), str(tmp_path / "source")]) == 0
    curve = partial(plain_curve, corpus, "llama", source=tmp_path / "source")
    np.testing.assert_allclose(losses(tmp_path / "later"), curve(10), rtol=1e-6)
    width = f"{WIDTH:g} times the other run's rate for hidden matrices"
    assert width in output and f"{WIDTH * DEPTH:g} times for output projections" in output
    assert np.abs(losses(tmp_path / "standard") / curve(6) - 1).max() > 1e-5, "other rates"
