"""One recipe, any profile: the same losses and health metrics as a loop in plain PyTorch."""

import numpy as np
import pytest

from tests.end_to_end import plain_pytorch
from tests.end_to_end.recipe import (
    BATCH,
    CLIPPING,
    SEQ_LEN,
    STEPS,
    WARMUP_TOKENS,
    profile,
    recipe,
)
from tests.launching import LLAMA, rows, run_ranks, write_json


@pytest.fixture(scope="session")
def reference(corpus):
    known: dict[tuple[bool, bool], list[plain_pytorch.Step]] = {}

    def curve(bf16: bool, tied: bool) -> list[plain_pytorch.Step]:
        if (bf16, tied) not in known:
            config = {**LLAMA, "tie_word_embeddings": tied}
            known[bf16, tied] = plain_pytorch.train(config, corpus, bf16=bf16)
        return known[bf16, tied]

    return curve


ALWAYS = {("fp32", 3, 2)}
COMBINATIONS = [
    pytest.param(
        precision == "bf16", stage, world_size, tied,
        id=f"{precision}-{stage}-{world_size}{'-tied' if tied else ''}",
        marks=() if (precision, stage, world_size) in ALWAYS and not tied else pytest.mark.soak,
    )
    for precision in ("fp32", "bf16") for stage in (1, 2, 3) for world_size in (1, 2)
    for tied in (False, True) if not tied or world_size == 2
]  # fmt: skip


@pytest.mark.parametrize(("bf16", "stage", "world_size", "tied"), COMBINATIONS)
def test_curve_and_health_equal_plain_pytorch(
    tmp_path, corpus, reference, stage, world_size, bf16, tied
) -> None:
    run_dir = tmp_path / "run"
    json_file = profile(tmp_path / "ds.json", stage, bf16)
    llama = write_json(tmp_path / "llama.json", {**LLAMA, "tie_word_embeddings": tied})
    micro = BATCH // 2 // world_size  # accumulation 2
    flags = recipe(llama, corpus, run_dir, json_file, STEPS, micro)
    flags += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    done = run_ranks(world_size, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    curve = reference(bf16, tied)
    losses = np.array([step.loss for step in curve])
    found = np.array(list(rows(run_dir, "train/loss").values()))
    assert len(found) == STEPS
    assert losses[0] - losses[-1] > 0.1, "the reference itself must learn"
    np.testing.assert_allclose(found, losses, rtol=5e-3 if bf16 else 1e-5)
    assert_equal_to_reference(
        run_dir, "train/grad_norm", [step.grad_norm for step in curve], 5e-2 if bf16 else 1e-4
    )
    check_health(run_dir, curve, bf16)
    check_noise(run_dir, curve, micro, bf16)


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_log_interval_does_not_change_training(tmp_path, corpus, llama, stage) -> None:
    json_file = profile(tmp_path / "ds.json", stage, bf16=False)
    found = {}
    for interval in (1, 10):
        run_dir = tmp_path / str(interval)
        flags = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
        flags += ["--log_interval", interval, "--wandb", "off"]
        done = run_ranks(2, *flags)
        assert done.returncode == 0, done.stdout[-4000:]
        found[interval] = [
            [rows(run_dir, f"train/{key}")[step] for step in (10, 20)]
            for key in ("loss", "grad_norm", "param_norm", "update_ratio")
        ]
    assert found[1] == found[10]


def check_health(run_dir, curve: list[plain_pytorch.Step], bf16: bool) -> None:
    """Compare norms, update ratios and clipping with those of the unsharded model."""
    assert ("lm_head" in curve[0].param_norms) == bool(rows(run_dir, "train/param_norm/lm_head"))
    for block in curve[0].param_norms:
        end = f"/{block}" if block else ""
        norms = [step.param_norms[block] for step in curve]
        assert_equal_to_reference(run_dir, f"train/param_norm{end}", norms, 1e-3 if bf16 else 1e-5)
        ratios = [step.update_ratios[block] for step in curve]
        assert_equal_to_reference(
            run_dir, f"train/update_ratio{end}", ratios, 1e-2 if bf16 else 1e-4
        )
    clipped = [step.grad_norm > CLIPPING for step in curve]
    assert list(rows(run_dir, "train/clipped_share").values()) == clipped


def check_noise(run_dir, curve: list[plain_pytorch.Step], micro: int, bf16: bool) -> None:
    """Compare the noise scale with that of the unsharded model."""
    expected = plain_pytorch.noise_scales(curve, micro, BATCH, SEQ_LEN)
    assert sum(value is not None for value in expected) > STEPS / 2, (
        "the reference must have a noise scale"
    )
    assert_equal_to_reference(run_dir, "train/noise_scale_tokens", expected, 5e-2 if bf16 else 2e-3)


def assert_equal_to_reference(
    run_dir, key: str, expected: list[float | None], tolerance: float
) -> None:
    by_step = {number: value for number, value in enumerate(expected, 1) if value is not None}
    found = rows(run_dir, key)
    assert list(found) == list(by_step), key
    differences = [abs(found[step] / by_step[step] - 1) for step in found]
    print(f"{key}: at most {max(differences):.1e} from plain PyTorch")
    assert max(differences) <= tolerance, key
