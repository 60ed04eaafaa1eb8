"""One rank of test_checks.py: trains tiny models with a flipped bit, in one process per rank.

    RANK=0 WORLD_SIZE=2 ... python integrity_worker.py JOBS.json REPORT.json

A job: `flags` of pretrain.py, and `flip`: place, rank and step of the bit. The place is a kind of
state, "activation" or "gradient" (of one, on the way back), or "copy": weights in the update. The
report has for each the digest of all weights after the last step, the events, and the error that
ended it.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

STEPS, RANK = 5, int(os.environ["RANK"])


def flip(run, place: str, step: int) -> None:
    """Flip a bit on this rank, between two steps or in the next one."""
    from zerolm.engine.states import states
    from zerolm.integrity.checks import flip_bit

    if run.progress.step != step - 1:
        return
    for state in states(run.engine):
        if state.kind == place:
            flip_bit(state.values, bit=3)
            return
    blocks = run.engine.module.model.layers  # some may be on other pipeline stages
    module = next(block.mlp.up_proj for block in blocks if hasattr(block, "mlp"))
    if place == "activation":

        def hook(module, inputs, output) -> None:
            handle.remove()
            flip_bit(output.data, bit=-3)

        handle = module.register_forward_hook(hook)
    elif place == "gradient":

        def backward_hook(module, of_inputs, of_outputs) -> None:
            handle.remove()
            flip_bit(of_inputs[0].data, bit=-3)

        handle = module.register_full_backward_hook(backward_hook)
    elif place == "copy":
        (checks,) = (each.checks for each in run.features if each.name == "integrity")
        end_step = checks.end_step

        def end(number: int) -> None:
            weights = next(each for each in states(run.engine) if each.kind == "weights")
            flip_bit(weights.values, bit=3)
            end_step(number)
            checks.end_step = end_step

        checks.end_step = end


def train(job: dict, device) -> dict:
    from zerolm import features
    from zerolm.common.errors import CorruptionError
    from zerolm.distributed import collectives
    from zerolm.engine.states import states
    from zerolm.integrity import seal
    from zerolm.integrity.digests import digest
    from zerolm.preflight import check
    from zerolm.train import resume, stability
    from zerolm.train.engine_building import build_engine
    from zerolm.train.run import Run

    seal.MAX_INTERVAL = 1  # digests in every step, however slow this machine is
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    plan = check.check(job["flags"], environment)
    if RANK == 0:
        Path(plan.settings.run_dir, "checkpoints").mkdir(parents=True, exist_ok=True)
    collectives.barrier()
    wanted = features.build(plan)
    engine = build_engine(plan, wanted, device, partial(collectives.print_rank0, RANK))
    run = Run(plan, engine, wanted, device, stability.StopRequest(None))
    resume.start(run)
    batches, error = run.batches(), None
    place, rank, step = job["flip"] or ("", -1, 0)
    try:
        while run.progress.step < STEPS:
            if rank == RANK and place == "batch" and run.progress.step == step - 1:
                first = next(batches)
                first["targets"][0, 3] ^= 4
                batches = chain(first, batches)
            if rank == RANK:
                flip(run, place, step)
            run.step(batches)
    except CorruptionError as raised:
        error = [str(raised), raised.places, raised.exit_code]
    final = [int(digest(state.values)) for state in states(engine)]
    run.journal.log.close()
    batches.close()
    collectives.barrier()
    events = []
    if RANK == 0:
        lines = Path(plan.run_dir, "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
    engine.destroy()
    return {"final": collectives.gather_objects(final), "events": events, "error": error}


def chain(first, rest):
    yield first
    yield from rest


def main(jobs: str, report: str) -> None:
    from zerolm.common import faults
    from zerolm.distributed import process_group

    _, _, device = process_group.init()
    torch.set_num_threads(1)
    found = []
    for job in json.loads(Path(jobs).read_text()):
        faults._FAULTS[:] = faults.parse_faults(job.get("fault", ""))
        found.append(train(job, device))
    if RANK == 0:
        Path(report).write_text(json.dumps(found))
    process_group.destroy()
    process_group.exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
