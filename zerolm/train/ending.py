"""End a run when its budget is spent, a stop was requested, or an error occurred on all ranks.

Called by pretrain.py after the training loop. Every rank makes the same calls.
"""

import time

from zerolm.checkpoint.rotation import remove_unfinished
from zerolm.common.errors import EXIT_DONE, EXIT_STOPPED, CorruptionError, GaveUp, ZerolmError
from zerolm.distributed import collectives, process_group
from zerolm.run_dir.files import RunFiles
from zerolm.train.run import Run
from zerolm.watchdog.progress import record_progress


def end(run: Run) -> int:
    """Log that the run is done or stopped, close everything, and return the exit code."""
    record_progress("end")
    step, log = run.progress.step, run.journal.log
    if run.plan.ds.block("comms_logger"):
        collectives.print_communication_table()
    if run.finished:
        if run.rank == 0:  # what a kill after the last save has left
            for problem in remove_unfinished(RunFiles(run.run_dir).checkpoints):
                run.print_rank0(problem)
        log.event("done", step, tokens=run.progress.tokens)
        run.print_rank0(f"done: {step} steps, {run.progress.tokens} tokens, {run.run_dir}")
    else:
        reasons = collectives.gather_objects(run.stop.reason)
        reason = next(filter(None, reasons), "a request")
        log.event("stopped", step, reason=reason)
        run.print_rank0(f"stopped on request ({reason}): run the same command again to resume")
    run.journal.close("done" if run.finished else "stopped")
    _close_features(run)
    process_group.destroy(run.engine.destroy)
    _finish_child_processes(run)
    # After a nonzero exit code, the launcher kills all other ranks, so they wait until rank 0 has
    # finished.
    while not run.finished and process_group.waits_for_rank0():
        record_progress("end")
        time.sleep(0.05)
    return EXIT_DONE if run.finished else EXIT_STOPPED


def fail(run: Run, error: ZerolmError) -> None:
    """Log the error that ends the run on all ranks, and close everything."""
    if isinstance(error, GaveUp):
        run.finish_checkpoint()
        _close_features(run)
    event = "gave_up" if isinstance(error, GaveUp) else "failed"
    if isinstance(error, CorruptionError):
        event = "corrupted"
        run.journal.log.event(
            "corrupted", run.progress.step + 1, reason=str(error), places=error.places
        )
    else:
        run.journal.log.event(event, run.progress.step, reason=str(error))
    run.journal.close(event)
    _finish_child_processes(run)


def _close_features(run: Run) -> None:
    """Close all features at the end of a run."""
    for feature in run.features:
        feature.close()


def _finish_child_processes(run: Run) -> None:
    """Wait for the HTML report, the uploads and the trackers, each with a time limit."""
    run.html_report.finish()
    run.uploads.finish(run.settings.upload_wait)
    run.journal.log.finish_trackers()
