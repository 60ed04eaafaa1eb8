"""Under ZeRO-1 and 2, reduce gradients only to the ranks that own them, which halves the bytes
sent.

DeepSpeed 0.19.8 all-reduces them, although each rank updates only its partition. With bf16
weights, stage 1 all-reduces after the last backward pass, in copies of 500,000,000 values.
Replaced methods, with the bytes that a rank sends per parameter:

    DeepSpeedEngine.buffered_allreduce_fallback       4 per step instead of 8, and no copies
    DeepSpeedZeroOptimizer.average_tensor             4 per micro-batch instead of 8, by its own key
                                                      `use_multi_rank_bucket_allreduce`

Nothing is replaced if that key is true in the JSON, at stage 2 with offload, at stage 1 with Muon
(which needs complete matrices), or at stage 1 if the reduction is not a mean in float32. If the key
is false, there is a separate collective for each owner, however small its part is.

All ranks must start the same collectives in the same order, but gradients may become ready in a
different order or not at all. So buckets are started in a fixed order: each waits for all buckets
before it. The norm must be computed from the partitions, as `StepGate` does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from zerolm.engine import replaced
from zerolm.engine.muon import uses_muon
from zerolm.engine.reduction_choice import KEY, bucket_calls, pieces_save_time, small_pieces_pay
from zerolm.engine.stages import groups_of, num_replicas
from zerolm.engine.states import shard_group

Parameters = list[tuple[int, int]]  # in a bucket: (group, index in the group)


class Bucket(NamedTuple):
    """Consecutive values of a flat gradient that one rank owns.

    Attributes:
        group: index of the flat gradient.
        start, stop: range of the values in the flat gradient; `stop` is excluded.
        owner: the owning rank in the process group over which that flat gradient is sharded.
    """

    group: int
    start: int
    stop: int
    owner: int


def reduce_to_owners(engine: Any, across: Any = None, hosts: int = 1) -> "OwnerReduction | None":
    """Make an engine reduce each gradient only to its owner, if the sum stays the same.

    Args:
        engine: changed permanently at stages 1 and 2. Stage 3 already reduces to owners.
        across: with `--shard_within`, the process group of the ranks that own the same partition.
        hosts: number of hosts on which the ranks run.

    Returns:
        If BF16_Optimizer's flat buffers hold the sums, the object to notify of each complete
        gradient; otherwise None.
    """
    optimizer = engine.optimizer
    ranks = num_replicas(optimizer)
    key = engine._config._param_dict.get("zero_optimization", {}).get(KEY)
    if key is True or ranks == 1 or engine.zero_optimization_stage() not in (1, 2):
        return None
    if not hasattr(optimizer, "fp32_groups_gradients"):
        if key is None and not optimizer.cpu_offload:
            _choose_call(optimizer, ranks, hosts)
        return None
    is_mean = (
        engine.communication_data_type == optimizer.grad_acc_dtype == torch.float32
        and engine.gradient_average
        and engine.postscale_gradients()
        and engine.gradient_predivide_factor() == 1.0
    )
    is_other = optimizer.mpu is not None and groups_of(optimizer) is None
    if not is_mean or is_other or uses_muon(optimizer):
        return None
    found = OwnerReduction(engine, always_by_owner=key is False, across=across)
    replaced.install(engine, "buffered_allreduce_fallback", found.finish)
    return found


def _choose_call(optimizer: Any, ranks: int, hosts: int) -> None:
    """Choose between DeepSpeed's two methods: one reduction per owner, or one all-reduce."""
    values = sum(map(sum, ((each.numel() for each in group) for group in optimizer.bit16_groups)))
    groups = len(optimizer.bit16_groups)
    calls = bucket_calls(values, optimizer.reduce_bucket_size, ranks, groups)
    saves = pieces_save_time(values, calls, ranks, hosts)
    optimizer.use_multi_rank_bucket_allreduce = not saves


class OwnerReduction:
    """Reduces BF16_Optimizer's gradient sums as soon as they are complete, last layers first.

    Afterwards a rank's own partition contains the mean over all ranks; the other partitions
    contain no meaningful values. With `--shard_within`, a partition is first summed within each
    group, then across groups. Each flat gradient may have a process group of its own; all ranks
    have the same number of flat gradients of the same sizes.

    Args:
        engine: its keys `reduce_bucket_size` and `overlap_comm` define the buckets.
        always_by_owner: use a separate collective for each owner, however small its part is.
        across: process group of the ranks that own the same partition; None if there is one owner.

    Attributes:
        early: number of buckets whose reduction began before the last step's backward pass ended.
        buckets: the buckets in the order of their reduction; empty if one collective for each flat
            gradient is faster.
    """

    def __init__(self, engine: Any, always_by_owner: bool, across: Any = None):
        self._engine, self._optimizer = engine, engine.optimizer
        self._always_by_owner, self._across = always_by_owner, across
        self._groups = list(self._optimizer.real_dp_process_group)  # one for each flat gradient
        self._ranks = [distributed.get_world_size(group) for group in self._groups]
        zero = engine._config.zero_config
        self._overlaps = bool(zero.overlap_comm)
        self.early = 0
        self._is_ordered = False
        self._order(self._divide(int(zero.reduce_bucket_size)))

    def add(self, group: int, index: int) -> None:
        """Record that a parameter's gradient sum is complete, and start reducing all ready buckets.

        Raises:
            RuntimeError: the backward pass added a second gradient after the sum had been reduced.
        """
        if not self._overlaps or not self._engine.is_gradient_accumulation_boundary():
            return
        for number in self._buckets_of.get((group, index), ()):
            if number < len(self._started):
                raise RuntimeError(
                    "a parameter received a second gradient in one backward pass after the first "
                    f'was reduced over ranks. Set "overlap_comm": false, or "{KEY}": true'
                )
            self._missing[number].discard((group, index))
        while len(self._started) < len(self.buckets) and not self._missing[len(self._started)]:
            self._start()

    @torch.no_grad()
    def finish(self, grads: Sequence[Any] | None = None, elements_per_buffer: int = 0) -> None:
        """Reduce the remaining buckets and wait. Every rank must call this after its last backward
        pass.

        Args:
            grads, elements_per_buffer: parameters of `buffered_allreduce_fallback`; not used.
        """
        assert grads is None, "DeepSpeed reduces gradients that are not its optimizer's"
        self.early = len(self._started)
        while len(self._started) < len(self.buckets):
            self._start()
        flats = self._optimizer.fp32_groups_gradients_flat
        partitions = self._optimizer.fp32_groups_gradient_flat_partition
        if not self.buckets:
            for partition, flat, group in zip(partitions, flats, self._groups, strict=True):
                distributed.reduce_scatter_tensor(partition, flat, group=group)
        for work in self._started:
            work.wait()
        if self._across is not None:
            for partition in partitions:
                distributed.all_reduce(partition, group=self._across)
        # DeepSpeed's scaling: the ranks that share a sequence hold parts of one gradient.
        ranks = num_replicas(self._optimizer)
        replicas = ranks / float(self._engine.sequence_parallel_size)
        for partition in partitions:
            partition.mul_(1.0 / replicas)
        self._put_off_incomplete()
        self._begin()

    # ---- Inside

    def _order(self, buckets: Sequence[tuple[Bucket, Parameters]]) -> None:
        self.buckets = [bucket for bucket, _ in buckets]
        self._parameters_of = [parameters for _, parameters in buckets]
        self._buckets_of: dict[tuple[int, int], list[int]] = {}
        for number, parameters in enumerate(self._parameters_of):
            for parameter in parameters:
                self._buckets_of.setdefault(parameter, []).append(number)
        self._begin()

    def _put_off_incomplete(self) -> None:
        """Move buckets that were incomplete on some rank in the first step to the end of the
        order.
        """
        if self._is_ordered or not self.buckets or not self._overlaps:
            return
        self._is_ordered = True
        flat = self._optimizer.fp32_groups_gradients_flat[0]
        incomplete = torch.tensor([bool(each) for each in self._missing], device=flat.device).int()
        all_with_states = shard_group(self._engine)
        distributed.all_reduce(incomplete, distributed.ReduceOp.MAX, group=all_with_states)
        pairs = zip(self.buckets, self._parameters_of, incomplete.tolist(), strict=True)
        last = sorted(pairs, key=lambda each: each[2])  # the sort is stable
        self._order([(bucket, parameters) for bucket, parameters, _ in last])

    def _begin(self) -> None:
        self._started: list[Any] = []
        self._missing = [set(parameters) for parameters in self._parameters_of]

    def _start(self) -> None:
        bucket = self.buckets[len(self._started)]
        values = self._optimizer.fp32_groups_gradients_flat[bucket.group][
            bucket.start : bucket.stop
        ]
        group = self._groups[bucket.group]
        owner = distributed.get_global_rank(group, bucket.owner)
        self._started.append(distributed.reduce(values, owner, group=group, async_op=True))

    def _divide(self, size: int) -> list[tuple[Bucket, Parameters]]:
        """Return buckets of at most `size` values, each with the parameters whose values it
        contains.
        """
        names = {id(each): n for n, each in enumerate(self._engine.module.parameters())}
        found: list[tuple[int, Bucket, Parameters]] = []
        values = 0
        for group, parameters in enumerate(self._optimizer.bf16_groups):
            flat = self._optimizer.fp32_groups_gradients_flat[group]
            ranks = self._ranks[group]
            part = flat.numel() // ranks
            stops = [0]
            for parameter in parameters:
                stops.append(stops[-1] + parameter.numel())
            values += stops[-1]
            for owner in range(ranks):
                end = min((owner + 1) * part, stops[-1])
                for start in range(owner * part, end, size):
                    stop = min(start + size, end)
                    inside = [
                        index for index in range(len(parameters))
                        if stops[index] < stop and stops[index + 1] > start
                    ]  # fmt: skip
                    last = min(names[id(parameters[index])] for index in inside)
                    bucket = Bucket(group, start, stop, owner)
                    found.append((last, bucket, [(group, index) for index in inside]))
        pays = small_pieces_pay(values, len(found), max(self._ranks))
        if not (pays or self._always_by_owner):
            return []
        found.sort(key=lambda each: each[:2], reverse=True)
        return [(bucket, parameters) for _, bucket, parameters in found]
