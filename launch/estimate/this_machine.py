"""`plan --hardware cpu`: measure this machine's rates in a few seconds, to plan a run on it.

The ranks share the measured rates. torch is imported only when it is needed.
"""

import time

from zerolm.common.values import shown_bytes
from zerolm.distributed.device import CPU, EMULATED_RATIO, bf16_ratio, cpu_name
from zerolm.plan.hardware import Hardware
from zerolm.plan.peak_flops import device_peak_flops

COPIED_BYTES, COPIES = 64 << 20, 5  # exceeds the caches of most CPUs
# Rate of a step's matrix products relative to the fastest product (docs/planning.md).
ATTAINED = 0.8
NETWORK = 1.25e8  # bytes per second between hosts: 1 Gbit/s, not measured


def measure(ranks: int) -> Hardware:
    """Time matrix products and memory copies on this machine, and return the rates per rank."""
    import psutil
    import torch

    device = torch.device("cpu")
    fp32, _ = device_peak_flops(device, "fp32")
    ratio = bf16_ratio("cpu")
    bf16 = fp32 / ratio if ratio > EMULATED_RATIO else device_peak_flops(device, "bf16")[0]
    memory, copied = psutil.virtual_memory().total, _copy_bandwidth()
    source = (
        f"measured here with {torch.get_num_threads()} threads: {fp32 / 1e9:,.3g} GFLOP/s in "
        f"float32, {bf16 / 1e9:,.3g} in bf16, copies at {copied / 1e9:.3g} GB/s; "
        f"{shown_bytes(memory)} of memory"
    )
    return Hardware(
        name=cpu_name(),
        match=CPU,
        bf16=bf16 / ranks,
        fp16=None,
        fp8=None,
        fp32=fp32 / ranks,
        attained=ATTAINED,
        memory_bytes=memory / ranks,
        memory_bandwidth=copied / ranks,
        intra_node=copied / ranks,
        inter_node=NETWORK / ranks,
        host_link=copied / ranks,
        host_memory_bytes=memory / ranks,
        host_bandwidth=copied / ranks,
        price_per_hour=None,
        price_date="",
        price_source="",
        source=source,
    )


def _copy_bandwidth() -> float:
    """Return the bytes per second that a memory copy reads and writes in total."""
    import torch

    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(COPIES):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * COPIED_BYTES / best
