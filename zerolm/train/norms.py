"""Norms of the weights and of what a step changes, in total and per block, of partitioned tensors.

Called beside training, on the steps that are reported. Each rank sums the squares of what it holds;
one reduction over the ranks then makes norms of them. Nothing is gathered. Knows where DeepSpeed
0.19.8 keeps weights and float32 masters; must not know what the figures are for.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerolm.distributed.layout import Layout

# A norm over more values than this is taken in pieces that are added in float64. On a CPU torch
# adds one after another in float32: the square over 2^22 values is off by 2e-4, over 2^16 by 1e-6
# (torch 2.13). On a GPU it adds them as a tree.
PIECE_VALUES = {"cpu": 1 << 16}
PIECE_VALUES_ELSEWHERE = 1 << 22
# Of the masters, this many values of a rank are copied to see what a step changes: 64 MiB. All of
# them up to there, from there on windows at equal distances.
SAMPLE_VALUES, WINDOW_VALUES = 1 << 24, 1024


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: the layer of a stack, or its own module.

    `model.layers.3.mlp.up_proj.weight` is of "layers.3", `model.embed_tokens.weight` of
    "embed_tokens".
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit() and at:
            return ".".join(parts[at - 1 : at + 1])
    return parts[-2] if len(parts) > 1 else name


class Blocks:
    """The parameters of a model by block. A tied parameter is one, of the block that is first.

    Attributes:
        names: of the blocks, in the order of the model.
        parameters: each parameter and the number of its block.
    """

    def __init__(self, model: torch.nn.Module):
        self.names: list[str] = []
        self.parameters: list[tuple[Any, int]] = []
        for name, parameter in model.named_parameters():
            block = block_of(name)
            if block not in self.names:
                self.names.append(block)
            self.parameters.append((parameter, self.names.index(block)))

    def squares(
        self,
        values: Sequence[torch.Tensor],
        numbers: Sequence[int],
        device: torch.device,
        scales: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Return the sum of squares in each block, (blocks,) float64 on `device`.

        A matrix product and not `index_add_`, whose order of addition on a GPU changes.

        Args:
            values: any shapes, dtypes and devices.
            numbers: the block of each.
            scales: what the squares of each count for.
        """
        pieces: list[torch.Tensor] = []
        blocks: list[int] = []
        factors: list[float] = []
        for at, value in enumerate(values):
            if value.numel() == 0:
                continue
            cut = _pieces(value)
            pieces += cut
            blocks += [numbers[at]] * len(cut)
            factors += [1.0 if scales is None else scales[at]] * len(cut)
        membership = torch.zeros(len(self.names), len(pieces), dtype=torch.float64)
        membership[blocks, list(range(len(pieces)))] = torch.tensor(factors, dtype=torch.float64)
        if not pieces:
            return membership.sum(1).to(device)
        return membership.to(device) @ _squares(pieces, device)


def square(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a tensor, of any shape and floating dtype, () float64."""
    return _squares(_pieces(values), values.device).sum()


def _pieces(values: torch.Tensor) -> list[torch.Tensor]:
    length = PIECE_VALUES.get(values.device.type, PIECE_VALUES_ELSEWHERE)
    return list(values.reshape(-1).split(length)) if values.numel() > length else [values]


def _squares(pieces: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of each piece, (pieces,) float64 on `device`."""
    norms = list(torch._foreach_norm(pieces, 2, torch.float32))
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(device) for norm in norms]
    return torch.stack(norms).to(device).double().square()  # one copy, not one for each piece


def counted_here(parameter: Any, counts: bool) -> bool:
    """Whether this rank adds a parameter up: its part of one that is cut, else if the rank counts.

    Args:
        counts: `Layout.contributes` of this rank.
    """
    return counts or getattr(parameter, "tensor_model_parallel", False)  # DeepSpeed's mark


def weight_squares(blocks: Blocks, device: torch.device, layout: Layout) -> torch.Tensor | None:
    """Return this rank's share of the squares of all weights, (blocks,) float64.

    Under stage 3 that is the partition it holds, less the padding at the end of the last one; else
    every rank has all weights (or, with matrices cut, those of its replica) and takes some of the
    parameters.

    Args:
        device: where collectives of this run work.

    Returns:
        None when parameters are swapped out to NVMe, where reading them would cost a step.
    """
    rank = torch.distributed.get_rank()
    place, places = layout.evaluation_shard(rank)
    values, numbers = [], []
    for at, (parameter, number) in enumerate(blocks.parameters):
        if hasattr(parameter, "ds_tensor") and hasattr(parameter, "ds_numel"):
            if parameter.ds_tensor.status.name == "NOT_AVAILABLE":
                return None
            shard = parameter.ds_tensor.data.flatten()
            values.append(shard[: max(0, parameter.ds_numel - rank * shard.numel())])
            numbers.append(number)
        elif at % places == place and counted_here(parameter, layout.contributes(rank)):
            values.append(parameter.data)
            numbers.append(number)
    return blocks.squares(values, numbers, device)


def parameter_norm(blocks: Blocks, device: torch.device, layout: Layout) -> float | None:
    """Return the 2-norm of all parameters. Every rank must call.

    Returns:
        None when parameters are swapped out to NVMe, where reading them would cost a step.
    """
    squares = weight_squares(blocks, device, layout)
    if squares is None:
        return None
    total = squares.sum()
    torch.distributed.all_reduce(total)
    return math.sqrt(float(total))


def _masters(engine: Any, blocks: Blocks, layout: Layout) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield this rank's values of each master weight, without padding, and the block it is of.

    Those that every rank of a replica has are the first one's.

    Raises:
        _Swapped: they are on NVMe.
    """
    optimizer, rank = engine.optimizer, torch.distributed.get_rank()
    for parameter, number in blocks.parameters:
        if hasattr(parameter, "ds_tensor"):
            group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            if optimizer._swappable_optimizer_subgroup(group):
                raise _Swapped
            flat = optimizer.fp32_partitioned_groups_flat[group].data
            own = max(0, min(length, parameter.ds_numel - rank * length))
            yield flat.narrow(0, offset, own), number
        elif not counted_here(parameter, layout.contributes(rank)):
            continue
        elif (fragment := getattr(parameter, "_hp_mapping", None)) is not None:
            yield fragment.hp_fragment.data, number


class _Swapped(Exception):
    """The masters are where reading them would cost a step."""


class UpdateMeter:
    """Measures what an optimizer step changes: `before` it, and `squares` after it.

    The masters are copied, all of them up to `SAMPLE_VALUES` on a rank, beyond that windows at
    equal distances, from which the whole is estimated. The copy lives for one step.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3.
    """

    def __init__(self, engine: Any, blocks: Blocks, layout: Layout):
        self._engine, self._blocks, self._layout = engine, blocks, layout
        self._before: list[torch.Tensor] = []

    def before(self) -> None:
        """Copy this rank's masters, or windows of them; nothing when they are on NVMe."""
        try:
            masters = [flat for flat, _ in self._masters()]
        except _Swapped:
            return
        every = -(-sum(flat.numel() for flat in masters) // SAMPLE_VALUES)
        self._every = max(1, every)
        self._before = [windows(flat, self._every).clone() for flat in masters]

    def _masters(self) -> Iterator[tuple[torch.Tensor, int]]:
        return _masters(self._engine, self._blocks, self._layout)

    def squares(self, device: torch.device) -> torch.Tensor | None:
        """Return the squares of this rank's changes since `before`, (blocks,) float64, or None.

        Args:
            device: where collectives of this run work.
        """
        if not self._before:
            return None
        before, self._before = self._before, []
        changes, numbers, scales = [], [], []
        for old, (flat, number) in zip(before, self._masters(), strict=True):
            if old.numel():
                # In place of the copy: old - new has the norm of new - old.
                changes.append(old.sub_(windows(flat, self._every)))
                numbers.append(number)
                scales.append(flat.numel() / old.numel())
        return self._blocks.squares(changes, numbers, device, scales)

    def drop(self) -> None:
        """Forget the copy: the step was not taken."""
        self._before = []


def windows(flat: torch.Tensor, every: int) -> torch.Tensor:
    """Return a view of one in `every` values, in windows; all of them when they fit in one.

    Args:
        flat: (N,) values.

    Returns:
        (N,), or (windows, WINDOW_VALUES). Their distance is odd, so that they do not stand in the
        same columns of a matrix.
    """
    if every == 1 or flat.numel() <= WINDOW_VALUES:
        return flat
    return flat.unfold(0, WINDOW_VALUES, WINDOW_VALUES * every + 1)
