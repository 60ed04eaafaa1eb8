"""Memory and time of the loss with --loss_chunk_tokens, compared with all logits at once.

    python benchmarks/chunked_loss.py [--vocabulary 128000] [--tokens 4096] [--chunks 512 ...]

A two-layer Llama with a large vocabulary runs forward and backward through
`zerolm.model.loss.token_losses`, each time in a new process: with all logits at once, and in chunks
of each size. The table has two figures and their ratios to all logits at once: the peak memory of
the step without weights and gradients (VmHWM; on a CUDA device what torch allocates), and its
seconds (on a CPU the CPU time, which other load hardly changes). It also has the largest difference
of a loss, and of a gradient (norm of the difference divided by the norm).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ROOT

LAYERS, HIDDEN, SEQ_LEN = 2, 512, 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument(
        "--tokens", type=int, default=4096, help=f"tokens of a micro-batch, a multiple of {SEQ_LEN}"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[512])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--turns", type=int, default=2, help="number of measurements of each")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(**json.loads(arguments.one))))
        return
    table = compare(arguments)
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


def compare(arguments: argparse.Namespace) -> str:
    """Run all contenders in turn, and return the table."""
    lines = []
    with tempfile.TemporaryDirectory() as work:
        for precision in arguments.precisions:
            turns = [
                {
                    chunk: _in_a_process(
                        chunk=chunk,
                        precision=precision,
                        vocabulary=arguments.vocabulary,
                        tokens=arguments.tokens,
                        device=arguments.device,
                        reference=f"{work}/{precision}.pt",
                    )
                    for chunk in (0, *arguments.chunks)
                }
                for _ in range(arguments.turns)
            ]
            lines += [_row(precision, chunk, turns) for chunk in turns[0]]
    flags = f"--vocabulary {arguments.vocabulary} --tokens {arguments.tokens}"
    flags += f" --chunks {' '.join(map(str, arguments.chunks))} --turns {arguments.turns}"
    command = f"python benchmarks/chunked_loss.py {flags} --device {arguments.device}"
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    return "\n".join(
        [
            "# Memory and time of the loss in chunks",
            "",
            f"`{command}`, {date.today()}, {platform.machine()}, {threads} thread(s). A Llama of "
            f"{LAYERS} layers, {HIDDEN} wide, {arguments.vocabulary:,} tokens in its vocabulary, "
            f"{arguments.tokens:,} in the micro-batch.",
            "",
            "| weights | tokens in a chunk | step's memory (MB) | ratio | seconds | ratio | "
            "largest difference of a loss | of a gradient |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            "Ratios to all logits at once are taken within a turn; figures are medians over turns.",
            "",
        ]
    )


def _row(precision: str, chunk: int, turns: list[dict[int, dict[str, float]]]) -> str:
    def median(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    figures = [turn[chunk] for turn in turns]
    cells = [precision, f"{chunk:,}" if chunk else "all"]
    for key, shown in (("bytes", "{:,.0f}"), ("seconds", "{:.1f}")):
        value = median([figure[key] for figure in figures]) / (1e6 if key == "bytes" else 1)
        ratio = median([turn[chunk][key] / turn[0][key] for turn in turns])
        cells += [shown.format(value), f"{ratio:.2f}"]
    for key in ("loss", "gradient"):
        cells.append(f"{max(figure[key] for figure in figures):.1e}" if chunk else "")
    return "| " + " | ".join(cells) + " |"


def _in_a_process(**job: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps(job)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    chunk: int, precision: str, vocabulary: int, tokens: int, device: str, reference: str
) -> dict[str, float]:
    """Take one step in this process; the one with all logits writes the reference file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerolm.model import chunked_loss
    from zerolm.model.loss import token_losses

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=8, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.to(device).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter).fill_(0)  # written, so that it is resident
    ids = torch.randint(0, vocabulary, (tokens // SEQ_LEN, SEQ_LEN + 1)).to(device)
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    if chunk:
        chunked_loss.install(model, chunk)
    token_losses(model, {name: rows[:1, :8] for name, rows in batch.items()})[0].sum().backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    before = _memory(device, reset=True)
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    losses, _ = token_losses(model, batch)
    losses.mean().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - start
    figures = {"seconds": seconds, "bytes": _memory(device, reset=False) - before}
    gradients = [parameter.grad.cpu() for parameter in model.parameters()]
    if not chunk:
        torch.save((losses.detach().cpu(), gradients), reference)
        return figures | {"loss": 0.0, "gradient": 0.0}
    expected, others = torch.load(reference, mmap=True, weights_only=True)
    figures["loss"] = float((losses.detach().cpu() - expected).abs().max())
    figures["gradient"] = max(
        float((one - other).float().norm() / other.float().norm())
        for one, other in zip(gradients, others, strict=True)
    )
    return figures


def _memory(device: str, reset: bool) -> int:
    """Return the peak memory in bytes; with `reset`, start a new peak at the current memory."""
    import torch

    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM becomes VmRSS
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
