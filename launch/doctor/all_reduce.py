"""One rank of the doctor's all-reduce, which checks the sum over all hosts and measures the speed.

python -m launch.doctor.all_reduce --rank 0 --local_rank 0 --world 2 --address node1 --port 29501
"""

import argparse
import json
import sys
import time
from datetime import timedelta

GPU_BYTES, CPU_BYTES = 256 << 20, 16 << 20
ROUNDS = 5


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.doctor.all_reduce", description=__doc__)
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
    """Sum known integers over all ranks. Every rank must call this.

    Args:
        port, address: where rank 0 listens.
        seconds: time limit of each collective.

    Returns:
        `rank`; `correct`: whether every sum was correct; `bytes`: size of the tensor;
        `bytes_per_second`: median bus bandwidth as nccl-tests defines it, `2 (n - 1) / n` times the
        size of the tensor per second.
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
    correct, durations = True, []
    for _ in range(1 + ROUNDS):  # the first round sets up connections
        values = pattern * (rank + 1)
        torch.distributed.barrier()
        start = time.perf_counter()
        torch.distributed.all_reduce(values)
        if gpu:
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
        correct = correct and torch.equal(values, pattern * (world * (world + 1) // 2))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sent = size * 2 * (world - 1) / world
    median = sorted(durations[1:])[ROUNDS // 2]
    return {"rank": rank, "correct": correct, "bytes_per_second": sent / median, "bytes": size}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
