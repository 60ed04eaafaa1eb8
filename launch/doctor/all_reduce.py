"""One rank of the doctor's all-reduce: is the sum over all hosts right, and how fast is it?

python -m launch.all_reduce --rank 0 --local_rank 0 --world 2 --address node1 --port 29501
"""

import argparse
import json
import sys
import time
from datetime import timedelta

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20
ROUNDS = 5


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.all_reduce", description=__doc__)
    for name in ("rank", "local_rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    print(json.dumps(measure(**vars(arguments))))
    return 0


def measure(
    rank: int, local_rank: int, world: int, port: int, address: str, seconds: float
) -> dict[str, float | bool | int]:
    """Sum known integers over all ranks. Every rank must call.

    Returns:
        correct, and bytes_per_second over each rank's link: `2 (n - 1) / n` times the bytes of the
        tensor, as NCCL's tests count ("bus bandwidth").
    """
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"tcp://{address}:{port}", rank=rank,
        world_size=world, timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    size = GPU_BYTES if gpu else CPU_BYTES
    pattern = torch.arange(size // 4, dtype=torch.int32, device=device) % 1021
    correct, took = True, []
    for _ in range(1 + ROUNDS):  # the first one sets up connections
        values = pattern * (rank + 1)
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(values)
        if gpu:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        correct = correct and torch.equal(values, pattern * (world * (world + 1) // 2))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sent = size * 2 * (world - 1) / world
    best = sorted(took[1:])[ROUNDS // 2]
    return {"rank": rank, "correct": correct, "bytes_per_second": sent / best, "bytes": size}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
