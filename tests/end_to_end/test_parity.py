"""One recipe, any profile, the same curve: against a loop in plain PyTorch."""

from pathlib import Path

import numpy as np
import plain_pytorch
import pytest

from tests.launching import LLAMA, launch, rows, write_json, write_shards

SEQ_LEN, BATCH, STEPS, SEED, CLIPPING = 32, 8, 20, 11, 0.5
WARMUP_TOKENS = 4 * BATCH * SEQ_LEN
PEAK, MINIMUM = 3e-3, 3e-4


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("corpus") / "counting")


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return write_json(tmp_path_factory.mktemp("models") / "llama.json", LLAMA)


def recipe(llama: Path, corpus: Path, run_dir: Path, profile: Path, micro: int) -> list[object]:
    return [
        "--deepspeed_config", profile, "--model_config", llama, "--data", corpus,
        "--run_dir", run_dir, "--seq_len", SEQ_LEN, "--batch_tokens", BATCH * SEQ_LEN,
        "--micro_batch_size", micro, "--total_tokens", STEPS * BATCH * SEQ_LEN,
        "--learning_rate", PEAK, "--min_learning_rate", MINIMUM, "--warmup_tokens", WARMUP_TOKENS,
        "--schedule", "cosine", "--weight_decay", 0.1, "--seed", SEED, "--log_interval", 1,
        "--checkpoint_interval", 10_000, "--wandb", "off",
    ]  # fmt: skip


def profile(path: Path, stage: int, bf16: bool, **more: object) -> Path:
    return write_json(
        path,
        {
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": CLIPPING,
            **more,
        },
    )


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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_curve_equals_plain_pytorch(
    tmp_path, corpus, llama, reference, stage, world_size, bf16
) -> None:
    if bf16 and world_size == 1 and stage != 2:
        pytest.skip("bf16 on one rank is tried at one stage, to save launches")
    run_dir = tmp_path / "run"
    json_file = profile(tmp_path / "ds.json", stage, bf16)
    micro = BATCH // 2 // world_size  # accumulation 2
    done = launch(world_size, *recipe(llama, corpus, run_dir, json_file, micro))
    assert done.returncode == 0, done.stdout[-4000:]
    losses, norms = reference[bf16]
    found = np.array(list(rows(run_dir, "train/loss").values()))
    found_norms = np.array(list(rows(run_dir, "train/grad_norm").values()))
    assert len(found) == STEPS
    assert losses[0] - losses[-1] > 1, "the reference itself must learn"
    np.testing.assert_allclose(found, losses, rtol=5e-3 if bf16 else 1e-5)
    np.testing.assert_allclose(found_norms, norms, rtol=5e-2 if bf16 else 1e-4)
