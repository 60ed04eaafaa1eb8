"""The rates that a training step cannot exceed: matrix products and attention at a model's shapes.

    python -m benchmarks.gpu.ceilings --model_config model_configs/llama-1.3b.json

Prints TFLOP/s of bf16 on random data, forward and backward, and GB/s of a copy. The figures are
medians of `--repeats` timings. A backward pass counts twice the FLOPs of the forward pass; causal
attention counts half of the scores.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

COPY_BYTES = 1 << 30
COPY_BYTES_CPU = 1 << 26


def seconds_of(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of a call, after one that does not count."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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
        seconds = seconds_of(
            lambda x=x, weight=weight: forward_backward(functional.linear, x, weight),
            repeats,
            device,
        )
        shape = f"{tokens} x {hidden} x {width}"
        found[f"{name}, {shape}"] = 6 * tokens * hidden * width / seconds / 1e12
        del x, weight
    query, key, value = (random(tokens // seq_len, heads, seq_len, head_dim) for _ in range(3))
    seconds = seconds_of(
        lambda: forward_backward(
            lambda *each: functional.scaled_dot_product_attention(*each, is_causal=True),
            query,
            key,
            value,
        ),
        repeats,
        device,
    )
    operations = 6 * tokens * seq_len * heads * head_dim  # half of 12
    found[f"causal attention, {heads} heads of {head_dim}"] = operations / seconds / 1e12
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES_CPU
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_of(lambda: target.copy_(source), repeats, device)
    found["copy, GB/s read and written"] = 2 * size / copy_seconds / 1e9
    return found


def table(found: dict[str, float]) -> str:
    rows = [f"| {name} | {rate:,.1f} |" for name, rate in found.items()]
    return "\n".join(["| operation, forward and backward | TFLOP/s |", "|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_config", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    config = json.loads(arguments.model_config.read_text())
    print(table(rates(config, arguments.tokens, arguments.seq_len, arguments.repeats)))


if __name__ == "__main__":
    main()
