"""Pipeline stages whose ranks divide the experts give the curve, weights and files of a whole model.

The reference is plain PyTorch in one process.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.end_to_end import plain_pytorch, run_digest, runs_in_one_process
from tests.end_to_end.recipe import WARMUP_TOKENS, recipe
from tests.end_to_end.recipe import profile as profile_of
from tests.end_to_end.test_expert_balance import DEEPSEEK, MIXTRAL
from tests.end_to_end.test_expert_parallel import (
    GPT_OSS,
    LIMITS,
    QWEN3,
    RATE,
    differences,
    without_bias_decay,
)
from tests.launching import run_ranks, write_json
from zerolm.__main__ import main

STEPS = 10
DEEP = {"num_hidden_layers": 4}
MODELS = {
    "mixtral": {**MIXTRAL, **DEEP, "output_router_logits": False},
    "qwen3": {**QWEN3, **DEEP},
    "deepseek": {**DEEPSEEK, **DEEP},
    "gpt-oss": {**GPT_OSS, **DEEP, "layer_types": GPT_OSS["layer_types"] * 2},
    "tied": {**QWEN3, **DEEP, "tie_word_embeddings": True},
}


def flags(base: Path, corpus: Path, run: str, name: str, stage: int, stages: int, degree: int,
          *more, bf16: bool = False) -> list[object]:  # fmt: skip
    """Return pretrain.py's flags for a run in `base / run`; 1 stage and degree 1 are a whole
    model.
    """
    config = write_json(base / f"{name}.json", MODELS[name])
    file = profile_of(base / f"zero{stage}-{stages}-{bf16}.json", stage, bf16)
    if stages > 1:
        write_json(file, {**json.loads(file.read_text()), "pipeline": {"stages": stages}})
    found = recipe(config, corpus, base / run, file, STEPS, 1)
    found += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    return [*found, *(["--expert_parallel", degree] if degree > 1 else []), *more]


@pytest.fixture(scope="session")
def reference(corpus):
    known: dict[str, list[plain_pytorch.Step]] = {}

    def curve(name: str, bf16: bool = False):
        if (key := f"{name} {bf16}") not in known:
            known[key] = plain_pytorch.train(
                MODELS[name], corpus, steps=STEPS, bf16=bf16, optimizer_of=without_bias_decay,
                micro_batch_size=1,
            )  # fmt: skip
        return known[key]

    return curve


CASES = (
    ("qwen3", 1, False), ("qwen3", 2, False), ("mixtral", 1, False), ("gpt-oss", 2, False),
    ("tied", 1, False), ("qwen3", 1, True), ("qwen3", 2, True),
)  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "stages", "degree", "cases"),
    [
        (4, 2, 2, CASES[:1]),
        pytest.param(4, 2, 2, CASES[1:], marks=pytest.mark.soak),
        pytest.param(8, 2, 2, CASES, marks=pytest.mark.soak),
    ],
    ids=["2x2", "2x2-all", "2x4"],
)
def test_a_run_equals_plain_pytorch(
    tmp_path, corpus, reference, ranks, stages, degree, cases
) -> None:
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{name}-{stage}-{bf16}", name, stage, stages, degree, bf16=bf16
            )
        }
        for name, stage, bf16 in cases
    ]
    printed = runs_in_one_process.launch(jobs, tmp_path, ranks)
    replicas = ranks // stages
    described = f"{replicas} data parallel x {stages} stages, experts divided over {degree} ranks"
    assert described in printed
    for name, stage, bf16 in cases:
        found = differences(tmp_path / f"{name}-{stage}-{bf16}", reference(name, bf16))
        print(f"{name} ZeRO-{stage} {'bf16' if bf16 else 'fp32'}:", found)
        assert {key: each for key, each in found.items() if each > LIMITS[bf16].get(key, 1)} == {}
