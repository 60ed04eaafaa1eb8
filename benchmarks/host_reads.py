"""Counts where a training step makes the host wait for the device.

    python -m benchmarks.host_reads --stages 1 2 3 --precision bf16

Compares pretrain.py with a bare DeepSpeed loop and the Hugging Face Trainer, on one rank, with the
same DeepSpeed JSON, model and data, and prints a table: places per optimizer step. Needs no GPU:
counted are the operations that block on one, as they are called on a CPU.

    read       a value of a tensor: item(), bool(), float(), tolist(), numpy(), nonzero()
    copy       a tensor made of Python numbers on the device: its copy from pageable memory blocks
    wait       the accelerator's synchronize(), also where DeepSpeed leaves it out on a CPU

Not counted: waits of one stream for another, which do not block the host; batches before they are
copied to the device; `functional.one_hot`, which checks its input on a CPU only. Figures of a step
are means; those of a script, of the last four steps of twelve.
"""

import argparse
import contextlib
import json
import linecache
import os
import runpy
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import ROOT
from benchmarks.contenders import LOOPS

READING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
}
PYTHON_READING = {"tolist", "numpy", "cpu"}
ON_CPU_ONLY = ("functional.one_hot",)
ON_HOST = "zerolm/data/"
STEPS = 8, 12
ACCUMULATION, MICRO_BATCH, SEQ_LEN = 4, 2, 32
OURS, BARE, TRAINER = "pretrain.py", "bare DeepSpeed", "Trainer"
SCRIPTS = {BARE: "bare_deepspeed.py", TRAINER: "hf_trainer.py"}

Places = Counter[tuple[str, str]]  # {(kind, place in the source): number of times}


class _Operations(TorchDispatchMode):
    """Counts operations that read a value."""

    def __init__(self, found: Places):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in READING:
            _count(self.found, "read")
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Counts Python functions of tensors that read values or copy them to the device."""

    def __init__(self, found: Places):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in PYTHON_READING:
            _count(self.found, "read")
        elif name == "tensor" and torch.get_default_device() is not None:
            _count(self.found, "copy")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[Places]:
    """Count inside the context, in the thread that entered it."""
    from deepspeed.accelerator import get_accelerator

    found: Places = Counter()
    kind = type(get_accelerator())
    originals = kind.synchronize, kind.resolves_data_dependency

    def synchronize(self: Any, *args: Any, **kwargs: Any) -> Any:
        _count(found, "wait")
        return originals[0](self, *args, **kwargs)

    def resolves_data_dependency(self: Any) -> Any:
        caller = traceback.extract_stack()[-2]
        if "synchronize()" in linecache.getline(caller.filename, (caller.lineno or 0) + 1):
            _count(found, "wait")
        return originals[1](self)

    kind.synchronize, kind.resolves_data_dependency = synchronize, resolves_data_dependency
    try:
        with _Operations(found), _Functions(found):
            yield found
    finally:
        kind.synchronize, kind.resolves_data_dependency = originals


def _count(found: Places, what: str) -> None:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        inside_torch = "torch" in path.parts and "distributed" not in path.parts
        if path == Path(__file__) or inside_torch:
            continue
        on_host = ON_HOST in frame.filename
        if not on_host and not any(each in (frame.line or "") for each in ON_CPU_ONLY):
            found[what, f"{'/'.join(path.parts[-3:])}:{frame.lineno}"] += 1
        return


# -------------------------------------------------------------------------------------------------
# In a process with one rank


def count_ours(flags: list[str], steps: int) -> Places:
    """Train with pretrain.py's own parts; return the counts of `steps` steps, after two others."""
    import pretrain
    from zerolm.distributed import collectives
    from zerolm.preflight import check
    from zerolm.train import stability
    from zerolm.train.run import Run

    # The check would find the port in use, by this process group.
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    plan = check.check(flags, environment)
    Path(plan.settings.run_dir, "checkpoints").mkdir(parents=True)
    device = torch.device("cpu")
    engine = pretrain.build_engine(plan, device, partial(collectives.print_rank0, 0))
    run = Run(plan, engine, device, stability.StopRequest(None))
    run.start()
    batches = run.batches()
    for _ in range(2):
        run.step(batches)
    with counting() as found:
        for _ in range(steps):
            run.step(batches)
    batches.close()
    engine.destroy()
    return found


def count_script(argv: list[str]) -> Places:
    """Run a training script in this process; return the counts of all of it."""
    sys.argv = argv
    with counting() as found, contextlib.suppress(SystemExit):
        runpy.run_path(argv[0], run_name="__main__")
    return found


# -------------------------------------------------------------------------------------------------
# Driver


def flags_of(directory: Path, name: str, steps: int, profile: Path) -> list[str]:
    """Return the command line of a contender, as a list."""
    common = ["--deepspeed_config", str(profile), "--model_config", str(directory / "llama.json")]
    common += ["--seq_len", str(SEQ_LEN)]
    if name == OURS:
        tokens = ACCUMULATION * MICRO_BATCH * SEQ_LEN
        common += ["--data", str(directory / "corpus"), "--run_dir", str(directory / name)]
        common += ["--batch_tokens", str(tokens), "--micro_batch_size", str(MICRO_BATCH)]
        common += ["--total_tokens", str(100 * tokens), "--learning_rate", "1e-3"]
        return [*common, "--log_interval", "1000", "--wandb", "off"]
    script = ROOT / LOOPS / SCRIPTS[name]
    shard = next((directory / "corpus").glob("*.bin"))
    common += ["--shard", str(shard), "--steps", str(steps), "--log_interval", "1000"]
    if name == TRAINER:
        common += ["--micro_batch_size", str(MICRO_BATCH), "--accumulation", str(ACCUMULATION)]
    return [str(script), *common]


def profile_of(directory: Path, name: str, stage: int, precision: str) -> Path:
    """Write the shipped profile of a stage, with numbers for loops that do not resolve "auto"."""
    profile = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    profile["bf16"] = {"enabled": precision == "bf16"}
    if name != OURS:
        profile |= {"train_micro_batch_size_per_gpu": MICRO_BATCH}
        profile |= {"gradient_accumulation_steps": ACCUMULATION}
        profile |= {"train_batch_size": MICRO_BATCH * ACCUMULATION}
        params = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        if name == BARE:
            profile["optimizer"]["params"] |= params
        profile["optimizer"]["params"]["torch_adam"] = True
    path = directory / f"{name.split()[0]}-{stage}.json"
    path.write_text(json.dumps(profile))
    return path


def measure(directory: Path, name: str, stage: int, precision: str) -> dict[str, float]:
    """Return the places of a step, `kind file:line`, and how often each occurs."""
    from tests.launching import run_workers

    profile = profile_of(directory, name, stage, precision)
    counts: dict[int, Places] = {}
    for steps in STEPS[:1] if name == OURS else STEPS:
        output = directory / "places.json"
        arguments = [name, steps, output, *flags_of(directory, name, steps, profile)]
        run_workers(1, Path(__file__), "--worker", *arguments, timeout=600)
        counts[steps] = Counter(json.loads(output.read_text()))
        shutil.rmtree(directory / OURS, ignore_errors=True)
    if name == OURS:
        return {place: count / STEPS[0] for place, count in counts[STEPS[0]].items()}
    fewer, more = (counts[steps] for steps in STEPS)
    per_step = {place: (more[place] - fewer[place]) / (STEPS[1] - STEPS[0]) for place in more}
    return {place: count for place, count in per_step.items() if count}


def work(name: str, steps: int, output: Path, argv: list[str]) -> None:
    """Count in this process, and write the places to a file."""
    if name == OURS:
        import deepspeed

        torch.distributed.init_process_group("gloo")
        deepspeed.init_distributed("gloo")
        found = count_ours(argv, steps)
    else:
        found = count_script(argv)
    output.write_text(json.dumps({" ".join(place): count for place, count in found.items()}))
    os._exit(0)  # a script has destroyed its process group, or not


def table(found: dict[tuple[int, str], dict[str, float]]) -> str:
    lines = [
        f"| stage | loop | of {ACCUMULATION} micro-batches and a step | read | copy | wait |",
        "|---|---|---|---|---|---|",
    ]
    for (stage, name), places in found.items():
        kinds: Counter[str] = Counter()
        for place, count in places.items():
            kinds[place.split()[0]] += count  # type: ignore[assignment]
        counts = " | ".join(f"{kinds[kind]:g}" for kind in ("read", "copy", "wait"))
        lines.append(f"| {stage} | {name} | {sum(places.values()):g} | {counts} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        _, _, name, steps, output, *argv = sys.argv
        work(name, int(steps), Path(output), argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--only", nargs="+", choices=(OURS, BARE, TRAINER))
    options = parser.parse_args()
    from tests.launching import LLAMA, write_json, write_shards

    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_json(directory / "llama.json", LLAMA)
        write_shards(directory / "corpus", shard_tokens=1 << 20)
        for stage in options.stages:
            for name in options.only or (OURS, BARE, TRAINER):
                found[stage, name] = measure(directory, name, stage, options.precision)
                print(f"stage {stage}, {name}:")
                for place, count in sorted(found[stage, name].items()):
                    print(f"  {count:6g} {place}", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
