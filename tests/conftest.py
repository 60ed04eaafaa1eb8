"""What every test shares: no accelerator, no network, and no lock left by a killed run."""

import os
import shutil
import time
from pathlib import Path

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)
extensions = Path(__file__).parent.parent / ".cache" / "torch_extensions"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions))
# A rank that was killed while it built an op leaves its lock, and the next run waits forever. A
# build takes two minutes; a younger lock may be that of a run beside this one.
STALE_SECONDS = 600
for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
    if time.time() - lock.stat().st_mtime > STALE_SECONDS:
        lock.unlink()
# Tests kill ranks that hold a lock there, so each of pytest's processes has a copy of its own.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    shared = os.environ["TORCH_EXTENSIONS_DIR"]
    own = f"{shared}-{worker}"
    shutil.rmtree(own, ignore_errors=True)
    if Path(shared).is_dir():
        shutil.copytree(shared, own, ignore=shutil.ignore_patterns("lock"))
    os.environ["TORCH_EXTENSIONS_DIR"] = own
