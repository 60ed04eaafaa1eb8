"""What every test shares: no accelerator, no network, and no lock left by a killed run."""

import os
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
# A rank that was killed while it built an op leaves its lock, and the next run waits forever.
for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
    lock.unlink()
