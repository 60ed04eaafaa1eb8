"""Recovery from anomalies: roll back to an earlier checkpoint without a restart.

Called by pretrain.py after each step. All ranks make the same decisions, based on figures reduced
over ranks and on what rank 0 read from disk.
"""

from functools import partial
from typing import Any

from zerolm.checkpoint import rollback
from zerolm.common.errors import GaveUp
from zerolm.common.faults import fault_point
from zerolm.distributed import collectives
from zerolm.optim.spikes import GIVE_UP, MAX_CONSECUTIVE_OVERFLOWS, ROLL_BACK, SKIP_WINDOW_STEPS
from zerolm.preflight import run_record
from zerolm.run_dir.records import Rollback
from zerolm.train import resume
from zerolm.train.run import Run
from zerolm.train.stability import advice


def plan_rollback(run: Run) -> Rollback | None:
    """Return the rollback that the spike guard requested after the last step, if any.

    Return None as well if there is no checkpoint to roll back to yet. Every rank must call this;
    only rank 0 reads the disk.

    Raises:
        GaveUp: on every rank, if the guard gives up, `max_rollbacks` is reached, or no checkpoint
            predates the spike and the run cannot continue without a rollback.
    """
    guard, response = run.spike_guard, run.anomaly_response
    if response not in (ROLL_BACK, GIVE_UP):
        return None
    run.finish_checkpoint()  # the checkpoint being written may be the target
    progress, settings = run.progress, run.settings
    first_anomaly = [*guard.recent(progress.step), progress.step][0]
    why = f"{guard.reason or f'{MAX_CONSECUTIVE_OVERFLOWS} consecutive fp16 overflows'}."
    entry = last_good = None
    if run.rank == 0:
        before_spike = rollback.target(run.run_dir, first_anomaly, 0)
        found = before_spike or rollback.target(run.run_dir, progress.step + 1, 0)
        last_good = found and str(found.directory)
        entry = rollback.plan(
            run.run_dir, progress, run.plan.batch_schedule, first_anomaly, settings.rollback_margin,
            why, partial(resume.position_after, run.plan),
        )  # fmt: skip
    entry, last_good = collectives.broadcast_object((entry, last_good))
    if response == ROLL_BACK and progress.rollbacks >= settings.max_rollbacks:
        why += f" The limit --max_rollbacks {settings.max_rollbacks} is reached."
    elif response == ROLL_BACK and entry is not None:
        entry["order"] = run_record.data_order(run.plan)
        return entry
    elif response == ROLL_BACK:
        if not guard.weights_lost and not guard.skips_exhausted(progress.step):
            return None  # the step was refused, so the weights are intact
        why += " No checkpoint predates the spike."
    elif guard.reason:
        limit = f"--max_skips {settings.max_skips} in {SKIP_WINDOW_STEPS} steps"
        why += f" The limit {limit} is reached."
    raise GaveUp(f"step {progress.step}: {why} {advice(last_good)}")


def roll_back(run: Run, batches: Any, entry: Rollback) -> Any:
    """Load a checkpoint from before the spike, and return batches that skip the spike's data.

    Every rank must call this.
    """
    batches.close()  # ends the loader's workers
    run.journal.log_rollback(run.progress.step, entry)
    if run.rank == 0:
        rollback.record(run.run_dir, entry)
    collectives.barrier()  # every rank reads the record that rank 0 wrote
    fault_point("rollback.load", entry["from_step"])
    resume.start(run)
    if run.rank == 0:
        rollback.remove_older(run.run_dir, entry["number"])
    return run.batches()
