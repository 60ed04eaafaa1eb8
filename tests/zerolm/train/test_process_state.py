"""A forked process that has reset its state has the state of a new process, in every module."""

import functools
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import zerolm
from tests import ROOT
from zerolm.common import processes

# Caches of what follows from the arguments, the files that they name, and this host.
SHARED = {
    "zerolm.attention.varlen._model_problem",
    "zerolm.common.files.host_name",
    "zerolm.common.family_sources.family_digest",
    "zerolm.common.family_sources.shared_digest",
    "zerolm.common.records._keys",
    "zerolm.common.remembered.code_digest",
    "zerolm.ds_config.schema._adapter",
    "zerolm.ds_config.scheduler._course",
    "zerolm.engine.config_keys.known_keys",
    "zerolm.evaluate.lm_eval._loaded",
    "zerolm.evaluate.lm_eval._manager",
    "zerolm.evaluate.olmes._task_class",
    "zerolm.fp8.layers._layers_of",
    "zerolm.model.activation_memory._stand_ins",
    "zerolm.model.activation_memory._trace",
    "zerolm.model.attention_logits._layers",
    "zerolm.model.config_keys.names_read",
    "zerolm.model.config_words._words",
    "zerolm.model.loss_chunks._unsupported_reason",
    "zerolm.model.stages._passed",
    "zerolm.optim.optimizer_classes.optimizer_class",
    "zerolm.parts.metrics.metric_of",
    "zerolm.preflight.key_effects._idle",
    "zerolm.preflight.layer_kinds._layers",
    "zerolm.preflight.model_proof._prove",
    "zerolm.preflight.model_proof.computable_copy",
    "zerolm.routers.biased_routers._unsupported_reason",
    "zerolm.shards.origins._inputs",
    "zerolm.shards.origins._origins",
}
RESET = {"zerolm.checkpoint.snapshot._say_unpinned"}
RANK = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_PORT": "29511",
    processes.SUPERVISOR: "mark", "CUDA_VISIBLE_DEVICES": "1",
}  # fmt: skip

SPOILED = (
    "watchdog.progress.CURRENT", "watchdog.liveness.CURRENT", "watchdog.startup._ends",
    "distributed.process_group._stores", "distributed.process_group._first_rank",
    "tracking.console_log._log", "common.interrupts._raised", "common.store._SAID",
    "checkpoint.snapshot._say_unpinned", "engine.operators._listeners",
)  # fmt: skip


def zerolm_modules() -> list[Any]:
    """Import and return every module of the package, except programs."""
    names = [each.name for each in pkgutil.walk_packages(zerolm.__path__, "zerolm.")]
    programs = ("__main__", "run_module")
    return [importlib.import_module(each) for each in names if not each.endswith(programs)]


def caches() -> dict[str, Any]:
    """Return {dotted name: function} of all functions with a cache."""
    return {
        f"{module.__name__}.{name}": value
        for module in zerolm_modules()
        for name, value in vars(module).items()
        if hasattr(value, "cache_info") and value.__module__ == module.__name__
    }


def state() -> dict[str, Any]:
    """Return {dotted name: content} of all globals of the package's modules and classes."""
    found = {}
    for module in zerolm_modules():
        for name, value in vars(module).items():
            if not name.startswith("__") and not inspect.ismodule(value):
                found[f"{module.__name__}.{name}"] = content(value, {})
    return found


def content(value: Any, seen: dict[int, Any]) -> Any:
    """Return what distinguishes a value, in terms that two processes can compare."""
    if isinstance(value, str | bytes | bool | int | float | complex | Path | type(None)):
        return repr(value)
    if id(value) in seen:
        return "above"
    seen[id(value)] = value
    if hasattr(value, "cache_info"):
        return value.cache_info().currsize
    if isinstance(value, dict):
        return sorted([str(content(key, seen)), content(each, seen)] for key, each in value.items())
    if isinstance(value, list | tuple | deque):
        return [content(each, seen) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(content(each, seen)) for each in value)
    if isinstance(value, functools.partial):
        return content([value.func, value.args, value.keywords], seen)
    kind = type(value)
    if kind.__module__.startswith("zerolm."):
        attributes = {**getattr(value, "__dict__", {})}
        if kind.__name__ == "Progress":
            attributes["recorded_at"] = time.monotonic() - attributes["recorded_at"] < 500.0
        return [kind.__qualname__, content(attributes, seen)]
    if isinstance(value, type) and value.__module__.startswith("zerolm."):
        own = {name: each for name, each in vars(value).items() if not name.startswith("__")}
        return [value.__qualname__, content(own, seen)]
    return getattr(value, "__qualname__", kind.__qualname__)


def spoil(directory: Path) -> None:
    """Do what a process does that has begun a run, and leave its mark in each state."""
    from zerolm.checkpoint import snapshot
    from zerolm.common import interrupts, store
    from zerolm.distributed import process_group
    from zerolm.engine import operators
    from zerolm.tracking import console_log
    from zerolm.watchdog import progress, startup

    startup.mark("imports")
    progress.record_progress("forward", 7, (0, 8))
    progress.CURRENT.recorded_at -= 1000.0
    process_group._stores.append("a store")
    process_group._first_rank = ("here", None)
    console_log._log = console_log.ConsoleLog(directory)
    interrupts._raised = True
    operators._listeners.append(print)
    store._SAID.add("s3://bucket")
    snapshot._say_unpinned(1)


def main(kind: str, directory: str) -> None:
    from zerolm.train import process_state

    zerolm_modules()
    if kind == "forked":
        spoil(Path(directory))
        spoiled = state()
        if os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        os.environ.update(RANK)
        process_state.reset()
        changed = {name for name, each in state().items() if spoiled[name] != each}
        assert {f"zerolm.{each}" for each in SPOILED} == changed
    Path(directory, kind).write_text(json.dumps(state()))
    os._exit(0)


def test_a_forked_process_that_has_forgotten_is_like_a_new_one_in_every_module(tmp_path):
    command = [sys.executable, str(Path(__file__)), "forked", str(tmp_path)]
    own = {key: text for key, text in os.environ.items() if key not in RANK}
    own |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=own)
    command[2] = "new"
    subprocess.run(command, check=True, timeout=120, env=own | RANK)
    forked, new = (json.loads((tmp_path / kind).read_text()) for kind in ("forked", "new"))
    assert len(new) > 3000 and forked.keys() == new.keys()
    assert not [(name, new[name], forked[name]) for name in new if new[name] != forked[name]]


def test_each_cache_is_forgotten_or_holds_in_every_process():
    """One that depends on the rank, its device or its environment belongs into `reset`."""
    assert set(caches()) == SHARED | RESET


if __name__ == "__main__":
    main(*sys.argv[1:])
