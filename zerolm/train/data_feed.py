"""`DataFeed`: one rank's micro-batches, for training and for the checkpoint probe.

Connects the plan to the streams in zerolm/data: selects the data shard that a rank reads, and
tracks the blends of the mixture. Every rank makes the same calls.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.checkpoint import probe
from zerolm.checkpoint.manifest import Progress
from zerolm.data import epochs
from zerolm.data import loader as data
from zerolm.distributed import collectives
from zerolm.plan.plan import Plan
from zerolm.tracking.run_log import Row
from zerolm.train import metrics

UNBOUNDED = 1 << 62  # makes the stream endless, since the token budget ends the run


class DataFeed:
    """Provides a run's data on one rank.

    Args:
        device: device to copy the micro-batches to.

    Attributes:
        order: the data order, set by `batches`.
        traffic: counts of blocks and bytes read from object stores and from the cache.
        blend: data blend of the last sequence that was trained on.
    """

    def __init__(self, plan: Plan, rank: int, device: Any, print_rank0: Callable[..., None]):
        self.plan, self.rank, self.device = plan, rank, device
        self.print_rank0 = print_rank0
        self.settings = plan.settings
        self.order: Any = None
        self.traffic: Any = None
        self.blend = 0

    def token_bytes(self) -> torch.Tensor | None:
        """Return each token's bytes of text, as a tensor on the device.

        Return None if the table is not available on every rank.

        Every rank must call this.
        """
        table = self.plan.token_bytes
        known = collectives.gather_objects(table is not None)
        if table is None or not all(known):
            if any(known):
                self.print_rank0("note: no bits per byte: a host lacks the data's tokenizer")
            return None
        return torch.from_numpy(table.rows()).to(self.device)

    def stream_options(self, shard: int, num_shards: int) -> dict[str, Any]:
        """Return the keyword arguments for a stream over one of `num_shards` data shards."""
        return {
            "seq_len": self.settings.seq_len,
            "micro_batch_size": self.plan.settings.micro_batch_size,
            "document_mask": self.settings.document_mask,
            "packing": self.settings.packing,
            "shard": shard,
            "num_shards": num_shards,
        }

    def batches(self, progress: Progress) -> Any:
        """Return an endless iterator over this rank's micro-batches, from the run's position on."""
        stream = data.TokenStream(
            self.plan.sources,
            self.plan.weights,
            seed=self.settings.seed,
            batch_schedule=self.plan.batch_schedule,
            position=progress.position,
            end_position=UNBOUNDED,
            skipped_windows=progress.skipped_windows,
            blends=self.plan.mixture.blends[1:],
            group=self.plan.mixture.group,
            **self.stream_options(*self.plan.layout.training_shard(self.rank)),
        )
        self.order, self.traffic = stream.order, stream.traffic
        self._print_skipped_data_notices(progress)
        self.blend = self._blend_of(progress)
        on_gpu = self.device.type != "cpu"
        loader = data.make_loader(stream, self.settings.num_workers, pin_memory=on_gpu)
        return iter(data.prefetch_to_device(loader, self.device))

    def take(self, batches: Any, sequences: int) -> list[dict[str, torch.Tensor]]:
        """Return this rank's micro-batches for the next global batch."""
        each = self.settings.micro_batch_size * self.plan.layout.replicas
        with record_function("data"):
            return [next(batches) for _ in range(sequences // each)]

    def row(self, progress: Progress) -> Row:
        """Return metrics about the data that the run has read so far."""
        return metrics.store_row(self.traffic) | metrics.data_row(
            self.order,
            self.plan.source_names,
            progress.position,
            self.settings.seq_len,
            progress.skipped_windows,
        )

    def _print_skipped_data_notices(self, progress: Progress) -> None:
        """Print a note for each epoch limit that the run will exceed because of skipped data."""
        left = -(-(self.settings.total_tokens - progress.tokens) // self.settings.seq_len)
        for line in epochs.skipped_data_notices(
            self.plan.mixture,
            self.order,
            self.plan.source_names,
            progress.position + max(0, left),
            progress.skipped_windows,
            self.settings,
        ):
            self.print_rank0(f"note: {line}")

    def _blend_of(self, progress: Progress) -> int:
        last = metrics.last_sequence(progress.position, progress.skipped_windows)
        blend: int = self.order.blend_of(last)
        return blend

    def entered_new_blend(self, progress: Progress) -> bool:
        """Update `blend` after a step; return whether it has changed."""
        before, self.blend = self.blend, self._blend_of(progress)
        return self.blend != before

    def probe_batches(self) -> Any:
        """Return the micro-batches of the fixed probe batch, which is the same on every rank."""
        count = probe.num_sequences(self.plan)
        fixed = data.ValidationStream(
            self.plan.sources, num_sequences=count, **self.stream_options(0, 1)
        )
        return data.prefetch_to_device(data.make_loader(fixed, 0, False), self.device)
