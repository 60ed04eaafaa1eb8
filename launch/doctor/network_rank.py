"""One rank of the doctor's network check: time collectives over all ranks and pairwise exchanges.

python -m launch.doctor.network_rank --rank 0 --local_rank 0 --hosts 8,8 --address a --port 29500
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

SIZES = (1 << 20, 16 << 20, 256 << 20)  # bytes per collective
COLLECTIVE_SECONDS = 10.0  # a size is skipped if all its rounds together would take longer
ROUNDS = 3
EXCHANGE_SIZES = (1 << 20, 16 << 20)
EXCHANGE_SECONDS = 0.5  # the larger size is skipped if the smaller takes longer
PINGS = 10
MAX_PARTNERS = 8


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.doctor.network_rank", description=__doc__
    )
    for name in ("rank", "local_rank", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--hosts", required=True, help="number of ranks on each host")
    parser.add_argument("--address", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(argv)
    hosts = [int(number) for number in given.hosts.split(",")]
    print(json.dumps(measure(given.rank, given.local_rank, hosts, given.address, given.port,
                             given.seconds)))  # fmt: skip
    return 0


def measure(
    rank: int, local_rank: int, hosts: Sequence[int], address: str, port: int, seconds: float
) -> dict[str, Any]:
    """Measure the network between all ranks. Every rank must call this.

    Args:
        hosts: number of ranks on each host.
        address, port: where rank 0 listens.
        seconds: time limit for each collective.

    Returns:
        A dict with these keys. `rank`: this rank. `correct`: whether the sum of known integers over
        all ranks was correct. `all_reduce`, `all_gather`: [(bytes, median seconds)], by size.
        `pairs`: [(index of the other host, one-way latency in seconds, bytes per second each way)]
        for this rank's exchanges with the same local rank on other hosts. All ranks on both hosts
        exchange data at the same time.
    """
    import torch
    from torch import distributed

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"tcp://{address}:{port}", rank=rank,
        world_size=sum(hosts), timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    network = _Network(torch, device, rank, hosts)
    result = {"rank": rank, "correct": network.sum_is_correct(), **network.collectives()}
    result["pairs"] = network.pairs(local_rank)
    distributed.barrier()
    distributed.destroy_process_group()
    return result


class _Network:
    def __init__(self, torch: Any, device: Any, rank: int, hosts: Sequence[int]):
        self.torch, self.device, self.rank, self.hosts = torch, device, rank, hosts
        self.first_ranks = list(accumulate(hosts, initial=0))
        self.host = sum(first <= rank for first in self.first_ranks[1:])

    def sum_is_correct(self) -> bool:
        world = sum(self.hosts)
        pattern = self.torch.arange(SIZES[0] // 4, dtype=self.torch.int32, device=self.device)
        values = pattern % 1021 * (self.rank + 1)
        self.torch.distributed.all_reduce(values)
        return bool(self.torch.equal(values, pattern % 1021 * (world * (world + 1) // 2)))

    def collectives(self) -> dict[str, list[tuple[int, float]]]:
        distributed, world = self.torch.distributed, sum(self.hosts)
        found: dict[str, list[tuple[int, float]]] = {"all_reduce": [], "all_gather": []}
        for size in SIZES:
            whole = self._values(-(-size // world) * world)
            part = self._values(len(whole) // world)
            operations: dict[str, Callable[[], Any]] = {
                "all_reduce": partial(distributed.all_reduce, whole),
                "all_gather": partial(distributed.all_gather, list(whole.chunk(world)), part),
            }
            for name, operation in operations.items():
                before = found[name]
                estimate = before[-1][1] * size / before[-1][0] if before else 0.0
                if self._longest(estimate) * (1 + ROUNDS) <= COLLECTIVE_SECONDS:
                    seconds = sorted(self._timed(operation) for _ in range(1 + ROUNDS))
                    found[name].append((size, seconds[(ROUNDS - 1) // 2]))
        return found

    def pairs(self, local_rank: int) -> list[tuple[int, float, float]]:
        found = []
        for partners in partner_rounds(len(self.hosts)):
            other = partners[self.host]
            self.torch.distributed.barrier()  # a host takes part in one exchange at a time
            if other != self.host and local_rank < min(self.hosts[self.host], self.hosts[other]):
                found.append((other, *self._exchange(self.first_ranks[other] + local_rank)))
        return found

    def _exchange(self, peer: int) -> tuple[float, float]:
        """Return (one-way latency in seconds, bytes per second each way) for another rank."""
        few = partial(self._both_ways, self._values(1), peer)
        pings = sorted(self._timed(few) for _ in range(1 + PINGS))
        for size in EXCHANGE_SIZES:
            exchange = partial(self._both_ways, self._values(size), peer)
            seconds = min(self._timed(exchange) for _ in range(1 + ROUNDS))
            slow = self.torch.tensor(float(seconds > EXCHANGE_SECONDS), device=self.device)
            self._both_ways(slow, peer, only_from=min(self.rank, peer))
            if slow.item():
                break
        return pings[len(pings) // 2], size / seconds

    def _both_ways(self, values: Any, peer: int, only_from: int | None = None) -> None:
        distributed = self.torch.distributed
        received = values if only_from is not None else self.torch.empty_like(values)
        operations = []
        if only_from in (None, self.rank):
            operations.append(distributed.P2POp(distributed.isend, values, peer))
        if only_from in (None, peer):
            operations.append(distributed.P2POp(distributed.irecv, received, peer))
        for request in distributed.batch_isend_irecv(operations):
            request.wait()

    def _timed(self, operation: Callable[[], Any]) -> float:
        self._synchronize()
        start = time.perf_counter()
        operation()
        self._synchronize()
        return time.perf_counter() - start

    def _longest(self, seconds: float) -> float:
        longest = self.torch.tensor(seconds, device=self.device)
        self.torch.distributed.all_reduce(longest, self.torch.distributed.ReduceOp.MAX)
        return float(longest)

    def _values(self, size: int) -> Any:
        return self.torch.zeros(size, dtype=self.torch.uint8, device=self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()


def partner_rounds(num_hosts: int) -> Iterator[list[int]]:
    """Yield the index of each host's partner in each round, so that partners form disjoint pairs.

    A host without a partner in a round is paired with itself. These are the first `MAX_PARTNERS`
    rounds of a round-robin tournament, scheduled by the circle method.
    """
    places = num_hosts + num_hosts % 2
    for turn in range(min(places - 1, MAX_PARTNERS)):
        order = [0, *((turn + place) % (places - 1) + 1 for place in range(places - 1))]
        partners = list(range(places))
        for one, other in zip(order[: places // 2], reversed(order), strict=False):
            if max(one, other) < num_hosts:
                partners[one], partners[other] = other, one
        yield partners[:num_hosts]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
