"""Default values of settings, as functions of the model's size. Pure arithmetic.

Each formula cites its source. Only the micro-batch size depends on the devices, and only affects
speed, so training is the same on any hardware.
"""

import math
from collections.abc import Sequence

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv 2203.15556), Chinchilla
SEQ_LEN = 2048
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)  # Touvron et al. 2023 (arXiv 2302.13971), and most models since
LION_BETAS = (0.9, 0.99)  # Chen et al. 2023 (arXiv 2302.06675)
MIN_LEARNING_RATE_SHARE = 0.1  # Hoffmann et al. 2022: decay to a tenth of the peak
WARMUP_SHARE, RAMP_SHARE = 0.01, 0.1
DECAY_SHARE = 0.2  # Hägele et al. 2024 (arXiv 2405.18392): 20% of decay matches cosine
EVAL_TOKENS = 1_000_000
MAX_LEARNING_RATE = 3e-3  # the fit starts at 1e17 FLOPs, where it predicts 2.3e-3
CPU_MICRO_BATCH_TOKENS = 8192
# Fraction of a device's memory to use; the rest is for the context, NCCL and fragmentation.
MEMORY_SHARE = 0.9
NUM_LOGS, NUM_EVALS, NUM_CHECKPOINTS = 1000, 20, 10  # per run, used for the default intervals
MIN_INTERVAL_STEPS = {"log": 1, "eval": 10, "checkpoint": 50}
MAX_INTERVAL_STEPS = {"log": 10, "eval": 500, "checkpoint": 1000}


def learning_rate(training_flops: float) -> float:
    """Return the peak learning rate for a compute budget, rounded to two digits.

    Source: DeepSeek LLM (arXiv 2401.02954), equation 1: 0.3118 C^-0.1250.
    """
    return float(f"{min(MAX_LEARNING_RATE, 0.3118 * training_flops**-0.125):.1e}")


def batch_sequences(training_flops: float, seq_len: int, total_tokens: int) -> int:
    """Return the number of sequences in a global batch: the power of 2 nearest to the fitted size.

    The fitted size is at most a hundredth of the run, so even a short run has about a hundred
    steps.

    Source: DeepSeek LLM (arXiv 2401.02954), equation 1: 0.2920 C^0.3271 tokens.
    """
    tokens = min(0.2920 * training_flops**0.3271, total_tokens / 100)
    return 1 << max(0, round(math.log2(max(1.0, tokens / seq_len))))


def betas(is_lion: bool) -> tuple[float, float]:
    """Return the betas of Lion, or of other optimizers that have two."""
    return LION_BETAS if is_lion else BETAS


def min_learning_rate(peak: float) -> float:
    """Return the final learning rate of a schedule that uses it."""
    return peak * MIN_LEARNING_RATE_SHARE


def warmup_tokens(total_tokens: int, batch_tokens: int) -> int:
    """Return the length of the warm-up: a share of the run, but at least one batch."""
    return min(total_tokens, max(batch_tokens, math.ceil(total_tokens * WARMUP_SHARE)))


def decay_tokens(total_tokens: int, warmup_tokens: int) -> int:
    """Return the length of the decay at the end of a schedule that has one."""
    return max(1, min(math.ceil(total_tokens * DECAY_SHARE), total_tokens - warmup_tokens))


def ramp_tokens(total_tokens: int) -> int:
    """Return the length of a batch size ramp."""
    return math.ceil(total_tokens * RAMP_SHARE)


def eval_tokens(seq_len: int) -> int:
    """Return the number of validation tokens, if there are as many: at least one sequence."""
    return max(EVAL_TOKENS, seq_len)


def rollback_margin(total_steps: int) -> int:
    """Return how many steps before a spike a rollback also undoes, as these may be its cause.

    Source: PaLM (arXiv 2204.02311), section 5.1, went back "roughly 100 steps".
    """
    return min(100, max(1, total_steps // 100))


def interval(total_steps: int, what: str) -> int:
    """Return the default interval, in optimizer steps, for `what`: log, eval or checkpoint."""
    times = {"log": NUM_LOGS, "eval": NUM_EVALS, "checkpoint": NUM_CHECKPOINTS}[what]
    return max(MIN_INTERVAL_STEPS[what], min(MAX_INTERVAL_STEPS[what], total_steps // times))


def layer_activations(hidden_size: int, intermediate_size: int) -> int:
    """Estimate a layer's number of activation values per token, if a model cannot be traced.

    The estimate is 12 times the hidden size (inputs and outputs of both norms, queries, keys,
    values, the attention output, both residual sums, and two casts), plus 4 times the MLP width
    (gate, up, their product and the activation). SDPA and FlashAttention keep no attention scores.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for a gated MLP.
    """
    return 12 * hidden_size + 4 * intermediate_size


def micro_batch_candidates(per_rank: int) -> list[int]:
    """Return the powers of two that divide a rank's number of sequences, smallest first."""
    return [1 << power for power in range(per_rank.bit_length()) if per_rank % (1 << power) == 0]


def micro_batch_size(per_rank: int, sequence_bytes: int, budget_bytes: int | None) -> int:
    """Return the largest candidate whose activations fit in the budget, or 1 if none fits.

    Args:
        per_rank: number of sequences per rank in the smallest global batch.
        sequence_bytes: activation memory of one sequence.
        budget_bytes: memory available for activations; None for no limit.
    """
    fitting = [
        size
        for size in micro_batch_candidates(per_rank)
        if budget_bytes is None or size * sequence_bytes <= budget_bytes
    ]
    return max(fitting, default=1)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the multiples of `unit` below and above `value` as text, such as `960 or 1024`."""
    below = value // unit * unit
    choices: Sequence[int] = [below, below + unit] if below else [unit]
    return " or ".join(str(choice) for choice in choices)
