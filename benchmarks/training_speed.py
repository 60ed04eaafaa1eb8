"""Steps per second of pretrain.py, of a bare DeepSpeed loop, and of Hugging Face Trainer.

    python benchmarks/training_speed.py
    python benchmarks/training_speed.py --flags=--compile
    python benchmarks/training_speed.py --flags=--compile --trainer_flags=--compile
    python benchmarks/training_speed.py --model_config model_configs/llama-160m.json \\
        --num_layers 2 --micro_batch_size 4
    python benchmarks/training_speed.py --model_config model_configs/mixtral-tiny.json
    python benchmarks/training_speed.py --litgpt .venv-peers/bin/python

All three train the same model with the same DeepSpeed JSON, batch and token shard under the real
`deepspeed` launcher. They are started once, warmed up, and then take turns of a few seconds, while
the other two are paused (SIGSTOP). A slower machine slows down all of them, and ratios are taken
within a round. Each prints a line every few steps; the time between two lines of a turn counts, and
includes everything that a contender does.

litgpt (`--litgpt`, the Python of the environment that benchmarks/peers.sh creates) is an optional
fourth: a model of the same shape and number of parameters, the same batch and shard, in one process
with all threads, since on CPUs its pretraining supports no more. It always compiles, so compare it
with `--flags=--compile`.

pretrain.py stays in its learning-rate warmup, so the others get a learning rate as small. Routers
of a mixture of experts that learn send all tokens to a few experts, and then compute less.
"""

import argparse
import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import LOOPS
from benchmarks.contenders.litgpt_shape import litgpt_shape
from benchmarks.contenders.turns import Contender, Litgpt, add_flags, take_turns, with_quartiles
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard

OURS, BARE, TRAINER = "pretrain.py", "bare DeepSpeed loop", "Hugging Face Trainer"
LITGPT = "litgpt, one process"
STEPS = 1_000_000  # more than a benchmark can take: it kills its contenders before
LEARNING_RATE = 1e-5  # of contenders without a warmup


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its contenders end, too
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        if arguments.num_layers:
            config = json.loads(Path(arguments.model_config).read_text())
            arguments.model_config = str(scratch / "model.json")
            shallow = config | {"num_hidden_layers": arguments.num_layers}
            Path(arguments.model_config).write_text(json.dumps(shallow))
        write_random_shard(scratch / "shards", arguments.model_config)
        contenders: list[Contender] = []
        names = [OURS, BARE, TRAINER, *([LITGPT] if arguments.litgpt else [])]
        try:
            for name in names:
                script = command_of(name, arguments, scratch)
                kind = Litgpt if name == LITGPT else Contender
                contenders.append(kind(name, script, arguments))
                contenders[-1].warm_up()
                print(f"{name}: warm", flush=True)
            seconds = take_turns(contenders, arguments.rounds)
            reported = reported_step_seconds(scratch / "run", contenders[0].counted)
        finally:
            for contender in contenders:
                contender.kill()
    report = table(seconds, reported, step_tokens(arguments))
    if arguments.litgpt:
        report += f"\n\n{litgpt_note(arguments)}"
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print("\n" + report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument(
        "--num_layers", type=int, help="number of layers (default: that of the config)"
    )
    parser.add_argument(
        "--flags", default="", help="additional flags of pretrain.py, such as --flags=--compile"
    )
    parser.add_argument("--trainer_flags", default="", help="additional flags of hf_trainer.py")
    parser.add_argument("--litgpt", help="Python of an environment with litgpt, to include it")
    arguments = parser.parse_args()
    if arguments.litgpt:
        try:
            litgpt_shape(json.loads(Path(arguments.model_config).read_text()), arguments.seq_len)
        except ValueError as error:
            parser.error(f"--litgpt: not for {arguments.model_config}:\n{error}")
    return arguments


def step_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens per optimizer step, which are the same for all contenders."""
    sequences = arguments.micro_batch_size * arguments.accumulation * arguments.num_processes
    return arguments.seq_len * sequences


def command_of(name: str, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the arguments of `deepspeed` that run one contender."""
    seq_len, log_interval = str(arguments.seq_len), str(arguments.log_interval)
    common = ["--model_config", arguments.model_config, "--seq_len", seq_len]
    common += ["--log_interval", log_interval]
    run_dir = scratch / "run"
    if name == OURS:
        return [
            "pretrain.py", *common, "--deepspeed_config", arguments.deepspeed_config,
            "--data", str(scratch / "shards"), "--run_dir", str(run_dir),
            "--micro_batch_size", str(arguments.micro_batch_size),
            "--batch_tokens", str(step_tokens(arguments)),
            "--total_tokens", str(STEPS * step_tokens(arguments)),
            "--checkpoint_interval", str(STEPS), "--wandb", "off", *arguments.flags.split(),
        ]  # fmt: skip
    common += ["--steps", str(STEPS), "--shard", str(scratch / "shards/shard-00000.bin")]
    if name == BARE:
        resolved = scratch / "resolved.json"
        resolved.write_text(json.dumps(resolved_profile(arguments, run_dir)))
        return [f"{LOOPS}/bare_deepspeed.py", *common, "--deepspeed_config", str(resolved)]
    if name == LITGPT:
        micro = (
            arguments.micro_batch_size * arguments.num_processes
        )  # all sequences that the others process at once
        return [
            f"{LOOPS}/litgpt_pretrain.py", *common, "--micro_batch_size", str(micro),
            "--batch_size", str(step_tokens(arguments) // arguments.seq_len),
            "--parameters", str(num_parameters(arguments.model_config)),
            "--out_dir", str(scratch / "litgpt"),
        ]  # fmt: skip
    return [
        f"{LOOPS}/hf_trainer.py", *common, "--deepspeed_config", arguments.deepspeed_config,
        "--micro_batch_size", str(arguments.micro_batch_size),
        "--accumulation", str(arguments.accumulation), "--learning_rate", str(LEARNING_RATE),
        *arguments.trainer_flags.split(),
    ]  # fmt: skip


def num_parameters(model_config: str) -> int:
    """Return the number of parameters of the Hugging Face model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_config, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def litgpt_note(arguments: argparse.Namespace) -> str:
    """Return a note about the version of litgpt, and how it was run."""
    ask = "from importlib.metadata import version; print(version('litgpt'), version('torch'))"
    versions = subprocess.run(
        [arguments.litgpt, "-c", ask], capture_output=True, text=True, check=True
    )
    litgpt, torch = versions.stdout.split()
    return (
        f"litgpt {litgpt}, torch {torch}: its own `litgpt.pretrain.setup` in one process with "
        "all threads (on CPUs Fabric refuses FSDP, which it uses for several), its torch.compile, "
        "bf16-mixed, AdamW; the same number of parameters."
    )


def resolved_profile(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Return the profile with "auto" values as pretrain.py resolved them, and this batch."""
    ds_config = json.loads((run_dir / "run.json").read_text())["ds_config"]
    ds_config.pop("train_batch_size", None)
    ds_config["train_micro_batch_size_per_gpu"] = arguments.micro_batch_size
    ds_config["gradient_accumulation_steps"] = arguments.accumulation
    ds_config["optimizer"]["params"]["lr"] = LEARNING_RATE
    return ds_config


def reported_step_seconds(run_dir: Path, measured: set[int]) -> list[float]:
    """Return `throughput/step_seconds` of the lines that counted, which excludes logging."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    key = "throughput/step_seconds"
    return [row[key] for row in rows if key in row and row["step"] in measured]


def table(seconds: dict[str, list[float]], reported: list[float], tokens: int) -> str:
    """Return the Markdown table: steps per second, and ratios to pretrain.py.

    Args:
        reported: seconds of a step as pretrain.py reports them.
        tokens: tokens per step.
    """
    lines = [
        f"`python {shlex.join(sys.argv)}`, {time.strftime('%Y-%m-%d')}, {hardware()}",
        "",
        "| contender | steps/s, median | steps/s, all turns | tokens/s, median "
        "| speed of pretrain.py / contender |",
        "|---|---|---|---|---|",
    ]
    for name, times in seconds.items():
        ratios = [other / ours for other, ours in zip(times, seconds[OURS], strict=True)]
        ratio = "1" if name == OURS else with_quartiles(ratios)
        median, mean = 1 / statistics.median(times), 1 / statistics.fmean(times)
        rate = f"{median * tokens:,.0f}"
        lines.append(f"| {name} | {median:.3f} | {mean:.3f} | {rate} | {ratio} |")
    lines += [
        "",
        f"{len(seconds[OURS])} rounds of {tokens:,} tokens per step; the last column is the median "
        f"over the rounds. "
        f"pretrain.py itself reports {statistics.median(reported):.4f} s per step (median).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
