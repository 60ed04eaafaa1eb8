"""Train several runs one after another in one process per rank: much faster than a launch each.

    RANK=0 WORLD_SIZE=2 ... python runs_in_one_process.py JOBS.json

A job has these keys. `flags`: of pretrain.py. `until` (optional): step at which it saves and stops.
`weights` (optional): directory for all weights after each step. `exact` (optional): run Muon's
Newton-Schulz iteration in float32; DeepSpeed uses fp16 on machines that multiply in it. `fp16`
(optional): let a CPU without instructions for fp16 pass for one with them, as torch emulates them.

Engines, steps, metrics and checkpoints are those of pretrain.py. Signals, watchdog and trackers are
left out.
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
    """Train jobs one after another on `world_size` ranks; return their output."""
    path = directory / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    return run_workers(world_size, Path(__file__), path, timeout=SECONDS, **more)


def full(parameter: torch.Tensor) -> torch.Tensor:
    """Return the value of a frozen parameter, which no optimizer has."""
    from zerolm.engine.parameters import gathered

    with gathered([parameter]):
        return parameter.detach().clone()


def write_weights(engine, path: Path) -> None:
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {
        name: safe_get_full_fp32_param(parameter) if parameter.requires_grad else full(parameter)
        for name, parameter in engine.module.named_parameters()
    }
    if int(os.environ["RANK"]) == 0:
        torch.save({name: weight.detach().clone() for name, weight in weights.items()}, path)


def train(flags: list[str], until: int, device, weights: str = "") -> None:
    from zerolm import features
    from zerolm.distributed import collectives
    from zerolm.preflight import check
    from zerolm.train import resume, stability
    from zerolm.train.engine_building import build_engine
    from zerolm.train.run import Run

    # The check would find the port in use, by the process group of all these runs.
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    plan = check.check(flags, environment)
    rank = int(os.environ["RANK"])
    if rank == 0:
        Path(plan.settings.run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    collectives.barrier()
    say = partial(collectives.print_rank0, rank)
    say(plan.summary())
    wanted = features.build(plan)
    engine = build_engine(plan, wanted, device, say)
    run = Run(plan, engine, wanted, device, stability.StopRequest(None))
    resume.start(run)
    batches = run.batches()
    while not run.finished and not run.stopping:
        run.step(batches)
        if weights:
            write_weights(engine, Path(weights) / f"{run.progress.step:03d}.pt")
        run.stopping |= run.progress.step == until
        run.report()
        run.save_if_due()
        run.evaluate_if_due()
    run.finish_checkpoint()
    run.journal.log.close()
    batches.close()
    collectives.barrier()
    engine.destroy()


def main(path: str) -> None:
    from deepspeed.runtime.zero.muon import original_muon

    from zerolm.distributed import process_group

    _, _, device = process_group.init()
    as_shipped, exact = original_muon.ns_compute_dtype, False
    for job in json.loads(Path(path).read_text()):
        print("job", *job["flags"], flush=True)
        if job.get("fp16"):
            torch.ops.mkldnn._is_mkldnn_fp16_supported = lambda: True
        if job.get("exact", False) != exact:
            exact = not exact
            original_muon.ns_compute_dtype = (lambda method: torch.float32) if exact else as_shipped
            torch.compiler.reset()  # the iteration was compiled for the other precision
        flags = [str(flag) for flag in job["flags"]]
        train(flags, job.get("until", 0), device, job.get("weights", ""))
    process_group.destroy()
    process_group.exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1])
