"""A small run directory with every kind of file, made without a launch; and damage to its files.

The project's own writers make the files. `damages` returns hypothesis strategies: what a power
failure, a full disk, an editor or another program may leave of a file.
"""

import copy
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.launching import LLAMA, write_json, write_shards
from zerolm.checkpoint import rollback
from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress, manifest_digest
from zerolm.common.files import sha256_file, write_atomically
from zerolm.common.files import write_json as write_record
from zerolm.common.run_files import MANIFEST, RunFiles, checkpoint_name
from zerolm.ds_config import topology
from zerolm.evaluate.attempts import EvaluationAttempts
from zerolm.preflight import check, run_record
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
NOISE = "<raw>"  # in a JSON string: replaced, with its quotes, by text that need not be JSON
RAW = [
    "[" * 300 + "]" * 300, '{"a":' * 5000 + "1" + "}" * 5000, "[" * 100_000, "1" * 400, "1e999",
    "NaN", "-Infinity", "9223372036854775808", '"\\ud800"', '{"a": 1, "a": 2}', "nul", "'a'", "",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**62, 10**30, 0.5, -2.5, 1e300, "", "text", "../../x", "a\0b",
    "\u001b[31m\n", "step-00000099", "9" * 50, [], [1], [[0, 0]], [None], {}, {"a": 1}, [[]] * 3,
    {"": {}}, [{"rank": "0"}], ["a", 1],
]  # fmt: skip


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
            "world_size": 1, "zero_stage": 2, "optimizer": topology.optimizer_kind(plan.profile),
            "data_fingerprint": plan.data_fingerprint, "precision": plan.profile.precision,
            "cut": topology.sharding(plan.profile), "order": run_record.data_order(plan),
            "versions": record["versions"], "model_config": record["model_config"], "probe": None,
        },
    )  # fmt: skip


# ---- Damage


@dataclass(frozen=True)
class Damage:
    """A change of one file; `name` is its path relative to the directory."""

    name: str
    what: str
    apply: Callable[[Path], object]

    def __repr__(self) -> str:
        return f"{self.name}: {self.what}"


@st.composite
def damages(draw: st.DrawFn, base: Path, names: list[str]) -> Damage:
    """Draw damage to one of the files."""
    name = draw(st.sampled_from(names))
    content = (base / name).read_bytes()
    kinds = ["bytes", "bytes", "object"]
    kinds += ["json"] * 6 if name.endswith((".json", ".jsonl")) else []
    kind = draw(st.sampled_from(kinds))
    if kind == "bytes":
        what, changed = draw(_changed_bytes(content))
        return Damage(name, what, lambda path: path.write_bytes(changed))
    if kind == "json":
        what, changed = draw(_changed_json(content, name))
        return Damage(name, what, lambda path: path.write_bytes(changed))
    return Damage(name, *draw(st.sampled_from(list(OBJECTS.items()))))


@st.composite
def _changed_bytes(draw: st.DrawFn, content: bytes) -> tuple[str, bytes]:
    place = draw(st.integers(0, max(0, len(content) - 1)))
    size = draw(st.integers(1, 40))
    noise = draw(st.sampled_from([b"\0", b"\xff\xfe", b"\n", b"}", b"[", b'"', b"1", b"\r\n\n"]))
    return draw(
        st.sampled_from(
            [
                (f"cut to {place} bytes", content[:place]),
                (f"{size} bytes missing at {place}", content[:place] + content[place + size :]),
                (f"{noise!r} at {place}", content[:place] + noise + content[place:]),
                (f"{noise!r} over {place}", content[:place] + noise + content[place + 1 :]),
                (f"zeros from {place}", content[:place] + bytes(len(content) - place)),
                ("written twice", content + content),
                ("no newline at the end", content.rstrip(b"\n")),
            ]
        )
    )


@st.composite
def _changed_json(draw: st.DrawFn, content: bytes, name: str) -> tuple[str, bytes]:
    """Change a value, or a key, of a JSON file or of one of its lines."""
    lines = content.splitlines() if name.endswith("l") else [content]
    number = draw(st.integers(0, len(lines) - 1))
    value = {"": json.loads(lines[number])}
    places = list(_places(value[""], ("",)))
    *parents, key = draw(st.sampled_from(places))
    parent: Any = value
    for step in parents:
        parent = parent[step]
    how = draw(st.sampled_from(["value", "value", "value", "raw", "remove", "add"]))
    what = f"{how} at {'.'.join(map(str, [*parents, key]))}"
    raw = ""
    if how == "value":
        parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        what += f": {parent[key]!r}"
    elif how == "raw":
        parent[key], raw = NOISE, draw(st.sampled_from(RAW))
        what += f": {raw[:20]}"
    elif how == "remove" and key != "":
        del parent[key]
    elif isinstance(parent[key], dict):
        parent[key]["unknown"] = draw(st.sampled_from(VALUES))
    value = value[""]
    if name.endswith(MANIFEST) and isinstance(value, dict) and draw(st.booleans()):
        value["digest"] = manifest_digest(value)  # an editor's work, not a disk's
    lines[number] = json.dumps(value).replace(f'"{NOISE}"', raw).encode()
    return what, b"\n".join(lines) + b"\n"


def _places(value: Any, key: tuple[Any, ...]) -> Any:
    """Yield the keys that lead to each value inside a value."""
    yield key
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    for name, part in parts:
        yield from _places(part, (*key, name))


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


OBJECTS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "a directory": _replaced(Path.mkdir),
    "a dangling link": _replaced(lambda path: path.symlink_to("nothing-here")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "a pipe": _replaced(os.mkfifo),
    "a link to a file elsewhere": _replaced(lambda path: path.symlink_to("/etc/hostname")),
    "a thousand lines of noise": lambda path: path.write_bytes(b"noise \xff\n" * 1000),
}
