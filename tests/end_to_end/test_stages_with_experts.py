"""Pipeline stages of a mixture, whose ranks may divide the experts, give the curve, metrics,
weights and files of a whole model.

The reference is plain PyTorch in one process, or ZeRO-1 without stages for router losses of the
global batch and validation.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end import plain_pytorch, run_digest, runs_in_one_process
from tests.end_to_end.plain_experts import Penalties
from tests.end_to_end.recipe import STEP_TOKENS, WARMUP_TOKENS, recipe
from tests.end_to_end.recipe import profile as profile_of
from tests.end_to_end.test_expert_balance import DEEPSEEK, MIXTRAL
from tests.end_to_end.test_expert_parallel import (
    GPT_OSS,
    LIMITS,
    QWEN3,
    RATE,
    differences,
    metrics,
    without_bias_decay,
)
from tests.end_to_end.whole_exports import require_whole
from tests.launching import events, run_ranks, write_json
from zerolm.__main__ import main

STEPS = 10
DEEP = {"num_hidden_layers": 4}
MODELS = {
    "mixtral": {**MIXTRAL, **DEEP},
    # With three experts for each token (gpt-oss: two), rounding changes choices of plain
    # PyTorch's routers too: other micro-batches then change its losses by 1e-6.
    "qwen3": {**QWEN3, **DEEP, "num_experts_per_tok": 2},
    "deepseek": {**DEEPSEEK, **DEEP},
    "gpt-oss": {
        **GPT_OSS,
        **DEEP,
        "layer_types": GPT_OSS["layer_types"] * 2,
        "num_experts_per_tok": 3,
    },
    "tied": {**QWEN3, **DEEP, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "global": {**MIXTRAL, **DEEP},
    # Stages without experts: the first, and the last, whose model returns the router logits.
    "dense-first": {**DEEPSEEK, **DEEP, "first_k_dense_replace": 2},
    "dense-last": {
        **QWEN3,
        **DEEP,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [2, 3],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.05,
    },
}
LOSSES = {
    **dict.fromkeys(("deepseek", "dense-first"), ("--balance_rate", RATE)),
    "global": ("--global_router_loss", "--router_z_loss", 0.02, "--z_loss", 0.01),
}


def flags(base: Path, corpus: Path, run: str, name: str, stage: int, stages: int, degree: int,
          *more, bf16: bool = False) -> list[object]:  # fmt: skip
    """Return pretrain.py's flags for a run in `base / run`; 1 stage and degree 1 are a whole
    model.
    """
    config = write_json(base / f"{name}.json", MODELS[name])
    file = profile_of(base / f"zero{stage}-{stages}-{bf16}.json", stage, bf16)
    if stages > 1:
        layers = [DEEP["num_hidden_layers"] // stages] * stages
        block = {"pipeline": {"stages": stages, "layers": layers}}
        write_json(file, {**json.loads(file.read_text()), **block})
    found = recipe(config, corpus, base / run, file, STEPS, 1)
    found += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    found += ["--expert_parallel", degree] if degree > 1 else []
    return [*found, *LOSSES.get(name, ()), *more]


@pytest.fixture(scope="session")
def reference(corpus):
    known: dict[str, list[plain_pytorch.Step]] = {}

    def curve(name: str, bf16: bool = False):
        if (key := f"{name} {bf16}") not in known:
            balanced = "--balance_rate" in LOSSES.get(name, ())
            known[key] = plain_pytorch.train(
                MODELS[name], corpus, steps=STEPS, bf16=bf16, optimizer_of=without_bias_decay,
                micro_batch_size=1, balance_rate=RATE if balanced else None,
                penalties=Penalties(2, 0.05, 0.02, 0.01) if name == "global" else None,
            )  # fmt: skip
        return known[key]

    return curve


OTHERS = (
    ("qwen3", 1, False), ("qwen3", 2, False), ("mixtral", 2, False), ("deepseek", 1, False),
    ("gpt-oss", 2, False), ("tied", 1, False), ("global", 1, False), ("mixtral", 1, True),
    ("qwen3", 2, True), ("dense-first", 1, False), ("dense-last", 2, False),
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "stages", "degree", "cases"),
    [
        (4, 2, 2, (("mixtral", 1, False),)),
        pytest.param(4, 2, 2, OTHERS[-2:], marks=pytest.mark.soak),
        pytest.param(4, 2, 2, OTHERS, marks=pytest.mark.soak),
        pytest.param(8, 2, 2, OTHERS, marks=pytest.mark.soak),
        pytest.param(4, 4, 1, OTHERS, marks=pytest.mark.soak),
    ],
    ids=["2x2", "dense", "2x2-others", "2x4", "4x1-whole"],
)
def test_a_run_equals_plain_pytorch(
    tmp_path, corpus, reference, ranks, stages, degree, cases
) -> None:
    """Mixtral has a router loss, of whose means over a micro-batch each stage has a part."""
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{name}-{stage}-{bf16}", name, stage, stages, degree, bf16=bf16
            )
        }
        for name, stage, bf16 in cases
    ]
    printed = runs_in_one_process.launch(jobs, tmp_path, ranks)
    divided = f", experts divided over {degree} ranks" if degree > 1 else ""
    assert f"{ranks // stages} data parallel x {stages} stages{divided}" in printed
    for name, stage, bf16 in cases:
        run, curve = tmp_path / f"{name}-{stage}-{bf16}", reference(name, bf16)
        found = differences(run, curve)
        found |= apart_in_penalties(run, curve, MODELS[name].get("output_router_logits", False))
        print(f"{name} ZeRO-{stage} {'bf16' if bf16 else 'fp32'}:", found)
        assert {key: each for key, each in found.items() if each > LIMITS[bf16].get(key, 1)} == {}


@pytest.mark.soak
def test_compiled_blocks_equal_plain_pytorch(tmp_path, corpus, reference) -> None:
    """With experts over two ranks and whole; as close as compiled whole models."""
    cases = [
        ("mixtral", 1, 2, ("--gradient_checkpointing", "full")), ("gpt-oss", 2, 2, ()),
        ("mixtral", 2, 1, ()),
    ]  # fmt: skip
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{name}-{stage}", name, stage, 2, degree, "--compile", *more
            )
        }
        for name, stage, degree, more in cases
    ]
    printed = runs_in_one_process.launch(jobs, tmp_path, 4)
    assert "compile: 2 blocks" in printed and "graph breaks" not in printed
    for name, stage, degree, _ in cases:
        found = differences(tmp_path / f"{name}-{stage}", reference(name))
        print(f"{name} ZeRO-{stage} experts over {degree}:", found)
        assert {key: each for key, each in found.items() if each > LIMITS[False].get(key, 1)} == {}


def apart_in_penalties(run: Path, curve: list[plain_pytorch.Step], routed: bool) -> dict:
    """Return the largest relative difference of each router loss."""
    figures, found = metrics(run), {}
    for step, expected in enumerate(curve, start=1):
        values = expected.penalties or (
            {"train/auxiliary_loss": expected.auxiliary} if routed else {}
        )
        for key, each in values.items():
            found[key] = max(found.get(key, 0.0), abs(figures[step, key] / each - 1))
    return found


def shared_metrics(run: Path) -> dict[tuple[int, str], float]:
    return {key: each for key, each in metrics(run).items() if not key[1].startswith("stages/")}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("global", ("--gradient_checkpointing", "full", "--loss_chunk_tokens", 7)),
        ("mixtral", ("--gradient_checkpointing", "selective", "--document_mask")),
        ("deepseek", ("--document_mask", "--loss_by_position")),
    ],
)
def test_all_metrics_and_weights_are_those_of_a_whole_model(
    tmp_path, corpus, held_out, name, more
) -> None:
    """All but times, sizes and the noise scale, which no rank can measure alone."""
    more = (
        *more, "--ema_tokens", 4 * STEP_TOKENS, "--val_data", held_out, "--eval_interval", 5,
        "--eval_tokens", 512,
    )  # fmt: skip
    kinds = [(1, 1, 1), (1, 2, 1), (2, 2, 2)]
    jobs = [
        {"flags": flags(tmp_path, corpus, "of-{}-{}-{}".format(*kind), name, *kind, *more)}
        for kind in kinds
    ]
    runs_in_one_process.launch(jobs, tmp_path, 4)
    runs = [tmp_path / "of-{}-{}-{}".format(*kind) for kind in kinds]
    whole, *others = map(shared_metrics, runs)
    assert len(whole) > 12 and any(key.startswith("router/") for _, key in whole)
    for found in others:
        assert whole.keys() == found.keys()
        wrong = {
            key: (each, found[key])
            for key, each in whole.items()
            if not np.allclose(each, found[key], rtol=1e-6 if "loss" in key[1] else 1e-4)
        }
        assert not wrong, wrong
    expected, *exports = [exported(run, tmp_path / f"{run.name}-model") for run in runs]
    for found in exports:
        assert found.keys() == expected.keys()
        apart = sum(float((found[key] - each).square().sum()) for key, each in expected.items())
        size = sum(float(each.square().sum()) for each in expected.values())
        print("norm of the weights' difference:", math.sqrt(apart / size))
        assert math.sqrt(apart / size) < 5e-6


def exported(run: Path, out: Path) -> dict[str, torch.Tensor]:
    """Export a run, and return the weights."""
    assert main(["export", str(run), str(out), "--precision", "fp32"]) == 0
    return {name: each.float() for name, each in load_file(out / "model.safetensors").items()}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "stage", "bf16"),
    [("deepseek", 1, True), ("global", 2, False), ("tied", 1, False)],
    ids=["zero1-bf16", "zero2", "zero1-tied"],
)
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path, corpus, name, stage, bf16) -> None:
    found = {}
    for run, fault in (("uninterrupted", {}), ("killed", {"FAULT": "step.begin:1:9:kill"})):
        (tmp_path / run).mkdir()
        arguments = flags(
            tmp_path / run, corpus, "run", name, stage, 2, 2, "--checkpoint_interval", 3,
            bf16=bf16,
        )  # fmt: skip
        done = run_ranks(4, *arguments, **fault)
        if fault:
            assert done.returncode != 0
            done = run_ranks(4, *arguments)
            assert "resume:" in done.stdout, done.stdout[-3000:]
            assert "bit-identical to the saved one" in done.stdout
        assert done.returncode == 0, done.stdout[-4000:]
        found[run] = run_digest.digest(tmp_path / run / "run")
    assert run_digest.differences(found["killed"], found["uninterrupted"]) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["deepseek", "global", "tied"])
def test_a_run_resumes_on_any_topology_and_its_exports_are_whole(
    tmp_path, corpus, reference, name
) -> None:
    """Stages x experts, ZeRO-3, stages, one rank, ZeRO-2 with divided experts, and back; each
    export has the engine's logits.
    """
    parts = [
        (4, 1, 2, 2, 2), (4, 3, 1, 1, 3), (4, 1, 2, 1, 5), (1, 1, 1, 1, 6), (2, 2, 1, 2, 7),
        (4, 1, 2, 2, 8), (8, 1, 2, 4, 9), (2, 1, 2, 1, STEPS),
    ]  # fmt: skip
    for number, (ranks, stage, stages, degree, until) in enumerate(parts):
        arguments = flags(tmp_path, corpus, "run", name, stage, stages, degree)
        printed = runs_in_one_process.launch(
            [{"flags": arguments, "until": until}], tmp_path, ranks
        )
        assert ("its states will be resharded" in printed) == (number > 0)
        out = tmp_path / f"model-{number}"
        assert main(["export", str(tmp_path / "run"), str(out), "--precision", "fp32"]) == 0
    curve = reference(name)
    found = differences(tmp_path / "run", curve)
    print(found)
    assert found["train/loss"] < 1e-6
    require_whole(tmp_path / "run", out, curve)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 3])
def test_the_rank_that_hangs_is_blamed_and_not_those_that_wait(tmp_path, corpus, rank) -> None:
    """Its stage waits for its tokens, and the other stage for hidden states or gradients."""
    arguments = flags(tmp_path, corpus, "run", "qwen3", 1, 2, 2, "--hang_timeout", "8s")
    done = run_ranks(4, *arguments, FAULT=f"step.backward:{rank}:5:hang")
    assert done.returncode != 0
    [hang] = events(tmp_path / "run", "hang")
    assert [each["rank"] for each in hang["ranks"]] == [rank], hang


def test_initial_weights_are_those_of_a_whole_model(tmp_path, corpus) -> None:
    """The fingerprint is of all bits."""
    prints = []
    for stages, degree in ((1, 1), (2, 2)):
        arguments = flags(tmp_path, corpus, f"of-{stages}", "gpt-oss", 1, stages, degree)
        printed = runs_in_one_process.launch([{"flags": arguments, "until": 1}], tmp_path, 4)
        prints += set(re.findall(r"(\d+ parameters .*fingerprint [0-9a-f]+)", printed))
    assert len(prints) == 2 and prints[0] == prints[1]
