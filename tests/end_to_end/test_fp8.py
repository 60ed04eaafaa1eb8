"""`--fp8`: the curve of plain PyTorch with emulated products, however a run is divided."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end import plain_pytorch, runs_in_one_process
from tests.end_to_end.recipe import (
    STEPS,
    WARMUP_TOKENS,
    profile,
    recipe,
)
from tests.launching import LLAMA, rows, write_json
from tests.zerolm.fp8.emulation import emulate

FIRST_STEP = (1e-7, 1e-4)  # relative difference of the first loss; compiled: other rounding in bf16
# {group: {case: (ranks, ZeRO stage, micro-batch, other flags)}}
GROUPS = {
    "sharding": {
        "stage 1": (2, 1, 2, []),
        "stage 2": (2, 2, 2, []),
        "stage 3": (2, 3, 2, []),
        "micro-batch 1": (2, 2, 1, []),
        "one rank": (1, 2, 4, []),
        "sequence parallel": (2, 3, 4, []),
    },
    "memory": {
        "stage 3": (2, 3, 2, []),
        "full": (2, 3, 2, ["--gradient_checkpointing"]),
        "selective": (2, 3, 2, ["--gradient_checkpointing=selective"]),
        "chunked loss": (2, 3, 2, ["--loss_chunk_tokens", 16]),
    },
    "compiled": {
        "stage 2": (2, 2, 2, ["--compile"]),
        "stage 3": (2, 3, 2, ["--compile", "--gradient_checkpointing"]),
    },
}


MODELS = {
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "mixtral": {
        **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def emulated_curve(config: dict, corpus: Path) -> np.ndarray:
    curve = plain_pytorch.train(config, corpus, bf16=True, change=emulate)
    losses = np.array([step.loss for step in curve])
    assert losses[0] - losses[-1] > 0.1, "the reference itself must learn"
    return losses


@pytest.fixture(scope="module")
def reference(corpus) -> np.ndarray:
    return emulated_curve(LLAMA, corpus)


def job(run_dir: Path, model: Path, corpus: Path, stage: int, micro: int, *more: object) -> dict:
    json_file = profile(run_dir.with_suffix(".json"), stage, True)
    if "sequence" in run_dir.name:
        config = {**json.loads(json_file.read_text()), "sequence_parallel_size": 2}
        write_json(json_file, config)
    given = recipe(model, corpus, run_dir, json_file, STEPS, micro)
    given += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    return {"flags": [*given, *more, "--fp8"]}


def losses_of(run_dir: Path) -> np.ndarray:
    return np.array(list(rows(run_dir, "train/loss").values()))


def check(name: str, found: np.ndarray, expected: np.ndarray, first_step: float) -> None:
    apart = np.abs(found / expected - 1)
    print(f"{name}: {apart[0]:.1e}, {apart[:5].max():.1e} in 5 steps, {apart.max():.1e} in {STEPS}")
    assert apart[0] < first_step and apart.max() < 5e-3, name


@pytest.mark.soak
@pytest.mark.parametrize("group", GROUPS)
def test_the_curve_is_that_of_emulated_products(tmp_path, corpus, llama, reference, group) -> None:
    jobs: dict[int, list] = {}
    for case, (ranks, stage, micro, flags) in GROUPS[group].items():
        one = job(tmp_path / case, llama, corpus, stage, micro, *flags)
        jobs.setdefault(ranks, []).append(one)
    for ranks, of_ranks in jobs.items():
        output = runs_in_one_process.launch(of_ranks, tmp_path, ranks)
        assert "14 matrices (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down" in output
    found = {case: losses_of(tmp_path / case) for case in GROUPS[group]}
    for case, losses in found.items():
        check(case, losses, reference, FIRST_STEP[group == "compiled"])
    if group == "memory":
        np.testing.assert_array_equal(found["full"], found["stage 3"])
        np.testing.assert_array_equal(found["selective"], found["stage 3"])


@pytest.mark.soak
@pytest.mark.parametrize("stages", [1, 2])
def test_divided_experts_and_stages_train_alike(tmp_path, corpus, stages) -> None:
    """The attention in fp8, and experts in bf16, over two ranks, also of each of two stages."""
    config = {**MODELS["mixtral"], "num_hidden_layers": 4}
    model = write_json(tmp_path / "mixtral.json", config)
    jobs = []
    for stage in (1, 2):
        jobs.append(job(tmp_path / f"{stage}", model, corpus, stage, 2, "--expert_parallel", 2))
        if stages > 1:
            file = tmp_path / f"{stage}.json"
            block = {"pipeline": {"stages": stages}}
            write_json(file, {**json.loads(file.read_text()), **block})
    output = runs_in_one_process.launch(jobs, tmp_path, 2 * stages)
    assert "16 matrices (q_proj, k_proj, v_proj, o_proj), " in output
    expected = emulated_curve(config, corpus)
    for stage in (1, 2):
        check(f"ZeRO-{stage}", losses_of(tmp_path / f"{stage}"), expected, 1e-4)


@pytest.mark.soak
def test_tied_heads_experts_and_documents_train_alike_at_stages_2_and_3(
    tmp_path, corpus, llama
) -> None:
    """Experts stay in bf16; documents have no reference but the other stage."""
    jobs = []
    for stage in (2, 3):
        for name, config in MODELS.items():
            model = write_json(tmp_path / f"{name}.config.json", config)
            jobs.append(job(tmp_path / f"{name}-{stage}", model, corpus, stage, 2))
        run_dir = tmp_path / f"documents-{stage}"
        jobs.append(job(run_dir, llama, corpus, stage, 2, "--document_mask"))
    output = runs_in_one_process.launch(jobs, tmp_path)
    assert "8 matrices (q_proj, k_proj, v_proj, o_proj), " in output
    for name, config in MODELS.items():
        expected = emulated_curve(config, corpus)
        for stage in (2, 3):
            check(f"{name}-{stage}", losses_of(tmp_path / f"{name}-{stage}"), expected, 1e-4)
    check("documents", *(losses_of(tmp_path / f"documents-{stage}") for stage in (2, 3)), 1e-7)
