"""One rank of the pair that tries a family, phase by phase.

Each phase writes its result as JSON into the directory of the family. An error ends the process
after its traceback was written. Most imports are for the processes that are forked from this one.
"""

import json
import os
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401
import torch
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
from transformers import AutoModelForCausalLM

import pretrain  # noqa: F401
from tests.end_to_end import runs_in_one_process
from tests.launching import rows, write_json
from tests.model_families import reference
from tests.model_families.toy_configs import EOS, SEQ_LEN, toy_config
from zerolm.cli import export
from zerolm.common.errors import ConfigError
from zerolm.distributed import collectives, process_group
from zerolm.preflight import check
from zerolm.report import plot  # noqa: F401

# {phase: (stage, bf16, document mask)}
RUNS = {
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "bf16": (3, True, False),
    "mask": (2, False, True),
}


class Trial:
    """A family on one rank.

    Args:
        directory: of the sweep; has the shards.
        family: a model_type.
    """

    def __init__(self, directory: Path, family: str, rank: int):
        self.family, self.rank = family, rank
        self.directory = directory / family
        self.model_dir = self.directory / "model"
        self.recipe = reference.Recipe(directory / "shards", EOS, SEQ_LEN)

    def flags(self, phase: str) -> list[str]:
        mask = RUNS[phase][2]
        recipe = self.recipe
        step_tokens = recipe.batch * recipe.seq_len
        flags: list[object] = [
            "--deepspeed_config", self.directory / f"ds-{phase}.json",
            "--model_config", self.model_dir, "--data", recipe.shards,
            "--run_dir", self.directory / phase, "--seq_len", recipe.seq_len,
            "--batch_tokens", step_tokens, "--micro_batch_size", recipe.micro_batch,
            "--total_tokens", recipe.steps * step_tokens, "--learning_rate", recipe.peak,
            "--min_learning_rate", recipe.minimum, "--warmup_tokens", 0, "--schedule", "cosine",
            "--weight_decay", recipe.weight_decay, "--seed", recipe.seed, "--log_interval", 1,
            "--wandb", "off", "--report_interval", 0, "--num_workers", 0,
            *(["--document_mask"] if mask else []),
        ]  # fmt: skip
        return [str(flag) for flag in flags]

    def prepare(self) -> None:
        """Write the model config and the DeepSpeed configs."""
        self.model_dir.mkdir(parents=True, exist_ok=True)
        write_json(self.model_dir / "config.json", toy_config(self.family))
        for phase, (stage, bf16, _) in RUNS.items():
            write_json(
                self.directory / f"ds-{phase}.json",
                {
                    "zero_optimization": {"stage": stage},
                    "bf16": {"enabled": bf16},
                    "gradient_clipping": self.recipe.clipping,
                },
            )

    def check(self) -> dict[str, Any]:
        """Run the preflight for each phase; return the problems by phase."""
        environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
        found = {}
        for phase in RUNS:
            try:
                check.check(self.flags(phase), environment)
                found[phase] = ""
            except ConfigError as error:
                found[phase] = str(error).replace(str(self.model_dir), "model")
        return found

    def run(self, phase: str, device: Any) -> dict[str, Any]:
        """Train; compare the curve on rank 1, and the export or the mask on rank 0."""
        weights = self.directory / f"{phase}-weights"
        weights.mkdir(exist_ok=True)
        runs_in_one_process.train(self.flags(phase), 0, device, str(weights))
        if self.rank == 1:
            return self.compare(phase)
        if phase == "mask":
            return {"leak": reference.leak(self.model_dir, self.kernel(), self.recipe)}
        if phase == "zero2":
            return {}
        return {"export": self.export(phase, weights / f"{self.recipe.steps:03d}.pt")}

    def kernel(self) -> str:
        record = json.loads((self.directory / "mask" / "run.json").read_text())
        return record["settings"]["attn_implementation"]

    def compare(self, phase: str) -> dict[str, Any]:
        apart = phase == "mask"
        cached = self.directory / f"reference-{'documents' if apart else 'rows'}.json"
        if not cached.is_file():
            write_json(cached, reference.train(self.model_dir, self.recipe, apart))
        expected = json.loads(cached.read_text())
        found = list(rows(self.directory / phase, "train/loss").values())
        differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
        return {"losses": found, "expected": expected, "difference": max(differences)}

    def export(self, phase: str, trained: Path) -> str:
        """Export the last checkpoint, reload it, and compare it with the weights of the engine."""
        output = self.directory / f"{phase}-export"
        checkpoints = sorted((self.directory / phase / "checkpoints").glob("step-*"))
        export.run(
            Namespace(
                checkpoint=checkpoints[-1], output=output, precision=None, max_shard_size=None,
                push=None, public=False, ema=False,
            )
        )  # fmt: skip
        expected = torch.load(trained)
        model: Any = AutoModelForCausalLM.from_pretrained(output)
        found = dict(model.named_parameters())
        if found.keys() != expected.keys():
            return f"other parameters: {sorted(found.keys() ^ expected.keys())[:3]}"
        dtype = torch.bfloat16 if RUNS[phase][1] else torch.float32
        wrong = [
            name
            for name, value in found.items()
            if not torch.equal(value.to(dtype), expected[name].to(dtype))
        ]
        return f"other values: {wrong[:3]}" if wrong else "equal"


def main(directory: Path, jobs: list[tuple[str, str]]) -> None:
    rank = int(os.environ["RANK"])
    _, _, device = process_group.init()
    for family, phase in jobs:
        if rank == 0:
            (directory / "current").write_text(f"{family} {phase}")
        print(f"== {family} {phase}", flush=True)
        trial = Trial(directory, family, rank)
        start = time.monotonic()
        result: dict[str, Any] = {}
        try:
            if phase == "check":
                if rank == 0:
                    trial.prepare()
                    result = trial.check()
            elif not json.loads((trial.directory / "check.0.json").read_text())[phase]:
                result = trial.run(phase, device)
        except BaseException as error:
            kind = "refused late" if isinstance(error, ConfigError) else "crashed"
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            write_json(
                trial.directory / f"{phase}.error{rank}.json",
                {"outcome": kind, "error": f"{type(error).__name__}: {error} ({where})"},
            )
            with (trial.directory / "errors.txt").open("a") as file:
                file.write(f"---- {phase}, rank {rank}\n{traceback.format_exc()}\n")
            traceback.print_exc()
            os._exit(1)
        result["seconds"] = round(time.monotonic() - start, 2)
        path = trial.directory / f"{phase}.{rank}.json"
        write_json(path.with_suffix(".tmp"), result)
        path.with_suffix(".tmp").replace(path)
        collectives.barrier()
    process_group.destroy()
    process_group.exit_process(0)
