"""One recipe, any profile, the same curve: against a loop in plain PyTorch."""

import numpy as np
import plain_pytorch
import pytest
from recipe import (
    BATCH,
    CLIPPING,
    MINIMUM,
    PEAK,
    SEED,
    SEQ_LEN,
    STEP_TOKENS,
    profile,
    recipe,
)

from tests.launching import LLAMA, launch, rows

STEPS = 20
WARMUP_TOKENS = 4 * STEP_TOKENS


@pytest.fixture(scope="session")
def reference(corpus):
    def curve(bf16: bool) -> tuple[np.ndarray, np.ndarray]:
        curve = plain_pytorch.train(
            LLAMA, corpus, seed=SEED, seq_len=SEQ_LEN, batch_sequences=BATCH, micro_batch_size=4,
            steps=STEPS, peak=PEAK, minimum=MINIMUM, warmup_tokens=WARMUP_TOKENS,
            clipping=CLIPPING, bf16=bf16,
        )  # fmt: skip
        losses, norms = np.array(curve).T
        return losses, norms

    return {bf16: curve(bf16) for bf16 in (False, True)}


ALWAYS = {("fp32", 1, 2), ("fp32", 2, 1), ("fp32", 3, 2), ("bf16", 2, 2), ("bf16", 3, 1)}
COMBINATIONS = [
    pytest.param(
        precision == "bf16", stage, world_size, id=f"{precision}-{stage}-{world_size}",
        marks=() if (precision, stage, world_size) in ALWAYS else pytest.mark.soak,
    )
    for precision in ("fp32", "bf16") for stage in (1, 2, 3) for world_size in (1, 2)
]  # fmt: skip


@pytest.mark.parametrize(("bf16", "stage", "world_size"), COMBINATIONS)
def test_curve_equals_plain_pytorch(
    tmp_path, corpus, llama, reference, stage, world_size, bf16
) -> None:
    run_dir = tmp_path / "run"
    json_file = profile(tmp_path / "ds.json", stage, bf16)
    micro = BATCH // 2 // world_size  # accumulation 2
    words = recipe(llama, corpus, run_dir, json_file, STEPS, micro)
    words += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    done = launch(world_size, *words)
    assert done.returncode == 0, done.stdout[-4000:]
    losses, norms = reference[bf16]
    found = np.array(list(rows(run_dir, "train/loss").values()))
    found_norms = np.array(list(rows(run_dir, "train/grad_norm").values()))
    assert len(found) == STEPS
    assert losses[0] - losses[-1] > 0.1, "the reference itself must learn"
    np.testing.assert_allclose(found, losses, rtol=5e-3 if bf16 else 1e-5)
    np.testing.assert_allclose(found_norms, norms, rtol=5e-2 if bf16 else 1e-4)
