"""Run directories for the tests of the report: written by hand, complete or damaged."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

STEP_TOKENS = 1000


def write_lines(path: Path, rows: list[dict[str, Any]], after: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + after)


def loss_of(step: int) -> float:
    return 2 + 6 / step + 0.01 * (step % 7)


def metrics(num_steps: int, spike: int | None = None) -> list[dict[str, Any]]:
    found = []
    for step in range(1, num_steps + 1):
        loss = loss_of(step) * (10 if step == spike else 1)
        row = {"step": step, "tokens": step * STEP_TOKENS, "train/loss": loss}
        row |= {"train/grad_norm": 1 / step, "train/learning_rate": 1e-3, "health/spikes": 0}
        row |= {"throughput/step_seconds": 0.5, "throughput/tokens_per_second": 2000.0}
        row |= {"throughput/mfu": 0.4, "data/web/loss": loss, "data/code/loss": loss / 2}
        found.append(row)
        if step % 10 == 0:
            found.append(
                {"step": step, "tokens": step * STEP_TOKENS, "eval/loss": 3.0 - step / 100}
            )
    return found


def write_run(
    run_dir: Path, num_steps: int = 40, ended: str | None = "done", **settings: Any
) -> Path:
    """Write a run with a spike at step 30, a resume at 20, evaluations, and samples."""
    run_dir.mkdir(parents=True)
    write_lines(run_dir / "metrics.jsonl", metrics(num_steps, spike=30))
    total = {"total_tokens": 100 * STEP_TOKENS, "run_dir": str(run_dir), **settings}
    record = {
        "settings": total, "ds_config": {"gradient_clipping": 1.0}, "world_size": 2,
        "derived": {"model": "llama, 4,720,896 parameters", "steps": "100 for 100,000 tokens"},
    }  # fmt: skip
    (run_dir / "run.json").write_text(json.dumps(record))
    stamp = "2026-11-20T10:00:{:02d}+0000"
    events: list[dict[str, Any]] = [
        {"event": "start", "step": 0, "world_size": 2, "zero_stage": 2},
        {"event": "checkpoint", "step": 20, "checkpoint": "step-00000020", "copy_seconds": 0.1,
         "seconds": 0.5},
        {"event": "stopped", "step": 20, "reason": "--stop_after"},
        {"event": "resume", "step": 20, "checkpoint": "step-00000020", "world_size": 2,
         "zero_stage": 2},
        {"event": "spike", "step": 30, "reason": "train/loss 21 is 400 deviations above 2.2"},
        {"event": "step_skipped", "step": 30, "reason": "train/loss 21"},
    ]  # fmt: skip
    if ended is not None:
        events.append({"event": ended, "step": num_steps, "tokens": num_steps * STEP_TOKENS})
    events = [{**event, "time": stamp.format(n)} for n, event in enumerate(events)]
    write_lines(run_dir / "events.jsonl", events)
    sample = {"prompt_number": 0, "prompt": "Once upon", "seed": 0, "temperature": 0.8}
    texts = [
        {**sample, "step": step, "tokens": step * STEP_TOKENS, "text": f" a time, {step}"}
        for step in range(10, num_steps + 1, 10)
    ]
    write_lines(run_dir / "samples.jsonl", texts)
    return run_dir


def write_branch(run_dir: Path, trunk: Path, step: int, num_steps: int = 40) -> Path:
    """Write a run that began from step `step` of another one, and has lower losses from there."""
    shutil.copytree(trunk, run_dir)
    record = json.loads((trunk / "run.json").read_text())
    point = {"run": str(trunk.resolve()), "step": step, "tokens": step * STEP_TOKENS}
    older = {"branch": record["branch"]} if "branch" in record else {}
    record["branch"] = {**point, "digest": "0" * 64, "changes": {}, **older}
    (run_dir / "run.json").write_text(json.dumps(record))
    rows = metrics(num_steps)
    for row in rows:
        row |= {"train/loss": 1 / row["step"]} if row["step"] > step else {}
    write_lines(run_dir / "metrics.jsonl", rows)
    event = {"event": "branched", "time": "2026-11-20T10:00:00+0000", **record["branch"]}
    resume = {"event": "resume", "step": step, "time": "2026-11-20T10:00:01+0000"}
    done = {"event": "done", "step": num_steps, "time": "2026-11-20T10:00:09+0000"}
    write_lines(run_dir / "events.jsonl", [event, resume, done])
    return run_dir


def heartbeat(rank: int, **values: Any) -> dict[str, Any]:
    """Return the content of a rank's heartbeat file, with some values replaced."""
    return {
        "rank": rank, "host": "node-1", "machine": "a", "pid": 100 + rank, "start_ticks": 1,
        "launcher_pid": None, "supervisor": None, "token": None, "phase": "forward", "step": 40,
        "beats": 5, "sequences": None, "waiting": False,
        "quiet_seconds": 0.1, "limit_seconds": 600.0, "monotonic": 1.0, "state": "running",
        "reason": "", **values,
    }  # fmt: skip


def write_heartbeats(run_dir: Path, num_ranks: int = 2, age: float = 0.0) -> None:
    (run_dir / "ranks").mkdir(exist_ok=True)
    for rank in range(num_ranks):
        path = run_dir / "ranks" / f"rank-{rank:05d}.json"
        path.write_text(json.dumps(heartbeat(rank)))
        os.utime(path, (time.time() - age,) * 2)
