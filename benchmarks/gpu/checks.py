"""Checks that training on this GPU is correct, before benchmarks/gpu measures its speed.

    python -m benchmarks.gpu.checks --output results-of-this-gpu
    python -m benchmarks.gpu.checks --write_curves      # on a CPU: results/gpu_parity.json

A 160M model trains a few steps through pretrain.py: its losses are those that a CPU had, in float32
and in bf16; a run that is killed with SIGKILL and resumed has the losses of a run that is not, as
closely as the same command has them twice: attention's backward pass on a GPU adds in no fixed
order; attention kernels agree on documents; a run that is out of memory or hangs ends by itself and
says why. Each result is written immediately, and a second call with the same --output repeats only
the checks that have not passed.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import ROOT, tables
from benchmarks.gpu.run_case import device_state
from benchmarks.gpu.short_runs import SEQ_LEN, STEPS, Failed, Runs, reason
from zerolm.common.errors import EXIT_BUG
from zerolm.run_dir.files import RunFiles

CURVES = ROOT / "benchmarks/results/gpu_parity.json"
SAVED_AT = STEPS // 2
# Time for the checkpoint, which is published after the step; then it is killed.
HELD = f"FAULT=step.begin:0:{SAVED_AT + 2}:sleep=20,step.begin:0:{SAVED_AT + 3}:sleep=600"
FP8_STEPS, LAST_STEPS = 200, 20
FP8_OPTIONS = "--compile --spike_threshold 0 --learning_rate 1e-4"
LARGE_MICRO_BATCH = 8192
MANY_STEPS, HANG_SECONDS = 100_000, 20
# Largest difference of a loss: other kernels sum in another order.
TOLERANCES = {"float32": 1e-3, "bf16": 2e-2, "documents": 2e-2, "fp8": 2e-2}
NOISE_FACTOR = 10  # a resumed run may differ this many times as much as two runs of one command
FLOAT32 = "bf16.enabled=false"
FRESH = "starting each rank afresh"  # of the node launcher, when it cannot fork


class NotHere(Exception):
    """A check cannot run on this machine; the message gives the reason."""


def largest_difference(one: list[float], other: list[float]) -> float:
    if not len(one) == len(other) == STEPS:
        raise Failed(f"{len(one)} and {len(other)} steps instead of {STEPS}")
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def agree(kind: str, one: list[float], other: list[float]) -> str:
    difference = largest_difference(one, other)
    if not difference <= TOLERANCES[kind]:
        raise Failed(f"losses differ by {difference:.1e}: {one} and {other}")
    return f"losses of {STEPS} steps differ by at most {difference:.1e}"


def curve(runs: Runs, kind: str) -> list[float]:
    return json.loads(CURVES.read_text())[runs.model][kind]


def parity_in_bf16(runs: Runs) -> str:
    return agree("bf16", runs.train("unbroken", "--compile"), curve(runs, "bf16"))


def kill_and_resume(runs: Runs) -> str:
    unbroken = runs.losses.get("unbroken") or runs.train("unbroken", "--compile")
    noise = largest_difference(unbroken, runs.train("again", "--compile"))
    runs.train("killed", f"--compile {HELD}", kill=True)
    difference = largest_difference(unbroken, runs.train("killed", "--compile"))
    found = (
        f"losses differ by at most {difference:.1e}, those of the same command twice by {noise:.1e}"
    )
    if difference > NOISE_FACTOR * noise:
        raise Failed(found)
    if f"\nstep={SAVED_AT}/" in (runs.scratch / "killed.log").read_text():
        raise Failed("the killed run began at step 1 again")
    resumed = f"step {SAVED_AT + 1} again {runs.first_step_seconds:.1f} s after the start"
    return f"killed in step {SAVED_AT + 3}, {resumed}: {found}"


def parity_in_float32(runs: Runs) -> str:
    return agree("float32", runs.train("float32", FLOAT32), curve(runs, "float32"))


def forked_ranks(runs: Runs) -> str:
    """Train in ranks that the node launcher forks, which it does on GPUs only by a flag."""
    fresh = runs.losses.get("float32") or runs.train("float32", FLOAT32)
    found = agree("float32", runs.train("forked", FLOAT32, forks=True), fresh)
    if FRESH in (log := (runs.scratch / "forked.log").read_text()):
        raise Failed(next(line for line in log.splitlines() if FRESH in line))
    return f"{found}; first step {runs.first_step_seconds:.1f} s after the start"


def documents(runs: Runs) -> str:
    """Compare the attention kernels that mask documents and are available on this device."""
    import torch

    on_gpu = ("sdpa", "flex_attention", "varlen")
    first, *others = on_gpu if torch.cuda.is_available() else ("sdpa", "eager")
    reference = runs.train(first, f"--document_mask --attn_implementation {first}")
    found = []
    for each in others:
        losses = runs.train(each, f"--document_mask --attn_implementation {each}")
        found.append(f"{each} beside {first}: {agree('documents', losses, reference)}")
    return "; ".join(found)


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise NotHere("needs a GPU")


def fp8_loss(runs: Runs) -> str:
    """Compare the mean loss of the last steps of a longer run in fp8 with that in bf16."""
    require_gpu()
    losses = {
        kind: sum(runs.train(kind, options, steps=FP8_STEPS)[-LAST_STEPS:]) / LAST_STEPS
        for kind, options in (("fp8", f"{FP8_OPTIONS} --fp8"), ("bf16 beside fp8", FP8_OPTIONS))
    }
    found = ", ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items())
    if not abs(losses["fp8"] - losses["bf16 beside fp8"]) <= TOLERANCES["fp8"]:
        raise Failed(f"mean losses of the last {LAST_STEPS} steps: {found}")
    return f"mean losses of the last {LAST_STEPS} of {FP8_STEPS} steps: {found}"


def out_of_memory(runs: Runs) -> str:
    """Train with a micro-batch that fits on no GPU: the run must exit with advice on what to do."""
    require_gpu()
    batch = LARGE_MICRO_BATCH * SEQ_LEN
    options = (
        f"--micro_batch_size {LARGE_MICRO_BATCH} --batch_tokens {batch} --total_tokens {batch}"
    )
    start = time.monotonic()
    with contextlib.suppress(Failed):
        runs.train("large", options)
    lines = (runs.scratch / "large.log").read_text().splitlines()
    found = [line for line in lines if "out of memory" in line and "Lower --micro_batch" in line]
    if not found:
        raise Failed(f"no advice after {time.monotonic() - start:.0f} s: {' '.join(lines[-3:])}")
    return found[0]


def hang(runs: Runs) -> str:
    """Stop one of two ranks with SIGSTOP; on a single GPU, let its rank sleep."""
    import psutil
    import torch

    ranks = 1 if torch.cuda.device_count() == 1 else 2
    options = f"--hang_timeout {HANG_SECONDS}s"
    options += " FAULT=step.begin:0:3:sleep=600" if ranks == 1 else ""
    with runs.started("stopped", options, MANY_STEPS, ranks) as (process, log):
        deadline = time.monotonic() + 2 * runs.seconds
        runs.wait(process, log, "\nstep=2/", deadline)
        heartbeat = RunFiles(runs.scratch / "stopped").heartbeat(ranks - 1).read_text()
        if ranks > 1:
            psutil.Process(json.loads(heartbeat)["pid"]).suspend()
        verdict = runs.wait(process, log, "watchdog: ", deadline)
        states = [device_state()]
        end = verdict + runs.wait(process, log, None, deadline)
        states.append(device_state())
    found = next((line for line in log.read_text().splitlines() if "watchdog: " in line), "")
    if not found or process.returncode != EXIT_BUG:
        raise Failed(f"exit code {process.returncode}: {reason(log)}")
    devices = "; ".join(filter(None, states))
    return f"verdict after {verdict:.0f} s, end after {end:.0f} s, exit code 1: {found} {devices}"


CHECKS: dict[str, Callable[[Runs], str]] = {
    "bf16, compiled, beside a CPU": parity_in_bf16,
    "SIGKILL and resume": kill_and_resume,
    "float32 beside a CPU": parity_in_float32,
    "forked ranks": forked_ranks,
    "document mask": documents,
    "fp8 beside bf16": fp8_loss,
    "out of memory": out_of_memory,
    "hang": hang,
}


def run_checks(arguments: argparse.Namespace, deadline: float) -> str:
    """Run the checks that have not passed; return the table.

    Args:
        deadline: value of `time.monotonic()`; checks that do not fit before it are left out.
    """
    path = arguments.output / "checks.json" if arguments.output else None
    passed: dict[str, list[str]] = json.loads(path.read_text()) if path and path.exists() else {}
    results = dict(passed)
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(arguments.toy, Path(scratch), arguments.case_seconds)
        for name, check in CHECKS.items():
            if name in passed:
                continue
            if time.monotonic() + arguments.case_seconds / 2 > deadline:
                results[name] = ["not run", "out of time", "-"]
                continue
            start = time.monotonic()
            try:
                outcome = ["passed", check(runs)]
            except NotHere as error:
                outcome = ["not run", str(error)]
            except Exception as error:  # one that fails otherwise must not end the others
                text = str(error) if isinstance(error, Failed) else repr(error)
                outcome = ["FAILED", " ".join(text.replace("|", "/").split())[:400]]
            results[name] = [*outcome, f"{time.monotonic() - start:.0f}"]
            print(f"{name}: {': '.join(outcome)}", flush=True)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                kept = {key: row for key, row in results.items() if row[0] == "passed"}
                path.write_text(json.dumps(kept, indent=1) + "\n")
                path.with_suffix(".md").write_text(table(results) + "\n")
    return table(results)


def table(results: dict[str, list[str]]) -> str:
    rows = [[name, *row] for name, row in results.items()]
    return tables.table(["check", "result", "", "seconds"], rows)


def write_curves(seconds: float) -> None:
    """Write the losses that this machine has, which must be a CPU."""
    found = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    for toy in (True, False):
        with tempfile.TemporaryDirectory() as scratch:
            runs = Runs(toy, Path(scratch), seconds)
            bf16 = runs.train("bf16")
            found[runs.model] = {"bf16": bf16, "float32": runs.train("float32", FLOAT32)}
        CURVES.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = tables.parser(__doc__, has_table=False)
    parser.add_argument("--output", type=Path, help="directory for checks.md and checks.json")
    parser.add_argument("--toy", action="store_true", help="use a tiny model")
    parser.add_argument("--case_seconds", type=float, default=150, help="time limit of a run")
    parser.add_argument("--write_curves", action="store_true", help=f"write {CURVES.name}")
    arguments = parser.parse_args()
    if arguments.write_curves:
        write_curves(arguments.case_seconds)
    else:
        print(run_checks(arguments, float("inf")))


if __name__ == "__main__":
    main()
