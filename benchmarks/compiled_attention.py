"""Time of attention in compiled blocks on a CPU, beside torch's own in the same graph.

    python -m benchmarks.compiled_attention [--lengths 512,1024,2048] [--heads 4] [--dtype bfloat16]

Forward and backward pass of 2,048 tokens, heads of 64 values, one thread, each compiled. Both run
in turn, and each turn gives a ratio of CPU times; the table has their quartiles.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from zerolm.model import compiled_attention

TOKENS, HEAD_DIM, TURNS = 2048, 64, 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="512,1024,2048", help="of sequences, in tokens")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compiled_attention.MAX_TOKENS = TOKENS**2
    compiled_attention.DTYPES = (getattr(torch, arguments.dtype),)
    print("| tokens | ms | torch, ms | torch's time over ours, quartiles |\n|---|---|---|---|")
    for length in map(int, arguments.lengths.split(",")):
        shape = (max(1, TOKENS // length), length, arguments.heads, HEAD_DIM)
        values = [torch.randn(shape).to(compiled_attention.DTYPES[0]) for _ in range(4)]
        torch._dynamo.reset()
        functions = [compiled(compiled_attention.attention), compiled(sdpa_attention_forward)]
        for _ in range(2):
            turn(functions, values)  # compiles
        turns = [turn(functions, values) for _ in range(TURNS)]
        ratios = quantiles([torchs / ours for ours, torchs in turns], n=4)
        cells = [f"{1e3 * median(seconds):.0f}" for seconds in zip(*turns, strict=True)]
        print(f"| {length} | {' | '.join(cells)} | {', '.join(f'{each:.2f}' for each in ratios)} |")


def compiled(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    module = torch.nn.Module()

    def attend(*values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = function(module, *(each.transpose(1, 2) for each in values), None)[0]
        return output

    return torch.compile(attend)


def turn(functions: list[Callable[..., torch.Tensor]], values: list[torch.Tensor]) -> list[float]:
    """Return the CPU seconds of each function, forward and backward."""
    found = []
    for function in functions:
        *inputs, gradient = (each.clone().requires_grad_() for each in values)
        start = time.process_time()
        torch.autograd.grad(function(*inputs), inputs, gradient)
        found.append(time.process_time() - start)
    return found


if __name__ == "__main__":
    main()
