"""Norms of weights and their updates, in total and per block, computed from partitioned tensors.

Used in reported steps. Each rank sums the squares of its own values, and a single reduction over
ranks combines the sums; no weights are gathered. Must not depend on how the norms are used.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerolm.distributed.layout import Layout
from zerolm.engine.parameters import divided_over, is_partitioned, own_values, residence
from zerolm.engine.protocol import Engine
from zerolm.engine.stages import is_copy
from zerolm.engine.states import OnNvme, master_slice
from zerolm.model.architecture import block_of

# Larger tensors are split into pieces of this many values, whose sums of squares are added in
# float64. On a CPU, torch sums sequentially in float32, with a relative error of 2e-4 for 2^22
# values and 1e-6 for 2^16 values (torch 2.13). On a GPU, torch uses a tree reduction.
CPU_PIECE_VALUES, GPU_PIECE_VALUES = 1 << 16, 1 << 22
# A rank copies at most about 2^24 master weights (64 MiB) to measure an update. If it has more
# master weights, it samples them in evenly spaced windows.
SAMPLE_VALUES, WINDOW_VALUES = 1 << 24, 1024


class Blocks:
    """A model's parameters, grouped by block. A tied parameter belongs only to its first block, and
    counts on one pipeline stage.

    Attributes:
        names: names of the blocks, in model order.
        parameters: (parameter, index of its block) pairs.
    """

    def __init__(self, model: torch.nn.Module):
        self.names: list[str] = []
        self.parameters: list[tuple[Any, int]] = []
        for name, parameter in model.named_parameters():
            if is_copy(parameter):
                continue
            block = block_of(name)
            if block not in self.names:
                self.names.append(block)
            self.parameters.append((parameter, self.names.index(block)))

    def sums_of_squares(
        self,
        values: Sequence[torch.Tensor],
        block_indices: Sequence[int],
        device: torch.device,
        scales: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Return the sum of squares in each block.

        Uses a matrix product because `index_add_` is not deterministic on a GPU.

        Args:
            values: tensors of any shape, dtype and device.
            block_indices: index of each tensor's block.
            scales: factor to multiply the squares of each tensor with.

        Returns:
            A float64 tensor of shape (blocks,) on `device`.
        """
        pieces: list[torch.Tensor] = []
        blocks: list[int] = []
        factors: list[float] = []
        for index, value in enumerate(values):
            if value.numel() == 0:
                continue
            split = _pieces(value)
            pieces += split
            blocks += [block_indices[index]] * len(split)
            factors += [1.0 if scales is None else scales[index]] * len(split)
        membership = torch.zeros(len(self.names), len(pieces), dtype=torch.float64)
        membership[blocks, list(range(len(pieces)))] = torch.tensor(factors, dtype=torch.float64)
        if not pieces:
            return membership.sum(1).to(device)
        return membership.to(device) @ _squares(pieces, device)


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's squared values, as a float64 scalar.

    The tensor may have any shape and any floating-point dtype.
    """
    return _squares(_pieces(values), values.device).sum()


def _pieces(values: torch.Tensor) -> list[torch.Tensor]:
    length = CPU_PIECE_VALUES if values.device.type == "cpu" else GPU_PIECE_VALUES
    return list(values.reshape(-1).split(length)) if values.numel() > length else [values]


def _squares(pieces: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return each piece's sum of squares, as a float64 tensor of shape (pieces,) on `device`."""
    norms = list(torch._foreach_norm(pieces, 2, torch.float32))
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(device) for norm in norms]
    return torch.stack(norms).to(device).double().square()  # one transfer for all pieces


def is_counted_here(parameter: Any, layout: Layout) -> bool:
    """Return whether this rank counts its values of a parameter, rather than another rank."""
    divided = residence(parameter).group is not None
    return layout.counts_parameter(torch.distributed.get_rank(), divided)


def weight_squares(blocks: Blocks, device: torch.device, layout: Layout) -> torch.Tensor | None:
    """Return this rank's contribution to each block's sum of squared weights.

    With ZeRO-3, the rank contributes its partition without padding. At other stages, several ranks
    have the same values of a parameter, and the parameters are divided among these ranks.

    Returns:
        A float64 tensor of shape (blocks,), or None if parameters are offloaded to NVMe, where
        reading them would take as long as a step.
    """
    rank = torch.distributed.get_rank()
    values, block_indices = [], []
    for index, (parameter, block) in enumerate(blocks.parameters):
        if is_partitioned(parameter):
            if (own := own_values(parameter)) is None:
                return None
            values.append(own)
            block_indices.append(block)
            continue
        copies = layout.weight_copies(divided_over(parameter), rank)
        if index % copies.size == copies.index:
            values.append(parameter.data)
            block_indices.append(block)
    return blocks.sums_of_squares(values, block_indices, device)


def parameter_norm(engine: Engine, layout: Layout) -> float | None:
    """Return the 2-norm of all parameters, or None if they are offloaded to NVMe.

    Every rank must call this.
    """
    squares = weight_squares(Blocks(engine.module), engine.device, layout)
    if squares is None:
        return None
    total = squares.sum()
    torch.distributed.all_reduce(total)
    return math.sqrt(float(total))


def _masters(engine: Engine, blocks: Blocks, layout: Layout) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield (this rank's partition of a master weight, index of its block), without padding.

    Weights replicated on all tensor-parallel ranks are yielded only on the first of these ranks.
    Frozen weights have no master weights.

    Raises:
        OnNvme: the master weights are offloaded to NVMe.
    """
    for parameter, block in blocks.parameters:
        counted = parameter.requires_grad and is_counted_here(parameter, layout)
        own = master_slice(engine, parameter) if counted else None
        if own is not None:
            yield own.values, block


class UpdateMeter:
    """Measures an optimizer step's update: call `before`, take the step, and call `squares`.

    Copies this rank's master weights for the duration of the step. If there are more than
    `SAMPLE_VALUES`, the meter copies evenly spaced windows and extrapolates from them.

    Args:
        engine: a DeepSpeed engine with ZeRO stage 1, 2 or 3.
    """

    def __init__(self, engine: Engine, blocks: Blocks, layout: Layout):
        self._engine, self._blocks, self._layout = engine, blocks, layout
        self._before: list[torch.Tensor] = []

    def before(self) -> None:
        """Copy this rank's master weights, or a sample of them.

        Do nothing if they are offloaded to NVMe.
        """
        try:
            masters = [flat for flat, _ in self._masters()]
        except OnNvme:
            return
        every = -(-sum(flat.numel() for flat in masters) // SAMPLE_VALUES)
        self._every = max(1, every)
        self._before = [windows(flat, self._every).clone() for flat in masters]

    def _masters(self) -> Iterator[tuple[torch.Tensor, int]]:
        return _masters(self._engine, self._blocks, self._layout)

    def squares(self, device: torch.device) -> torch.Tensor | None:
        """Return each block's sum of squared weight changes on this rank since `before`.

        If several ranks have copies of the same state, each contributes an equal share.

        Args:
            device: device of the result, for the all-reduce.

        Returns:
            A float64 tensor of shape (blocks,), or None if nothing was copied.
        """
        if not self._before:
            return None
        before, self._before = self._before, []
        changes, block_indices, scales = [], [], []
        for old, (flat, block) in zip(before, self._masters(), strict=True):
            if old.numel():
                # In place, since the copy is no longer needed and the sign does not matter.
                changes.append(old.sub_(windows(flat, self._every)))
                block_indices.append(block)
                scales.append(flat.numel() / old.numel() / self._layout.copies)
        return self._blocks.sums_of_squares(changes, block_indices, device, scales)

    def drop(self) -> None:
        """Discard the copy after a step that was not applied."""
        self._before = []


def windows(flat: torch.Tensor, every: int) -> torch.Tensor:
    """Return a view of evenly spaced windows that cover about one in `every` values.

    Args:
        flat: values of shape (N,).

    Returns:
        A tensor of shape (windows, WINDOW_VALUES), or `flat` itself if a single window is enough.
        The distance between windows is odd, so they cover different columns of a matrix.
    """
    if every == 1 or flat.numel() <= WINDOW_VALUES:
        return flat
    return flat.unfold(0, WINDOW_VALUES, WINDOW_VALUES * every + 1)
