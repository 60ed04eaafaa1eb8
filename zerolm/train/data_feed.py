"""What a run on one rank reads: its training data from wherever it is, and the fixed batch.

Between the plan and the streams of data.py: which part of which sequences is this rank's, which
stage of the mixture it has reached. All ranks make the same calls.
"""

from collections.abc import Callable
from typing import Any

from zerolm.checkpoint import probe
from zerolm.checkpoint.directory import Progress
from zerolm.data import epochs
from zerolm.data import loader as data
from zerolm.plan.plan import Plan
from zerolm.train import metrics

UNBOUNDED = 1 << 62  # the stream has no end: the token budget ends the run


class Feed:
    """The data of a run on one rank.

    Args:
        device: to which micro-batches go.
        say: prints on rank 0.

    Attributes:
        order: of the training data, once `batches` was called.
        traffic: counts of what came from stores and from the cache.
        stage: of the mixture, that the last sequence taken was in.
    """

    def __init__(self, plan: Plan, rank: int, device: Any, say: Callable[..., None]):
        self.plan, self.rank, self.device, self.say = plan, rank, device, say
        self.settings = plan.settings
        self.order: Any = None
        self.traffic: Any = None
        self.stage = 0

    def cut_into(self, part: int, parts: int) -> dict[str, Any]:
        """Return how data of which a rank has one of several parts is cut into micro-batches."""
        return {
            "seq_len": self.settings.seq_len,
            "micro_batch_size": self.plan.settings.micro_batch_size,
            "document_mask": self.settings.document_mask,
            "packing": self.settings.packing,
            "rank": part,
            "world_size": parts,
        }

    def batches(self, progress: Progress) -> Any:
        """Return the endless iterator of this rank's micro-batches, from where the run is."""
        stream = data.TokenStream(
            self.plan.sources,
            self.plan.weights,
            seed=self.settings.seed,
            batch_schedule=self.plan.batch_schedule,
            position=progress.position,
            end_position=UNBOUNDED,
            skipped_windows=progress.skipped_windows,
            stages=self.plan.mixture.stages[1:],
            **self.cut_into(*self.plan.layout.training_shard(self.rank)),
        )
        self.order, self.traffic = stream.order, stream.traffic
        self._note_caps(progress)
        self.stage = self._stage_of(progress)
        on_gpu = self.device.type != "cpu"
        loader = data.make_loader(stream, self.settings.num_workers, pin_memory=on_gpu)
        return iter(data.prefetch_to_device(loader, self.device))

    def _note_caps(self, progress: Progress) -> None:
        """Say, as the run begins or goes on, which caps what it left out makes it exceed."""
        left = -(-(self.settings.total_tokens - progress.tokens) // self.settings.seq_len)
        for line in epochs.skipped_data_notices(
            self.plan.mixture,
            self.order,
            self.plan.source_names,
            progress.position + max(0, left),
            progress.skipped_windows,
            self.settings,
        ):
            self.say(f"note: {line}")

    def _stage_of(self, progress: Progress) -> int:
        last = metrics.last_sequence(progress.position, progress.skipped_windows)
        stage: int = self.order.stage_of(last)
        return stage

    def enters_stage(self, progress: Progress) -> bool:
        """Tell whether the last step began the mixture's next stage, which is `stage` from now."""
        before, self.stage = self.stage, self._stage_of(progress)
        return self.stage != before

    def probes(self) -> Any:
        """Return the micro-batches of the fixed batch, the same on every rank."""
        count = probe.num_sequences(self.plan)
        fixed = data.ValidationStream(self.plan.sources, num_sequences=count, **self.cut_into(0, 1))
        return data.prefetch_to_device(data.make_loader(fixed, 0, False), self.device)
