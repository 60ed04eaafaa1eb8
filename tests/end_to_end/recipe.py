"""The recipe that the end-to-end tests share, and the parts of it that a test may vary."""

from pathlib import Path

from tests.launching import write_json

SEQ_LEN, BATCH, SEED, CLIPPING = 32, 8, 11, 0.5
STEP_TOKENS = BATCH * SEQ_LEN
# Of the runs that are compared with plain PyTorch.
STEPS, WARMUP_TOKENS = 20, 4 * STEP_TOKENS
PEAK, MINIMUM = 3e-3, 3e-4


def recipe(
    llama: Path, corpus: Path, run_dir: Path, profile: Path, steps: int, micro: int
) -> list[object]:
    """Return pretrain.py's flags; on two ranks with `micro` 2 they give 2 accumulation steps."""
    return [
        "--deepspeed_config", profile, "--model_config", llama, "--data", corpus,
        "--run_dir", run_dir, "--seq_len", SEQ_LEN, "--batch_tokens", STEP_TOKENS,
        "--micro_batch_size", micro, "--total_tokens", steps * STEP_TOKENS,
        "--learning_rate", PEAK, "--min_learning_rate", MINIMUM, "--weight_decay", 0.1,
        "--seed", SEED, "--log_interval", 1, "--report_interval", 0,
    ]  # fmt: skip


def profile(path: Path, stage: int, bf16: bool) -> Path:
    """Write a DeepSpeed config with only the given settings; the run chooses the others."""
    return write_json(
        path,
        {
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "gradient_clipping": CLIPPING,
        },
    )
