"""Runs from existing weights: the losses of transformers' own model, and restarts."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end import plain_pytorch, runs_in_one_process
from tests.end_to_end.recipe import (
    BATCH,
    MINIMUM,
    PEAK,
    SEED,
    SEQ_LEN,
    STEP_TOKENS,
    STEPS,
    WARMUP_TOKENS,
)
from tests.end_to_end.recipe import profile as write_profile
from tests.launching import LLAMA, VOCABULARY, rows, run_ranks, write_json

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": LLAMA,
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "vocab_size": VOCABULARY, **NO_DROPOUT,
    },
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Random weights of three architectures, saved by `save_pretrained`; Llama in 16 files."""
    base = tmp_path_factory.mktemp("sources")
    for name, values in CONFIGS.items():
        settings = {k: v for k, v in values.items() if k not in ("model_type", "architectures")}
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values["model_type"], **settings)
        )
        model.save_pretrained(base / name, max_shard_size="16KB" if name == "llama" else "5GB")
    assert len(list((base / "llama").glob("*.safetensors"))) == 16
    return base


def flags(source: object, corpus: Path, run_dir: Path, profile: Path, micro: int) -> list[object]:
    return [
        "--deepspeed_config", profile, "--init_from", source, "--data", corpus,
        "--run_dir", run_dir, "--seq_len", SEQ_LEN, "--batch_tokens", STEP_TOKENS,
        "--micro_batch_size", micro, "--total_tokens", STEPS * STEP_TOKENS,
        "--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine",
        "--learning_rate", PEAK, "--min_learning_rate", MINIMUM, "--weight_decay", 0.1,
        "--seed", SEED, "--log_interval", 1, "--wandb", "off", "--checkpoint_interval", 10,
    ]  # fmt: skip


def transformers_loss(source: Path, corpus: Path) -> float:
    """Return transformers' own loss on the first batch."""
    tokens = plain_pytorch.read_tokens(corpus)
    order = plain_pytorch.Order([(len(tokens) - 1) // SEQ_LEN], [1.0], SEED)
    starts = order(np.arange(BATCH)).window * SEQ_LEN
    batch = torch.from_numpy(np.stack([tokens[at : at + SEQ_LEN + 1] for at in starts]))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        # transformers shifts the labels by one position itself
        return model(input_ids=batch, labels=batch).loss.item()


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 2])
def test_curve_equals_plain_pytorch_from_the_same_weights(
    tmp_path, corpus, models, world_size
) -> None:
    micro = BATCH // 2 // world_size
    cases = [(name, stage) for name in CONFIGS for stage in (1, 2, 3)]
    jobs = []
    for name, stage in cases:
        json_file = write_profile(tmp_path / f"ds{stage}.json", stage, bf16=False)
        job = flags(models / name, corpus, tmp_path / f"{name}-{stage}", json_file, micro)
        jobs.append({"flags": job})
    runs_in_one_process.launch(jobs, tmp_path, world_size)
    for name in CONFIGS:
        curve = plain_pytorch.train(
            CONFIGS[name], corpus, micro_batch_size=micro, source=models / name
        )
        expected = np.array([step.loss for step in curve])
        own = transformers_loss(models / name, corpus)
        for stage in (1, 2, 3):
            found = np.array(list(rows(tmp_path / f"{name}-{stage}", "train/loss").values()))
            print(
                f"{name} ZeRO-{stage} on {world_size}: first loss {found[0] - own:+.1e} from "
                f"transformers, {STEPS} steps {np.abs(found / expected - 1).max():.1e} from PyTorch"
            )
            assert abs(found[0] - own) < 1e-5
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.soak
def test_a_run_or_a_larger_vocabulary_starts_from_the_same_weights_on_every_stage(
    tmp_path, corpus, models
) -> None:
    profiles = {
        stage: write_profile(tmp_path / f"ds{stage}.json", stage, bf16=False) for stage in (1, 2, 3)
    }
    weights = tmp_path / "weights"
    weights.mkdir()
    trunk = flags(models / "llama", corpus, tmp_path / "trunk", profiles[2], 2)
    runs_in_one_process.launch([{"flags": trunk, "until": 10, "weights": weights}], tmp_path)

    model = AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float32)
    model.load_state_dict(torch.load(weights / "010.pt"))
    model.save_pretrained(tmp_path / "exported")
    larger = {**LLAMA, "vocab_size": VOCABULARY + 40}
    extended = plain_pytorch.initial_model(larger, SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            extended.get_parameter(name)[: len(parameter)] = parameter
    extended.save_pretrained(tmp_path / "extended")

    jobs = {"from directory": flags(tmp_path / "exported", corpus, tmp_path / "a", profiles[2], 2)}
    jobs["larger directory"] = flags(tmp_path / "extended", corpus, tmp_path / "b", profiles[2], 2)
    config = write_json(tmp_path / "larger.json", larger)
    for stage in (1, 2, 3):
        source = f"{tmp_path / 'trunk'}@10"
        jobs[f"run, ZeRO-{stage}"] = flags(
            source, corpus, tmp_path / f"c{stage}", profiles[stage], 2
        )
        wider = flags(source, corpus, tmp_path / f"d{stage}", profiles[stage], 2)
        jobs[f"larger, ZeRO-{stage}"] = [*wider, "--model_config", config]
    output = runs_in_one_process.launch(
        [{"flags": job, "until": 3} for job in jobs.values()], tmp_path
    )
    assert "rows 512 to 551 of lm_head.weight, model.embed_tokens.weight are new" in output
    found = {
        name: list(rows(job[job.index("--run_dir") + 1], "train/loss").values())
        for name, job in jobs.items()
    }
    print(found)
    fingerprints = [line.split()[-1] for line in output.splitlines() if "; fingerprint " in line]
    of_run = [fingerprints[number] for number in (0, 2, 4, 6)]
    of_larger = [fingerprints[number] for number in (1, 3, 5, 7)]
    assert len(set(of_run)) == 1 and len(set(of_larger)) == 1
    assert found["run, ZeRO-2"] == found["from directory"]
    assert found["larger, ZeRO-2"] == found["larger directory"]
    for stage in (1, 3):
        for name in ("run", "larger"):
            other = found[f"{name}, ZeRO-{stage}"]
            np.testing.assert_allclose(other, found[f"{name}, ZeRO-2"], rtol=1e-6)


@pytest.mark.soak
def test_a_killed_run_starts_again_alike_and_resumes_without_its_source(
    tmp_path, corpus, models
) -> None:
    profile = write_profile(tmp_path / "ds.json", 3, bf16=False)
    source = shutil.copytree(models / "mixtral", tmp_path / "source")
    straight = flags(source, corpus, tmp_path / "straight", profile, 2)
    killed = flags(source, corpus, tmp_path / "killed", profile, 2)
    assert run_ranks(2, *straight).returncode == 0

    assert run_ranks(2, *killed, FAULT="step.backward:1:1:kill").returncode != 0
    assert not list((tmp_path / "killed" / "checkpoints").glob("step-*"))
    done = run_ranks(2, *killed, FAULT="step.begin:0:18:kill")
    assert done.returncode != 0
    assert "all as in the source, finite" in done.stdout, done.stdout[-4000:]
    shutil.rmtree(source)
    done = run_ranks(2, *killed)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"from {source}: " in done.stdout and "not read: the run resumes" in done.stdout
    expected = rows(tmp_path / "straight", "train/loss")
    assert rows(tmp_path / "killed", "train/loss") == expected and len(expected) == STEPS


@pytest.mark.soak
def test_values_that_are_not_finite_are_refused_before_the_first_step(
    tmp_path, corpus, models
) -> None:
    source = shutil.copytree(models / "gpt2", tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 4] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    profile = write_profile(tmp_path / "ds.json", 3, bf16=False)
    done = run_ranks(2, *flags(source, corpus, tmp_path / "run", profile, 2))
    assert done.returncode == 2
    assert "transformer.h.1.mlp.c_fc.weight: 1 of 16384 values are not finite" in done.stdout
