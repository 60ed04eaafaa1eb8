"""Throughput metrics: step times, tokens per second, MFU, memory and power."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up time and tokens between reports.

    Only time inside `timing_step()` counts, so saves and evaluations are excluded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = self.tokens = self.samples = 0
        self.seconds = self.data_seconds = self.forward_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing_step(self) -> Iterator[None]:
        """Time a training step, including the wait for its data."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def wait_for_device(self) -> None:
        """Wait for the device to finish the update while the step is being timed.

        Otherwise, this time would be counted in the next step, or not at all if a report, save or
        evaluation follows.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def timing_data(self) -> Iterator[None]:
        """Time the wait for a step's data."""
        start = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - start

    @contextmanager
    def timing_forward(self) -> Iterator[None]:
        """Time a forward pass, which waits for other ranks only if ZeRO-3 gathers weights."""
        if self.device.type == "cuda":
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._events.append(events)
        else:
            start = time.perf_counter()
            yield
            self.forward_seconds += time.perf_counter() - start

    def own_seconds(self) -> float:
        """Return the seconds per step since the last report that do not depend on other ranks.

        This is the time for data and forward passes; backward passes and optimizer steps wait for
        other ranks.
        """
        if self._events:
            torch.cuda.synchronize(self.device)
            pairs, self._events = self._events, []
            self.forward_seconds += sum(first.elapsed_time(last) for first, last in pairs) / 1e3
        return (self.data_seconds + self.forward_seconds) / max(self.steps, 1)

    def count(self, samples: int, tokens: int) -> None:
        """Count a step and its global batch."""
        self.steps += 1
        self.samples += samples
        self.tokens += tokens

    def report(
        self, world_size: int, flops_per_token: float, peak_flops: float
    ) -> dict[str, float]:
        """Return the `throughput/` metrics since the last report, and reset the stopwatch.

        MFU is omitted if it would exceed 1, since the assumed peak must then be wrong.

        Args:
            flops_per_token: floating-point operations per token in the forward and backward pass.
            peak_flops: peak floating-point operations per second of one device.
        """
        tokens_per_second = self.tokens / self.seconds
        mfu = tokens_per_second * flops_per_token / (world_size * peak_flops)
        row = {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/tokens_per_second_per_device": tokens_per_second / world_size,
            "throughput/samples_per_second": self.samples / self.seconds,
            **({"throughput/mfu": mfu} if mfu <= 1 else {}),
            "throughput/step_seconds": self.seconds / self.steps,
            "throughput/data_seconds": self.data_seconds / self.steps,
        }
        self.__init__(self.device)  # type: ignore[misc]
        return row


def memory(device: torch.device) -> dict[str, int]:
    """Return the `memory/` metrics in bytes: for the GPU (on a CPU, this process) and the host."""
    import psutil

    host = psutil.virtual_memory()
    used = {"memory/host_bytes": host.total - host.available}
    if device.type == "cuda":
        return {
            "memory/allocated_bytes": torch.cuda.memory_allocated(device),
            "memory/peak_bytes": torch.cuda.max_memory_allocated(device),
            **used,
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "memory/allocated_bytes": psutil.Process().memory_info().rss,
        "memory/peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        **used,
    }


class PowerMeter:
    """Reads a GPU's power draw from its driver; stops after the first failure."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.works = device, device.type == "cuda"

    def row(self) -> dict[str, float]:
        """Return the metric `power/watts`; {} on a CPU, or if it cannot be read, as with MIG."""
        if self.works:
            try:
                return {"power/watts": torch.cuda.power_draw(self.device) / 1000}
            except Exception:  # NVML and amdsmi raise their own types; torch needs nvidia-ml-py
                self.works = False
        return {}
