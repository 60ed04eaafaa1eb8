"""Loss of `--fp8` beside bf16 and float32, under ZeRO-1, 2 and 3 on two ranks.

    python -m benchmarks.fp8_loss [--steps 300] [--output FILE]

A small Llama trains on Python's own library and manual (the text of launch/demo.sh), with the same
initial weights and sequences in each case. The table has the mean training loss of the last tenth
of the steps, the validation loss at the end, and that of the exported model (`zerolm evaluate`),
each with the difference from float32; `stage 2` is the largest relative difference of a step's loss
from that under ZeRO-2. The seconds are CPU time of all processes and a step, with the start; a CPU
only emulates fp8, so they say nothing about a GPU.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import ROOT

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
SEQ_LEN, BATCH = 64, 16
CASES = [
    ("fp32", (2,), []), ("bf16", (1, 2, 3), []), ("fp8", (1, 2, 3), ["--fp8"]),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        table = compare(Path(work), arguments.steps)
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


def compare(work: Path, steps: int) -> str:
    """Train all cases and return the table."""
    from tests.end_to_end import runs_in_one_process

    prepare_data(work)
    model = work / "model.json"
    model.write_text(json.dumps(MODEL))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for precision, stages, more in CASES:
        jobs = []
        for stage in stages:
            profile = work / f"{precision}-{stage}.json"
            profile.write_text(json.dumps(ds_config(stage, precision)))
            jobs.append({"flags": [*flags(work, model, profile, steps), *more]})
        before = cpu_seconds()
        runs_in_one_process.launch(jobs, work)
        seconds = (cpu_seconds() - before) / steps / len(stages)
        for stage in stages:
            found[precision, stage] = figures(work, work / f"runs/{precision}-{stage}", steps)
            found[precision, stage]["seconds"] = seconds
            print(f"{precision}, stage {stage}: done", flush=True)
    return as_table(found, steps)


def prepare_data(work: Path) -> None:
    """Write token shards of the demo's text, and held-out ones."""
    python("launch.demo.corpus", work / "text")
    tokenizer, shards = work / "tokenizer", work / "shards"
    given = ["--input", work / "text/prose.jsonl"]
    size = ["--vocab_size", MODEL["vocab_size"]]
    python("data_prep", "train-tokenizer", *given, *size, "--output", tokenizer)
    held_out = ["--val_fraction", 0.02, "--val_output", work / "held-out"]
    python("data_prep", "tokenize", *given, "--tokenizer", tokenizer, "--output", shards, *held_out)


def ds_config(stage: int, precision: str) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision != "fp32"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": 1.0,
    }


def flags(work: Path, model: Path, profile: Path, steps: int) -> list[object]:
    tokens = SEQ_LEN * BATCH
    return [
        "--deepspeed_config", profile, "--model_config", model, "--data", work / "shards",
        "--val_data", work / "held-out", "--eval_tokens", 32 * SEQ_LEN, "--eval_interval", steps,
        "--run_dir", work / "runs" / profile.stem, "--seq_len", SEQ_LEN, "--batch_tokens", tokens,
        "--micro_batch_size", BATCH // 2, "--total_tokens", steps * tokens,
        "--learning_rate", 3e-3, "--log_interval", 1, "--checkpoint_interval", steps,
        "--wandb", "off",
    ]  # fmt: skip


def figures(work: Path, run_dir: Path, steps: int) -> dict[str, Any]:
    """Return the losses of a run, and that of its exported model."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == steps, len(losses)
    exported = work / "exported" / run_dir.name
    python("zerolm", "export", run_dir, exported)
    given = ["--val_data", work / "held-out", "--seq_len", SEQ_LEN, "--eval_tokens", 32 * SEQ_LEN]
    python("zerolm", "evaluate", exported, *given, "--output", work / "evaluated.json")
    return {
        "losses": losses,
        "train": mean(losses[-max(1, steps // 10) :]),
        "eval": next(row["eval/loss"] for row in rows if "eval/loss" in row),
        "exported": json.loads((work / "evaluated.json").read_text())["figures"]["loss"],
    }


def as_table(found: dict[tuple[str, int], dict[str, Any]], steps: int) -> str:
    exact = found["fp32", 2]
    lines = [
        f"# Loss with --fp8\n\n`python -m benchmarks.fp8_loss --steps {steps}`, {date.today()}, "
        f"{platform.machine()}. A Llama of {MODEL['num_hidden_layers']} layers, "
        f"{MODEL['hidden_size']} wide, {steps} steps of {SEQ_LEN * BATCH:,} tokens, two ranks. "
        f"In brackets the difference from fp32.\n",
        "| precision | ZeRO | training loss | validation | exported model | from stage 2 | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for (precision, stage), row in found.items():
        cells = [
            f"{row[key]:.4f} ({row[key] - exact[key]:+.4f})"
            for key in ("train", "eval", "exported")
        ]
        pairs = zip(row["losses"], found[precision, 2]["losses"], strict=True)
        apart = max(abs(one / other - 1) for one, other in pairs)
        cells += [f"{apart:.1e}", f"{row['seconds']:.2f}"]
        lines.append(f"| {precision} | {stage} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def python(*arguments: object) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


if __name__ == "__main__":
    main()
