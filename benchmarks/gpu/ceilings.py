"""The rates that a training step cannot exceed: matrix products and attention at a model's shapes.

    python -m benchmarks.gpu.ceilings --model_config model_configs/llama-1.3b.json

Prints TFLOP/s of bf16 on random data, forward and backward, and GB/s of a copy. The figures are
medians of `--repeats` timings. A backward pass counts twice the FLOPs of the forward pass; causal
attention counts half of the scores.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from benchmarks import tables

COPY_BYTES = 1 << 30
COPY_BYTES_CPU = 1 << 26


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, after one that does not count."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(1).mean for _ in range(repeats))


def forward_backward(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    output = function(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))


def rates(config: dict[str, int], tokens: int, seq_len: int, repeats: int) -> dict[str, float]:
    """Return {name: TFLOP/s, or GB/s of the copy}.

    Args:
        config: of a Llama.
        tokens: of a micro-batch.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    found = {}
    outputs = {"attention projection": hidden, "MLP": config["intermediate_size"]}
    for name, width in (outputs | {"output head": config["vocab_size"]}).items():
        x, weight = random(tokens, hidden), random(width, hidden)
        seconds = seconds_of(partial(forward_backward, functional.linear, x, weight), repeats)
        shape = f"{tokens} x {hidden} x {width}"
        found[f"{name}, {shape}"] = 6 * tokens * hidden * width / seconds / 1e12
        del x, weight
    query, key, value = (random(tokens // seq_len, heads, seq_len, head_dim) for _ in range(3))
    causal = partial(functional.scaled_dot_product_attention, is_causal=True)
    seconds = seconds_of(partial(forward_backward, causal, query, key, value), repeats)
    operations = 6 * tokens * seq_len * heads * head_dim  # half of 12
    found[f"causal attention, {heads} heads of {head_dim}"] = operations / seconds / 1e12
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES_CPU
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_of(partial(target.copy_, source), repeats)
    found["copy, GB/s read and written"] = 2 * size / copy_seconds / 1e9
    return found


def main() -> None:
    parser = tables.parser(__doc__, has_table=False)
    parser.add_argument("--model_config", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    config = json.loads(arguments.model_config.read_text())
    found = rates(config, arguments.tokens, arguments.seq_len, arguments.repeats)
    rows = [[name, f"{rate:,.1f}"] for name, rate in found.items()]
    print(tables.table(["operation, forward and backward", "TFLOP/s"], rows))


if __name__ == "__main__":
    main()
