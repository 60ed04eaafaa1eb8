"""Experts balanced by a bias: losses, loads and biases equal those of plain PyTorch."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end import plain_pytorch, runs_in_one_process
from tests.end_to_end.killed_runs import compare_with_killed, stopped_and_resumed
from tests.end_to_end.plain_experts import Penalties
from tests.end_to_end.recipe import profile
from tests.launching import (
    LLAMA,
    rows,
    run_module,
    run_ranks,
    write_json,
    write_shards,
)
from tests.model_families.toy_configs import toy_config
from zerolm.checkpoint.directory import candidates
from zerolm.ds_files.zero_files import Weights

EXPERTS, STEPS, RATE = 16, 40, 0.02
SEQ_LEN, BATCH, SEED, PEAK, MINIMUM = 16, 8, 5, 3e-3, 3e-4
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


LAGUNA = {  # its bias is a frozen parameter
    **toy_config("laguna"), "architectures": ["LagunaForCausalLM"], "num_experts": EXPERTS,
    "num_attention_heads_per_layer": [4, 4], "output_router_logits": False,
}  # fmt: skip


MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}  # fmt: skip
BIAS = ("--balance_rate", RATE)
LOSSES = ("--global_router_loss", "--router_z_loss", 0.02, "--z_loss", 0.01)


def flags(
    base: Path, corpus: Path, name: str, stage: int, *, micro: int = 2, bf16: bool = False,
    steps: int = STEPS, model: dict = DEEPSEEK, more: tuple[object, ...] = BIAS,
) -> list[object]:  # fmt: skip
    return [
        "--deepspeed_config", profile(base / f"zero{stage}-{bf16}.json", stage, bf16),
        "--model_config", write_json(base / f"{model['model_type']}.json", model),
        "--data", corpus, "--run_dir", base / name,
        "--seq_len", SEQ_LEN, "--batch_tokens", BATCH * SEQ_LEN, "--micro_batch_size", micro,
        "--total_tokens", steps * BATCH * SEQ_LEN, "--learning_rate", PEAK,
        "--min_learning_rate", MINIMUM, "--weight_decay", 0.1,
        "--warmup_tokens", 2 * BATCH * SEQ_LEN, "--schedule", "cosine", "--seed", SEED,
        "--log_interval", 1, "--wandb", "off", "--report_interval", 0, *more,
    ]  # fmt: skip


def plain_curve(
    corpus: Path, rate: float = RATE, steps: int = STEPS, micro: int = 2
) -> list[plain_pytorch.Step]:
    return plain_pytorch.train(
        DEEPSEEK, corpus, seed=SEED, seq_len=SEQ_LEN, batch_sequences=BATCH, micro_batch_size=micro,
        steps=steps, peak=PEAK, minimum=MINIMUM, warmup_tokens=2 * BATCH * SEQ_LEN,
        balance_rate=rate,
    )  # fmt: skip


def final_biases(run_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = candidates(run_dir)[0][0]
    weights = Weights(checkpoint.directory, checkpoint.manifest)
    return {name: weights[name] for name in weights.buffers if "e_score_correction" in name}


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [1, 2])
def test_biases_equal_plain_pytorch_exactly(tmp_path, corpus, world_size) -> None:
    kinds = [(stage, micro) for stage in (1, 2, 3) for micro in (1, 2, 4)]
    names = {kind: f"zero{kind[0]}-micro{kind[1]}" for kind in kinds}
    jobs = [
        {"flags": flags(tmp_path, corpus, names[stage, micro], stage, micro=micro)}
        for stage, micro in kinds
    ]
    runs_in_one_process.launch(jobs, tmp_path, world_size)
    curve = plain_curve(corpus)
    expected = {
        "train/loss": [step.loss for step in curve],
        "train/grad_norm": [step.grad_norm for step in curve],
        "router/load_imbalance": [imbalance(step) for step in curve],
        "router/unused_experts": [(step.routed == 0).mean() for step in curve],
    }
    wrong = []
    for name in names.values():
        for key, values in expected.items():
            found = np.array(list(rows(tmp_path / name, key).values()))
            difference = float(np.abs(found - values).max() / np.abs(values).max())
            print(f"{world_size} ranks, {name}: {key}: {difference:.1e}")
            if difference > (1e-5 if key == "train/grad_norm" else 1e-6):
                wrong.append(f"{name}: {key}: {difference:.1e}")
        biases = final_biases(tmp_path / name)
        assert len(biases) == 2
        for bias_name, bias in curve[-1].biases.items():
            assert bias.abs().max() > 5 * RATE, "the biases must move for this test"
            if not torch.equal(bias, biases[bias_name]):
                wrong.append(f"{name}: {bias_name}: {bias - biases[bias_name]}")
    assert not wrong, "\n".join(wrong)


def imbalance(step: plain_pytorch.Step) -> float:
    counts = step.routed.sum(0)
    return float((counts.max(1) / counts.mean(1)).mean())


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_each_way_of_balancing_evens_the_loads_of_300_steps(tmp_path, monkeypatch) -> None:
    """Prints the table of docs/experts.md."""
    monkeypatch.setattr(sys.modules[__name__], "BATCH", 32)
    corpus, steps = write_shards(tmp_path / "counting", 4000), 300
    # {name: (model, micro-batch, flags)}
    runs: dict[str, tuple[dict, int, tuple[object, ...]]] = {
        "deepseek": (DEEPSEEK, 8, ("--balance_rate", 0)),
        "deepseek-bias": (DEEPSEEK, 8, ("--balance_rate", 0.01)),
        "mixtral": (MIXTRAL | {"router_aux_loss_coef": 0.0}, 8, ()),
        "mixtral-micro": (MIXTRAL, 8, ()),
        "mixtral-global": (MIXTRAL, 8, ("--global_router_loss",)),
    }
    jobs = []
    for name, (model, micro, more) in runs.items():
        base = tmp_path / name
        base.mkdir()
        job = flags(base, corpus, "run", 2, micro=micro, steps=steps, model=model, more=more)
        jobs.append({"flags": job})
    runs_in_one_process.launch(jobs, tmp_path, 1)
    loads, losses = {}, {}
    for name in runs:
        for key, found in (("router/load_imbalance", loads), ("train/loss", losses)):
            values = rows(tmp_path / name / "run", key)
            found[name] = float(np.mean([values[step] for step in range(steps - 19, steps + 1)]))
        print(f"{name}: load_imbalance {loads[name]:.2f}, loss {losses[name]:.3f}")
    assert loads["deepseek-bias"] < 0.85 * loads["deepseek"]
    assert loads["mixtral-global"] < loads["mixtral-micro"] < loads["mixtral"]
    assert abs(losses["deepseek-bias"] - losses["deepseek"]) < 0.05
    assert abs(losses["mixtral-global"] - losses["mixtral"]) < 0.05


@pytest.mark.soak
@pytest.mark.parametrize("model", [DEEPSEEK, LAGUNA], ids=["deepseek_v3", "laguna"])
def test_biases_are_resumed_resharded_and_exported_in_float32(tmp_path, corpus, model) -> None:
    """In bf16; each run stops after half of its steps, and resumes at the same or another stage."""

    def job(name: str, stage: int) -> dict:
        return {"flags": flags(tmp_path, corpus, name, stage, bf16=True, steps=12, model=model)}

    jobs = [
        job("complete", 3), *stopped_and_resumed(job("resumed", 3), 6),
        job("complete-2", 2), *stopped_and_resumed(job("resumed-2", 2), 6),
        *stopped_and_resumed(job("resharded", 2), 6, job("resharded", 3)),
    ]  # fmt: skip
    runs_in_one_process.launch(jobs, tmp_path)
    for complete, resumed in (("complete", "resumed"), ("complete-2", "resumed-2")):
        for key in ("train/loss", "train/grad_norm", "router/load_imbalance"):
            assert rows(tmp_path / resumed, key) == rows(tmp_path / complete, key)
        biases, again = final_biases(tmp_path / complete), final_biases(tmp_path / resumed)
        assert biases.keys() == again.keys() and len(biases) == (1 if model is LAGUNA else 2)
        for name, bias in biases.items():
            assert bias.dtype == torch.float32 and bias.abs().max() > 1.5 * RATE
            assert torch.equal(bias, again[name])
    half, same = (
        rows(tmp_path / name, "router/load_imbalance") for name in ("resharded", "complete-2")
    )
    assert len(half) == 12 and half[7] == same[7], "the first step after resharding"

    out = tmp_path / "model"
    done = run_module("zerolm", "export", tmp_path / "complete", out)
    assert done.returncode == 0, done.stderr
    if model is DEEPSEEK:  # from_pretrained makes Laguna's bias bf16
        assert "are bit-identical" in done.stdout, done.stdout
    written = load_file(out / "model.safetensors")
    published = [written[name] for name in sorted(written) if "e_score_correction" in name]
    biases = final_biases(tmp_path / "complete")
    assert len(published) == len(biases) and all(map(torch.equal, published, biases.values()))


@pytest.mark.soak
def test_a_killed_run_resumes_with_the_biases_of_its_checkpoint(tmp_path, corpus) -> None:
    def arguments(name: str) -> list[object]:
        more = ["--checkpoint_interval", 10, "--gradient_checkpointing"]
        return [*flags(tmp_path, corpus, name, 2, steps=60), *more]

    keys = ("train/loss", "train/grad_norm", "router/load_imbalance")
    printed = compare_with_killed(tmp_path, arguments, keys)
    assert "balanced by a bias, 0.02 a step" in printed
    pairs = zip(
        final_biases(tmp_path / "killed").values(), final_biases(tmp_path / "complete").values(),
        strict=True,
    )  # fmt: skip
    assert all(torch.equal(killed, complete) for killed, complete in pairs)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_of_the_global_batch_do_not_depend_on_its_division(
    tmp_path, corpus, world_size
) -> None:
    def job(name: str, stage: int, *more: object, micro: int = 2) -> dict:
        arguments = flags(
            tmp_path, corpus, name, stage, micro=micro, model=MIXTRAL, more=(*LOSSES, *more)
        )
        return {"flags": arguments}

    names = [f"zero{stage}-micro{micro}" for stage in (1, 2, 3) for micro in (1, 2, 4)]
    jobs = [job(name, int(name[4]), micro=int(name[-1])) for name in names]
    others = [("chunked", 3, "--loss_chunk_tokens", 7, "--gradient_checkpointing")]
    others += [("compiled", 2, "--compile")] if world_size == 1 else []
    jobs += [job(*other) for other in others]
    jobs += stopped_and_resumed(job("resumed", 2), STEPS // 2)
    runs_in_one_process.launch(jobs, tmp_path, world_size)
    curve = plain_pytorch.train(
        MIXTRAL, corpus, seed=SEED, seq_len=SEQ_LEN, batch_sequences=BATCH, micro_batch_size=2,
        steps=STEPS, peak=PEAK, minimum=MINIMUM, warmup_tokens=2 * BATCH * SEQ_LEN,
        penalties=Penalties(2, 0.05, 0.02, 0.01),
    )  # fmt: skip
    expected = {"train/loss": [step.loss for step in curve]}
    expected["train/grad_norm"] = [step.grad_norm for step in curve]
    expected |= {name: [step.penalties[name] for step in curve] for name in curve[0].penalties}
    wrong = []
    for name in [*names, *(other[0] for other in others), "resumed"]:
        for key, values in expected.items():
            found = np.array(list(rows(tmp_path / name, key).values()))
            difference = float(np.abs(found - values).max() / np.abs(values).max())
            print(f"{world_size} ranks, {name}: {key}: {difference:.1e}")
            if difference > (1e-6 if key in ("train/loss", "train/auxiliary_loss") else 1e-5):
                wrong.append(f"{name}: {key}: {difference:.1e}")
    assert not wrong, "\n".join(wrong)
    assert rows(tmp_path / "resumed", "train/loss") == rows(tmp_path / "zero2-micro2", "train/loss")


@pytest.mark.soak
def test_the_z_loss_of_ranks_that_share_a_sequence_is_that_of_one_rank(tmp_path, corpus) -> None:
    def train(name: str, num_ranks: int, *more: object, **ds: object) -> dict[str, list[float]]:
        values = flags(
            tmp_path, corpus, name, 2, steps=10, model=LLAMA, more=("--z_loss", 0.01, *more)
        )
        path = values[values.index("--deepspeed_config") + 1]
        json_file = write_json(tmp_path / f"{name}.json", {**json.loads(path.read_text()), **ds})
        done = run_ranks(num_ranks, *["--deepspeed_config", json_file, *values[2:]])
        assert done.returncode == 0, done.stdout[-4000:]
        keys = ("train/loss", "train/z_loss", "train/grad_norm")
        return {key: [*rows(tmp_path / name, key).values()] for key in keys}

    curves = {
        "one": train("one", 1),
        "tensor": train("tensor", 2, tensor_parallel={"autotp_size": 2}),
        "sequence": train("sequence", 2, sequence_parallel_size=2),
        "masked": train("masked", 1, "--document_mask", "--micro_batch_size", 4),
        "masked-2": train("masked-2", 2, "--document_mask", "--loss_chunk_tokens", 10),
    }
    for name, other in (("tensor", "one"), ("sequence", "one"), ("masked-2", "masked")):
        for key, values in curves[name].items():
            difference = np.abs(np.array(values) - curves[other][key]).max()
            print(f"{name}: {key}: {difference:.1e}")
            assert difference < 2e-5, (name, key)
    assert curves["one"]["train/z_loss"][0] > 0.1
