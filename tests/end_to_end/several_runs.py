"""One rank that trains several runs in one process: what a launch each would take minutes for.

    RANK=0 WORLD_SIZE=2 ... python several_runs.py JOBS.json

Each job has the arguments of pretrain.py (`words`), and may have the step at which it saves and
stops (`until`). The engines, steps, metrics and checkpoints are those of pretrain.py; what it does
around them (signals, watchdog, trackers) is left out. What was refused, or went wrong, is printed.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.launching import environment, free_port

SECONDS = 1200


def launch(jobs: list[dict], directory: Path, world_size: int = 2, **more: str) -> str:
    """Train jobs one after another on so many ranks, and return what they printed."""
    path = directory / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    addresses |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, path],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **addresses, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(out[-4000:] for out in outputs)
    return outputs[0]


def train(words: list[str], until: int, device) -> None:
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
    from zerolm import distributed

    _, _, device = distributed.start()
    for job in json.loads(Path(path).read_text()):
        print("job", *job["words"], flush=True)
        train([str(word) for word in job["words"]], job.get("until", 0), device)
    distributed.stop()
    distributed.leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
