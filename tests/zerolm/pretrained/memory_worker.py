"""Measure the memory of one rank while it builds a model: `memory_worker.py MODEL|- CONFIG STAGE`.

With `-` the weights are random. Rank 0 prints bytes by which its resident memory grew: at most
during the construction, of which are pages mapped from files, and at the end.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch


def resident() -> dict[str, int]:
    """Return bytes of anonymous memory and of pages mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split() for line in lines}
    return {name: int(fields[name][1]) * 1024 for name in ("RssAnon", "RssFile")}


class Peak(threading.Thread):
    """Samples the resident memory every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_at, self.total, self.anonymous, self.file = resident(), 0, 0, 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            now = resident()
            anonymous = now["RssAnon"] - self.start_at["RssAnon"]
            file = now["RssFile"] - self.start_at["RssFile"]
            self.anonymous, self.file = max(self.anonymous, anonymous), max(self.file, file)
            self.total = max(self.total, anonymous + file)
            time.sleep(0.001)


def main(source: str, config_path: str, stage: int) -> None:
    import deepspeed

    from zerolm.distributed import process_group
    from zerolm.model.build import build_model
    from zerolm.model.config_file import load_model_config
    from zerolm.pretrained.check import Sums
    from zerolm.pretrained.loaded_weights import LoadedWeights
    from zerolm.pretrained.safetensors_files import SafetensorsFiles

    rank, world_size, device = process_group.init()
    config = load_model_config(config_path)
    json_config = {"train_batch_size": world_size, "zero_optimization": {"stage": stage}}

    def build(config, initial):
        return build_model(
            config, seed=0, dtype=torch.float32,
            zero3_config=json_config if stage == 3 else None, attn_implementation="sdpa",
            gradient_checkpointing=False, device=device, initial=initial,
        )  # fmt: skip

    small = load_model_config(config_path)
    small.hidden_size, small.intermediate_size, small.num_hidden_layers = 64, 64, 1
    build(small, None)  # imports and buffers of DeepSpeed
    initial = None
    if source != "-":
        files = SafetensorsFiles(Path(source))
        initial = Sums(LoadedWeights(config, config, files, source, 0))
    torch.distributed.barrier()
    peak = Peak()
    peak.start()
    began = time.monotonic()
    model = build(config, initial)
    seconds = time.monotonic() - began
    peak.done.set()
    peak.join()
    if rank == 0:
        end = sum(resident().values()) - sum(peak.start_at.values())
        print(json.dumps({
            "peak": peak.total, "anonymous": peak.anonymous, "file": peak.file, "end": end,
            "seconds": round(seconds, 2),
        }))  # fmt: skip
    del model
    deepspeed.comm.barrier()
    process_group.destroy()
    process_group.exit_process(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
