"""One rank that trains several runs in one process: what a launch each would take minutes for.

    RANK=0 WORLD_SIZE=2 ... python several_runs.py JOBS.json

Each job has the arguments of pretrain.py (`words`), and may have the step at which it saves and
stops (`until`), a directory to write all weights to after each step (`weights`), and whether Muon's
Newton-Schulz iteration is to run in float32 (`exact`): DeepSpeed's does where the machine does not
multiply in fp16, else in that. The engines, steps, metrics and checkpoints are those of
pretrain.py; what it does around them (signals, watchdog, trackers) is left out. What was refused,
or went wrong, is printed.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

from tests.launching import run_workers

SECONDS = 1200


def launch(jobs: list[dict], directory: Path, world_size: int = 2, **more: str) -> str:
    """Train jobs one after another on so many ranks, and return what they printed."""
    path = directory / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    return run_workers(world_size, Path(__file__), path, timeout=SECONDS, **more)


def write_weights(engine, path: Path) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = engine.module.named_parameters()
    weights = {name: safe_get_full_fp32_param(one) for name, one in parameters}
    if int(os.environ["RANK"]) == 0:
        torch.save({name: weight.detach().clone() for name, weight in weights.items()}, path)


def train(words: list[str], until: int, device, weights: str = "") -> None:
    import pretrain
    from zerolm import distributed, preflight, stability
    from zerolm.run import Run

    # The port is taken: by the process group of all these runs.
    own = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    plan = preflight.check(words, own)
    rank = int(os.environ["RANK"])
    if rank == 0:
        Path(plan.settings.run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    say = partial(distributed.say, rank)
    say(plan.summary())
    engine = pretrain.build_engine(plan, device, say)
    run = Run(plan, engine, device, stability.StopRequest(None))
    run.begin()
    batches = run.batches()
    while not run.finished and not run.stopping:
        run.step(batches)
        if weights:
            write_weights(engine, Path(weights) / f"{run.progress.step:03d}.pt")
        run.stopping |= run.progress.step == until
        run.report()
        if run.due(run.settings.checkpoint_interval):
            run.save()
    run.finish_checkpoint()
    run.journal.log.close()
    batches.close()
    distributed.barrier()
    engine.destroy()


def main(path: str) -> None:
    from deepspeed.runtime.zero.muon import original_muon

    from zerolm import distributed

    _, _, device = distributed.start()
    as_shipped, exact = original_muon.ns_compute_dtype, False
    for job in json.loads(Path(path).read_text()):
        print("job", *job["words"], flush=True)
        if job.get("exact", False) != exact:
            exact = not exact
            original_muon.ns_compute_dtype = (lambda method: torch.float32) if exact else as_shipped
            torch.compiler.reset()  # it has compiled the other precision
        words = [str(word) for word in job["words"]]
        train(words, job.get("until", 0), device, job.get("weights", ""))
    distributed.stop()
    distributed.leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
