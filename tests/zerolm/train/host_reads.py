"""Counts where a training step makes the host wait for the device, without a device.

Counted are the operations that block on one, as they are called on a CPU:

    read       a value of a tensor: item(), bool(), float(), tolist(), numpy(), nonzero()
    copy       a tensor made of Python numbers on the device: its copy from pageable memory blocks
    wait       the accelerator's synchronize(), also where DeepSpeed leaves it out on a CPU

Not counted: waits of one stream for another, which do not block the host; batches before they are
copied to the device; `functional.one_hot`, which checks its input on a CPU only.
"""

import contextlib
import linecache
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
}
PYTHON_READING = {"tolist", "numpy", "cpu"}
ON_CPU_ONLY = ("functional.one_hot",)
ON_HOST = "zerolm/data/"

Places = Counter[tuple[str, str]]  # {(kind, place in the source): number of times}


class _Operations(TorchDispatchMode):
    """Counts operations that read a value."""

    def __init__(self, found: Places):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in READING:
            _count(self.found, "read")
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Counts Python functions of tensors that read values or copy them to the device."""

    def __init__(self, found: Places):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in PYTHON_READING:
            _count(self.found, "read")
        elif name == "tensor" and torch.get_default_device() is not None:
            _count(self.found, "copy")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[Places]:
    """Count inside the context, in the thread that entered it."""
    from deepspeed.accelerator import get_accelerator

    found: Places = Counter()
    kind = type(get_accelerator())
    originals = kind.synchronize, kind.resolves_data_dependency

    def synchronize(self: Any, *args: Any, **kwargs: Any) -> Any:
        _count(found, "wait")
        return originals[0](self, *args, **kwargs)

    def resolves_data_dependency(self: Any) -> Any:
        caller = traceback.extract_stack()[-2]
        if "synchronize()" in linecache.getline(caller.filename, (caller.lineno or 0) + 1):
            _count(found, "wait")
        return originals[1](self)

    kind.synchronize, kind.resolves_data_dependency = synchronize, resolves_data_dependency
    try:
        with _Operations(found), _Functions(found):
            yield found
    finally:
        kind.synchronize, kind.resolves_data_dependency = originals


def _count(found: Places, what: str) -> None:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        inside_torch = "torch" in path.parts and "distributed" not in path.parts
        if path == Path(__file__) or inside_torch:
            continue
        on_host = ON_HOST in frame.filename
        if not on_host and not any(each in (frame.line or "") for each in ON_CPU_ONLY):
            found[what, f"{'/'.join(path.parts[-3:])}:{frame.lineno}"] += 1
        return


def count_ours(flags: list[str], steps: int) -> Places:
    """Train with pretrain.py's own parts; return the counts of `steps` steps, after two others."""
    from zerolm import features
    from zerolm.distributed import collectives
    from zerolm.preflight import check
    from zerolm.train import resume, stability
    from zerolm.train.engine_building import build_engine
    from zerolm.train.run import Run

    # The check would find the port in use, by this process group.
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    plan = check.check(flags, environment)
    Path(plan.settings.run_dir, "checkpoints").mkdir(parents=True)
    device = torch.device("cpu")
    wanted = features.build(plan)
    engine = build_engine(plan, wanted, device, partial(collectives.print_rank0, 0))
    run = Run(plan, engine, wanted, device, stability.StopRequest(None))
    resume.start(run)
    batches = run.batches()
    for _ in range(2):
        run.step(batches)
    with counting() as found:
        for _ in range(steps):
            run.step(batches)
    batches.close()
    engine.destroy()
    return found
