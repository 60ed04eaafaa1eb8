"""A stage of longer sequences, with another rotary base, equals a plain loop from its weights."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end import plain_pytorch, runs_in_one_process
from tests.end_to_end.recipe import (
    BATCH,
    SEQ_LEN,
    STEP_TOKENS,
    profile,
    recipe,
)
from tests.launching import LLAMA, rows, write_json

pytestmark = pytest.mark.soak
TRUNK_STEPS, STEPS, TIMES = 10, 6, 4
LONG = {**LLAMA, "rope_theta": 8e4, "max_position_embeddings": TIMES * SEQ_LEN}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory, llama, corpus):
    """A run at `SEQ_LEN`; `weights` has its float32 weights after each step."""
    base = tmp_path_factory.mktemp("trunk")
    (base / "weights").mkdir()
    flags = recipe(
        llama, corpus, base / "run", profile(base / "zero2.json", 2, bf16=False), TRUNK_STEPS, 2
    )
    flags += ["--checkpoint_interval", TRUNK_STEPS]
    runs_in_one_process.launch([{"flags": flags, "weights": base / "weights"}], base)
    write_json(base / "long.json", LONG)
    return base


def test_a_longer_stage_from_weights_equals_plain_pytorch(trunk, corpus, tmp_path) -> None:
    source = trunk / "run"
    flags = recipe(trunk / "long.json", corpus, tmp_path / "run", trunk / "zero2.json", STEPS, 1)
    flags += ["--init_from", source, "--seq_len", TIMES * SEQ_LEN, "--warmup_tokens", STEP_TOKENS]
    output = runs_in_one_process.launch([{"flags": flags}], tmp_path)
    assert "rope_parameters.rope_theta: 80000.0, --init_from" in output
    settings = {key: value for key, value in LONG.items() if key != "architectures"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.load_state_dict(torch.load(trunk / "weights" / f"{TRUNK_STEPS:03d}.pt"))
    model.save_pretrained(tmp_path / "weights")
    curve = plain_pytorch.train(
        LONG, corpus, seq_len=TIMES * SEQ_LEN, batch_sequences=BATCH // TIMES, micro_batch_size=1,
        steps=STEPS, warmup_tokens=STEP_TOKENS, source=tmp_path / "weights",
    )  # fmt: skip
    expected = [step.loss for step in curve]
    np.testing.assert_allclose(list(rows(tmp_path / "run", "train/loss").values()), expected, 1e-6)
