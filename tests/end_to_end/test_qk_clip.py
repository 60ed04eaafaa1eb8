"""Runs with --qk_clip: equal to plain PyTorch, resumed bit for bit, and with bounded logits."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end import killed_runs, plain_optimizers, plain_pytorch, runs_in_one_process
from tests.end_to_end.recipe import (
    PEAK,
    STEP_TOKENS,
    STEPS,
    recipe,
)
from tests.launching import LLAMA, rows, write_json, write_shards

STOP, MICRO, MUON_RATE = 9, 2, 0.03
# Shared keys; and keys of each head, with biases.
MODELS = {
    "llama": LLAMA,
    "qwen2": {
        **LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 4,
    },
}  # fmt: skip
THRESHOLD = 0.15
KEYS = ("train/loss", "train/max_attention_logit", "train/clipped_heads", "train/param_norm")


def profile(path: Path, stage: int, optimizer: str, bf16: bool) -> Path:
    params = {"muon_lr": MUON_RATE} if optimizer == "Muon" else {}
    return write_json(
        path,
        {
            "zero_optimization": {"stage": stage, "reduce_scatter": stage != 3},
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "gradient_clipping": 0.0,
            "optimizer": {"type": optimizer, "params": params},
        },
    )


def flags(
    base: Path, corpus: Path, name: str, model: str, stage: int, *more: object,
    optimizer: str = "Muon", bf16: bool = False, micro: int = MICRO, steps: int = STEPS,
    threshold: float = THRESHOLD,
) -> list[Any]:  # fmt: skip
    model_dir = base / model
    model_dir.mkdir(exist_ok=True)
    write_json(model_dir / "config.json", MODELS[model])
    ds = profile(base / f"{optimizer}-{stage}-{bf16}.json", stage, optimizer, bf16)
    return [
        *recipe(model_dir, corpus, base / name, ds, steps, micro), "--warmup_tokens", 0,
        "--schedule", "cosine", "--wandb", "off", "--spike_threshold", 0,
        "--checkpoint_interval", 1000, "--qk_clip", threshold, *more,
    ]  # fmt: skip


def plain_curve(corpus: Path, model: str, optimizer: str) -> list[plain_pytorch.Step]:
    kind = plain_optimizers.muon(MUON_RATE / PEAK) if optimizer == "Muon" else plain_pytorch.adamw
    return plain_pytorch.train(
        MODELS[model], corpus, warmup_tokens=0, clipping=0.0, optimizer_of=kind, qk_clip=THRESHOLD
    )


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [1, 2])
def test_curves_equal_plain_pytorch(tmp_path, corpus, world_size) -> None:
    cases = [(model, stage, "Muon") for model in MODELS for stage in (1, 2, 3)]
    cases += [("qwen2", 2, "AdamW")]
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{model}-{stage}-{optimizer}", model, stage,
                optimizer=optimizer,
            ),
            "exact": True,
        }
        for model, stage, optimizer in cases
    ]  # fmt: skip
    runs_in_one_process.launch(jobs, tmp_path, world_size)
    wrong = []
    for model, stage, optimizer in cases:
        curve = plain_curve(corpus, model, optimizer)
        expected = {
            "train/loss": [step.loss for step in curve],
            "train/max_attention_logit": [step.attention[0] for step in curve],
            "train/clipped_heads": [step.attention[1] for step in curve],
        }
        name = f"{model}-{stage}-{optimizer}"
        for key, values in expected.items():
            found = np.array(list(rows(tmp_path / name, key).values()))
            difference = float(np.abs(found - values).max() / np.abs(values).max())
            print(f"{world_size} ranks, {name}: {key}: {difference:.1e}")
            if difference > (1e-6 if key == "train/loss" else 1e-5):
                wrong.append(f"{name}: {key}: {difference:.1e}")
        assert sum(expected["train/clipped_heads"]) > 20, "the clip must act for this test"
    assert not wrong, "\n".join(wrong)


def differences(base: Path, names: list[str], other: str) -> list[str]:
    found = []
    for name in names:
        for key in KEYS:
            values, expected = (
                np.array(list(rows(base / run, key).values())) for run in (name, other)
            )
            difference = float(np.abs(values - expected).max() / np.abs(expected).max())
            print(f"{name}: {key}: {difference:.1e} from {other}")
            found += [f"{name}: {key}"] if difference > 1e-5 else []
    return found


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_clipping_depends_on_nothing_but_the_global_batch_and_resumes_bit_for_bit(
    tmp_path, corpus
) -> None:
    def job(
        name: str, *more: object, stage: int = 2, optimizer: str = "AdamW", **options: Any
    ) -> dict:
        arguments = flags(
            tmp_path, corpus, name, "qwen2", stage, *more, optimizer=optimizer, **options
        )
        return {"flags": arguments}

    held_out = write_shards(tmp_path / "held-out", 20, seed=1)
    average = ("--ema_tokens", 4 * STEP_TOKENS, "--val_data", held_out, "--eval_interval", 1000)
    variants = [
        job("micro-1", micro=1), job("micro-4", stage=3, micro=4),
        job("recomputed", "--gradient_checkpointing", stage=3),
        job("selective", "--gradient_checkpointing", "selective"),
        job("eager", "--attn_implementation", "eager"),
    ]  # fmt: skip
    masked = [
        job("masked", "--document_mask"),
        job("masked-eager", "--document_mask", "--attn_implementation", "eager", micro=4),
    ]
    resumed = []
    for stage in (1, 2, 3):
        complete, moved = (
            job(f"{name}-{stage}", *average, stage=stage, bf16=True, optimizer="Muon")
            for name in ("complete", "resumed")
        )
        resumed += [complete, *killed_runs.stopped_and_resumed(moved, STOP)]
    unclipped = [job("off", threshold=0.0), job("high", threshold=1e9)]
    runs_in_one_process.launch([job("base"), *variants, *masked, *resumed, *unclipped], tmp_path, 2)
    names = [Path(each["flags"][each["flags"].index("--run_dir") + 1]).name for each in variants]
    wrong = differences(tmp_path, names, "base")
    wrong += differences(tmp_path, ["masked-eager"], "masked")
    assert not wrong, wrong
    assert rows(tmp_path / "masked", KEYS[1]) != rows(tmp_path / "base", KEYS[1])
    for key in KEYS:
        for stage in (1, 2, 3):
            complete = rows(tmp_path / f"complete-{stage}", key)
            assert complete == rows(tmp_path / f"resumed-{stage}", key), (key, stage)
    assert sum(rows(tmp_path / "complete-3", "train/clipped_heads").values()) > 20
    for stage in (1, 2, 3):
        averages = (
            [*rows(tmp_path / f"{name}-{stage}", "eval/ema_loss").values()][-1]
            for name in ("complete", "resumed")
        )
        assert len(set(averages)) == 1
    for key in ("train/loss", "train/param_norm", "train/grad_norm"):  # measuring changes no bit
        assert rows(tmp_path / "off", key) == rows(tmp_path / "high", key)
    assert not rows(tmp_path / "off", "train/max_attention_logit")
    assert not any(rows(tmp_path / "high", "train/clipped_heads").values())


@pytest.mark.soak
def test_a_killed_run_resumes_with_clipped_weights(tmp_path, corpus) -> None:
    def arguments(name: str) -> list[object]:
        return flags(
            tmp_path, corpus, name, "llama", 2, "--checkpoint_interval", 10, steps=60, bf16=True
        )

    printed = killed_runs.compare_with_killed(tmp_path, arguments, KEYS)
    assert "at most about 0.15 in each of 8 heads" in printed


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_logits_that_grow_without_clipping_stay_about_the_threshold_with_it(
    tmp_path, monkeypatch
) -> None:
    """Prints the table of docs/optimizers.md."""
    corpus, steps, threshold = write_shards(tmp_path / "counting", 4000), 300, 10.0
    monkeypatch.setattr(sys.modules[__name__], "MUON_RATE", 0.05)
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{model}-{limit:g}", model, 2, steps=steps, threshold=limit,
                micro=8,
            )
        }
        for model in MODELS
        for limit in (1e9, threshold)
    ]  # fmt: skip
    runs_in_one_process.launch(jobs, tmp_path, 1)
    for model in MODELS:
        largest, losses = {}, {}
        for limit in (1e9, threshold):
            run_dir = tmp_path / f"{model}-{limit:g}"
            largest[limit] = rows(run_dir, "train/max_attention_logit")
            losses[limit] = np.mean(list(rows(run_dir, "train/loss").values())[-20:])
            shown = {step: round(largest[limit][step], 2) for step in (1, 50, 100, 150, 200, 300)}
            clipped = sum(1 for each in rows(run_dir, "train/clipped_heads").values() if each)
            print(
                f"{model}, --qk_clip {limit:g}: largest logit {shown}, at most "
                f"{max(largest[limit].values()):.2f}, mean after step 100 "
                f"{np.mean([*largest[limit].values()][100:]):.2f}; loss {losses[limit]:.3f}; "
                f"clipped in {clipped} steps"
            )
        assert max(largest[1e9].values()) > 2 * threshold
        assert np.mean([*largest[threshold].values()][100:]) < 1.2 * threshold
        assert max(largest[threshold].values()) < 1.6 * threshold
