"""Host memory and time of an export and a merge, and of DeepSpeed's conversion.

    python benchmarks/export_memory.py [--model_config model_configs/llama-350m.json]

Two ranks train some steps with ZeRO-3, with a checkpoint of each. The newest one is converted to a
bf16 Hugging Face model in two ways: with `python -m zerolm export` (which also verifies checksums,
loads the result and compares logits), and as DeepSpeed's documentation recommends, with
`get_fp32_state_dict_from_zero_checkpoint`, `load_state_dict` and `save_pretrained`. All of them are
merged with `python -m zerolm merge`. Each of the three runs in a new process. The table has
seconds and peak anonymous memory (`RssAnon`, polled every 20 ms, minus that of a process with the
same imports; the kernel can reclaim pages of mapped files, which are not counted).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ROOT
from benchmarks.random_shard import write_random_shard

POLL_SECONDS = 0.02
PLAIN = """
import sys
from pathlib import Path
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
directory, config, output = sys.argv[1:]
state = get_fp32_state_dict_from_zero_checkpoint(directory)
config = AutoConfig.from_pretrained(config, trust_remote_code=False)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
model.load_state_dict(state, strict=True)
model.to(torch.bfloat16).save_pretrained(output)
"""
IDLE = """
import sys
import deepspeed, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False)
with torch.device("meta"):
    AutoModelForCausalLM.from_config(config, trust_remote_code=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_config", type=Path, default=ROOT / "model_configs/llama-350m.json")
    parser.add_argument(
        "--max_shard_size", default="100MB", help="maximum size of a safetensors file"
    )
    parser.add_argument(
        "--checkpoints", type=int, default=4, help="number of checkpoints that are merged"
    )
    parser.add_argument("--directory", type=Path, help="directory to work in (default: temporary)")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        table = measure(arguments, Path(name))
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


def measure(arguments: argparse.Namespace, work: Path) -> str:
    """Return the table for one checkpoint, exported in both ways."""
    run_dir = train(arguments.model_config, arguments.checkpoints, work)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    python = sys.executable
    idle, _ = watch([python, "-c", IDLE, str(arguments.model_config)], environment)
    shards = ["--max_shard_size", arguments.max_shard_size, "--precision", "bf16"]
    export = [python, "-m", "zerolm", "export", str(run_dir), str(work / "ours"), *shards]
    merge = [python, "-m", "zerolm", "merge", str(run_dir), str(work / "merged"), *shards]
    plain = [python, "-c", PLAIN, str(run_dir / "checkpoints"), str(arguments.model_config)]
    plain.append(str(work / "plain"))
    figures = {
        "zerolm export": watch(export, environment),
        f"zerolm merge of {arguments.checkpoints}": watch(merge, environment),
        "DeepSpeed's way": watch(plain, environment),
    }
    weights = sum(path.stat().st_size for path in (work / "ours").glob("*.safetensors"))
    largest = max(path.stat().st_size for path in (work / "ours").glob("*.safetensors"))
    lines = [
        "# Host memory of an export",
        "",
        f"`{' '.join(['python benchmarks/export_memory.py', *sys.argv[1:]])}`, "
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores. The model is "
        f"{weights / 1e6:,.0f} MB in bf16, its largest file {largest / 1e6:,.0f} MB.",
        "",
        "| | peak memory (MB) | / size of the model | seconds |",
        "|---|---|---|---|",
    ]
    for name, (peak, seconds) in figures.items():
        added = peak - idle
        lines.append(f"| {name} | {added / 1e6:,.0f} | {added / weights:.2f} | {seconds:.1f} |")
    ratio = (figures["zerolm export"][0] - idle) / (figures["DeepSpeed's way"][0] - idle)
    lines += ["", f"Memory, ratio: {ratio:.2f}", ""]
    return "\n".join(lines)


def train(model_config: Path, num_steps: int, work: Path) -> Path:
    """Train on two ranks, with a checkpoint of each step, and return the run directory."""
    write_random_shard(work / "shards", model_config, num_tokens=20_000)
    flags = [
        "--deepspeed_config", ROOT / "ds_configs/zero3.json", "--model_config", model_config,
        "--data", work / "shards", "--run_dir", work / "run", "--seq_len", 64,
        "--batch_tokens", 128, "--micro_batch_size", 1, "--wandb", "off",
        "--total_tokens", 128 * num_steps, "--checkpoint_interval", 1,
        "--checkpoint_keep", num_steps,
    ]  # fmt: skip
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    command += [str(ROOT / "pretrain.py"), *map(str, flags)]
    subprocess.run(command, check=True, timeout=1800, stdout=subprocess.DEVNULL)
    return work / "run"


def watch(command: list[str], environment: dict[str, str]) -> tuple[int, float]:
    """Run a command; return (its peak anonymous memory in bytes, its seconds)."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)[:300]}")
    return peak, time.perf_counter() - start


if __name__ == "__main__":
    main()
