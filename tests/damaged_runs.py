"""A small run directory with every kind of file, made without a launch by the project's writers."""

import json
import random
from pathlib import Path
from typing import Any

from tests.launching import LLAMA, write_json, write_shards
from zerolm.checkpoint import rollback
from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress
from zerolm.common.files import sha256_file, write_atomically
from zerolm.common.files import write_json as write_record
from zerolm.ds_config import topology
from zerolm.evaluate.crashes import EvaluationAttempts
from zerolm.preflight import check, run_record
from zerolm.run_dir.files import RunFiles, checkpoint_name
from zerolm.tracking.run_log import RunLog, archive
from zerolm.train import run_directory
from zerolm.watchdog import verdict
from zerolm.watchdog.heartbeats import Heartbeats
from zerolm.watchdog.liveness import ProgressMonitor

STEP_TOKENS = 512
FIGURES = {  # of each step: what `status` and the report compute with
    "throughput/step_seconds": 0.5, "throughput/tokens_per_second": 1e3, "throughput/mfu": 0.4,
    "throughput/data_seconds": 0.1, "throughput/slowest_rank": 1,
    "throughput/slowest_rank_seconds": 0.6, "throughput/mean_rank_seconds": 0.5,
    "checkpoint/stall_seconds": 0.2, "checkpoint/wait_seconds": 0.1, "train/grad_norm": 0.9,
    "train/learning_rate": 1e-3, "train/clipped_share": 0.2, "train/update_ratio": 1e-3,
    "train/noise_scale_tokens": 1e4, "health/skipped_steps": 1,
}  # fmt: skip


def command(base: Path) -> list[str]:
    """Return the arguments of the run."""
    words = {
        "data": base / "shards", "model_config": base / "llama.json", "seq_len": 32,
        "deepspeed_config": "ds_configs/zero2.json", "run_dir": base / "run",
        "batch_tokens": STEP_TOKENS, "total_tokens": 100 * STEP_TOKENS, "report_interval": 0,
    }  # fmt: skip
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def make_run(base: Path) -> Path:
    """Write shards and the directory of a run that was killed in an evaluation at step 20."""
    write_shards(base / "shards", num_documents=120)
    write_json(base / "llama.json", LLAMA)
    plan = check.check(command(base), {})
    run_dir = plan.run_dir
    files = RunFiles(run_dir)
    files.ranks.mkdir(parents=True)
    write_record(files.record, run_directory.record(plan))
    for step in (5, 10, 15):
        _publish(run_dir, step, plan)
    log = RunLog(run_dir, 0, writes=True)
    log.event("start", 0, world_size=1, zero_stage=2)
    for step in range(1, 21):
        row = {"step": step, "tokens": step * STEP_TOKENS, "train/loss": 6 / step, "train/x": None}
        log.metrics({**row, **FIGURES})
        if step % 5 == 0:
            log.metrics({"step": step, "tokens": step * STEP_TOKENS, "eval/loss": 3.0 / step})
            sample = {"step": step, "tokens": step * STEP_TOKENS, "prompt_number": 0, "seed": 1}
            log.samples([{**sample, "prompt": "Once", "text": " upon", "temperature": 0.8}])
            log.event("checkpoint", step, checkpoint=checkpoint_name(step), copy_seconds=0.1,
                      seconds=1.0)  # fmt: skip
    progress = Progress(step=15, position=15 * 16, tokens=15 * STEP_TOKENS)
    entry = rollback.plan(run_dir, progress, plan.batch_schedule, 13, 1, "loss 9")
    assert entry is not None
    rollback.record(run_dir, entry)
    archive(run_dir, entry["number"], entry["to_step"])
    log.event("rollback", 15, **entry)
    log.event("resume", 10, checkpoint=str(files.checkpoint("step-00000010")), world_size=1,
              zero_stage=2, resharded=[])  # fmt: skip
    log.event("changed", 10, changes={"settings.learning_rate": [1e-3, 1e-4]})
    log.event("spike", 13, reason="loss 9", loss="nan", grad_norm=1.0, sequences=[192, 208])
    lost = {"rank": 0, "host": "a", "pid": 1, "step": 20, "phase": "evaluate",
            "sequences": [304, 16], "reason": "ended: SIGKILL", "stacks": None}  # fmt: skip
    log.event("rank_lost", 20, ended="SIGKILL", found_by=0, ranks=[lost])
    EvaluationAttempts(run_dir).start(20, 20 * STEP_TOKENS, "loss")
    for rank in (0, 1):
        beats = Heartbeats(run_dir, rank, None, ProgressMonitor(600))
        beats.token = "abcd"
        beats.write()
    verdict.write_once(files.verdict("abcd"), {"event": "rank_lost", "step": 20, "ranks": [lost]})
    for name in ("wandb", "tensorboard"):
        files.tracker(name).mkdir()
    write_record(files.tracker("wandb") / "run.json", {"id": "a1b2c3d4", "rollbacks": 1})
    files.uploads.mkdir()
    sent = json.dumps(["model.pt", "0" * 64]) + "\n"
    write_atomically(files.uploads / "step-00000010.sent", sent.encode())
    files.hostfile.write_text("localhost slots=1\n")
    return run_dir


def _publish(run_dir: Path, step: int, plan: Any) -> None:
    temporary = RunFiles(run_dir).checkpoint(f".tmp-{checkpoint_name(step)}")
    temporary.mkdir(parents=True)
    (temporary / "model.pt").write_bytes(random.Random(step).randbytes(200))
    path = temporary / "model.pt"
    entry = {"file": path.name, "size_bytes": 200, "sha256": sha256_file(path)}
    record = run_directory.record(plan)
    progress = Progress(step=step, position=16 * step, tokens=step * STEP_TOKENS)
    publish(
        temporary,
        {
            "format": FORMAT, "version": VERSION, "progress": vars(progress), "files": [entry],
            "world_size": 1, "zero_stage": 2, "optimizer": topology.optimizer_kind(plan.ds),
            "data_fingerprint": plan.data_fingerprint, "precision": plan.ds.precision,
            "cut": topology.sharding(plan.ds, plan.layout), "order": run_record.data_order(plan),
            "versions": record["versions"], "model_config": record["model_config"], "probe": None,
        },
    )  # fmt: skip
