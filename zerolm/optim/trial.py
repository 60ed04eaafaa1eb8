"""Tries out whether ZeRO can use an optimizer class of the user's.

ZeRO passes an optimizer flat shards that contain parts of several parameters, so only elementwise
updates produce the same loss curve at every world size. Must not depend on DeepSpeed or settings.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import Any, NamedTuple

import torch
from torch import nn

from zerolm.optim.optimizer_classes import optimizer_class, preserve_state_dtypes


class Sizes(NamedTuple):
    """Parameters of a trial, one for each parameter group, and how two ranks share them."""

    matrix: tuple[int, ...]
    vector: tuple[int, ...]
    cuts: tuple[int, int]  # values on the first rank; odd, so that all offsets are
    subgroup: int  # at stage 3 a rank may have several flat tensors for a group


# Tried first: on larger shards, optimizers that decompose a matrix as long as a shard take minutes.
SMALL = Sizes((12, 16), (16,), (71, 5), 29)
# Shards on both sides of 4,096 values, from which common 8-bit optimizers quantize in blocks.
LARGE = Sizes((96, 128), (128,), (3001, 41), 1000)
LARGE_SECONDS = 30  # elementwise updates take 0.3 s on one core (AMD EPYC)
ANNOUNCED_SECONDS = 4
STEPS, RESUMED_AFTER = 24, 7  # some rules change after a number of steps
JUMP_AFTER = 12  # gradients fall and jump, since some rules compare norms with an average
LEARNING_RATE = 0.01
WEIGHT_DECAYS = (1.0, 0.0)  # of the two parameter groups; large, since some rules decay by a mean
# Scale of the gradients, and learning rate: some rules differ beyond a threshold, and optimizers
# that estimate a rate by themselves (D-Adaptation, Prodigy) expect 1.
SCALES = ((1e-4, LEARNING_RATE), (1.0, LEARNING_RATE), (1e4, LEARNING_RATE), (1.0, 1.0))
TOLERANCE = 1e-5  # relative to the largest update; elementwise updates do not differ at all
COMPLETE = 0  # in place of a ZeRO stage: complete parameters on one rank, in one call of `step`
SWITCHES = ("train", "eval")  # methods of optimizers that store other weights than they train

_Groups = Sequence[Sequence[torch.Tensor]]  # for each parameter group


def trial_problem(name: str, params: Mapping[str, Any], stage: int) -> str:
    """Return why an optimizer cannot be used at a ZeRO stage; "" if some trial steps found nothing.

    A successful trial is not a proof. Rank 0 prints a line on stderr if it takes seconds. A time
    limit refuses nothing: it only ends the trial on large shards.

    Args:
        params: constructor arguments; "auto" means the default.
    """
    if all(callable(getattr(optimizer_class(name), switch, None)) for switch in SWITCHES):
        return (
            "has the methods train() and eval(), since the weights that it trains are not those to "
            "evaluate and save, but zerolm does not switch between them. Use AdamW, with "
            "--ema_tokens for an average"
        )
    # Compilation for each shape would take minutes, and changes no more than rounding.
    with _announced(name), torch.compiler.set_stance("force_eager"):
        problem = Trial(name, params, SMALL).problem(stage)
        if problem:
            return problem
        try:
            return Trial(name, params, LARGE, time.monotonic() + LARGE_SECONDS).problem(stage)
        except _OutOfTime:
            _print(name, f"ends after {LARGE_SECONDS} s, with few steps on large shards")
            return ""


def num_moments(name: str, params: Mapping[str, Any]) -> float:
    """Return how many float32 values an optimizer stores per parameter value; 2 if it fails."""
    try:
        values = [torch.zeros(LARGE.matrix)]
        with torch.compiler.set_stance("force_eager"):
            rank = _Rank(name, params, [values], COMPLETE, LEARNING_RATE)
            rank.step([[torch.ones(LARGE.matrix)]])
    except Exception:  # the user's code may raise anything; `trial_problem` reports it
        return 2
    states = [value for state in rank.optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if torch.is_tensor(value) and value.numel() > 1]
    return sum(value.nbytes for value in tensors) / values[0].nbytes


class _OutOfTime(BaseException):
    """Not an `Exception`, since those are faults of the optimizer."""


@contextlib.contextmanager
def _announced(name: str) -> Iterator[None]:
    timer = Timer(ANNOUNCED_SECONDS, _print, (name, "still runs"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print(name: str, event: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        line = f"note: optimizer.type: {name}: the trial of its steps on shards {event}"
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Trial:
    """Steps of one optimizer on parameters of some sizes, until a time of the monotonic clock."""

    name: str
    params: Mapping[str, Any]
    sizes: Sizes
    end: float = float("inf")

    def problem(self, stage: int) -> str:
        try:
            updates = self._updates(COMPLETE)
            faster = self._updates(COMPLETE, rate=2 * LEARNING_RATE)
            if not torch.isfinite(updates).all():
                return "computes weights that are not finite on a small matrix. Correct it"
            if not updates.any():
                return (
                    "does not change the weights when step() is called without a closure. "
                    "Correct it"
                )
            if torch.equal(updates, faster):
                return (
                    "does not read `lr` from its parameter groups, so the learning rate schedule "
                    "would have no effect. Read it in each step"
                )
            if not self.is_elementwise(stage):
                return (
                    "takes other steps at stage 3, where DeepSpeed calls step() once for each flat "
                    "tensor, and the other parameter groups are empty then. Count steps in the "
                    "state of each parameter, or use stage 1 or 2"
                    if stage == 3 and self.is_elementwise(2)
                    else "updates shards of a matrix differently from the full matrix, but ZeRO "
                    "passes flat shards, so the loss curve would depend on the world size. Make "
                    "its arithmetic elementwise, or use AdamW, Muon or Lion"
                )
        except Exception as error:  # the user's code may raise anything
            return f"fails on a small matrix ({type(error).__name__}: {error}). Correct it"
        try:
            same = torch.equal(self._updates(stage), self._updates(stage, resumed=True))
        except Exception as error:  # of the user's code, or of the unpickler
            return (
                f"cannot load its own state_dict() ({type(error).__name__}: {error}). Use numbers "
                f"and tensors only"
            )
        return "" if same else (
            "takes other steps after its state_dict() is loaded, so a resumed run would differ. "
            "Keep everything that steps depend on in `state` or in the parameter groups"
        )  # fmt: skip

    def is_elementwise(self, stage: int) -> bool:
        """Return whether steps on the flat shards of two ranks match steps on complete parameters.

        Each rank has an optimizer object of its own.

        Raises:
            Exception: whatever the optimizer itself raises.
        """
        for scale, rate in SCALES:
            complete = self._updates(COMPLETE, scale, rate)
            sharded = self._updates(stage, scale, rate)
            if not torch.all((complete - sharded).abs() <= TOLERANCE * complete.abs().max()):
                return False
        return True

    def _updates(
        self, stage: int, scale: float = 1.0, rate: float = LEARNING_RATE, resumed: bool = False
    ) -> torch.Tensor:
        """Return the change of all values after the steps, as float32 (N,).

        Args:
            stage: ZeRO stage, with two ranks; or `COMPLETE`.
            resumed: save and load the optimizers between two of the steps.
        """
        generator = torch.Generator().manual_seed(0)
        shapes = (self.sizes.matrix, self.sizes.vector)
        start = [0.02 * torch.randn(shape, generator=generator) for shape in shapes]
        # At a rate of 1 a large constant part, from which estimators of a rate see progress.
        constant = [torch.randn(shape, generator=generator) for shape in shapes]
        ranks = [self._rank(own, stage, rate) for own in self._shards(start, stage)]
        with torch.random.fork_rng(devices=[]):  # some optimizers draw random numbers
            torch.manual_seed(0)
            for number in range(STEPS):
                if time.monotonic() > self.end:
                    raise _OutOfTime
                falling = scale * 0.8 ** (number % JUMP_AFTER)
                gradients = [
                    falling * ((rate == 1.0) * each + torch.randn(each.shape, generator=generator))
                    for each in constant
                ]
                gradients[0][: len(gradients[0]) // 2] *= 10  # so the shards' norms differ
                if number == 2:  # an expert without tokens
                    gradients[0].flatten()[: self.sizes.cuts[0]] = 0.0
                for rank, own in zip(ranks, self._shards(gradients, stage), strict=True):
                    rank.step(own)
                if resumed and number + 1 == RESUMED_AFTER:
                    ranks = [self._resume(rank) for rank in ranks]
        groups = [
            torch.cat([value.detach().flatten() for rank in ranks for value in rank.values[group]])
            for group in range(len(start))
        ]
        return torch.cat(groups) - torch.cat([each.flatten() for each in start])

    def _shards(self, values: Sequence[torch.Tensor], stage: int) -> list[_Groups]:
        """Return the tensors of each rank for each parameter group, at a stage or `COMPLETE`."""
        if stage == COMPLETE:
            return [[[value] for value in values]]
        cuts = self.sizes.cuts
        first = [[value.flatten()[:cut]] for value, cut in zip(values, cuts, strict=True)]
        second = [[value.flatten()[cut:]] for value, cut in zip(values, cuts, strict=True)]
        if stage == 3:
            first[0] = list(first[0][0].split(self.sizes.subgroup))
        return [first, second]

    def _rank(self, values: _Groups, stage: int, rate: float) -> "_Rank":
        return _Rank(self.name, self.params, values, stage, rate)

    def _resume(self, rank: "_Rank") -> "_Rank":
        values = [[each.detach() for each in group] for group in rank.values]
        again = self._rank(values, rank.stage, rank.optimizer.param_groups[0]["lr"])
        again.load(rank)
        return again


class _Rank:
    """One rank's optimizer, driven as DeepSpeed drives it at a ZeRO stage.

    It is built with complete parameters (at stage 3 with empty ones), which are then replaced by
    this rank's flat tensors.

    Args:
        values: this rank's tensors for each parameter group; copied.
    """

    def __init__(
        self, name: str, params: Mapping[str, Any], values: _Groups, stage: int, rate: float
    ):
        self.stage = stage
        self.values = [[nn.Parameter(each.clone()) for each in group] for group in values]
        built = self.values if stage == COMPLETE else [
            [nn.Parameter(torch.zeros(shape if stage < 3 else 0))]
            for shape in (LARGE.matrix, LARGE.vector)
        ]  # fmt: skip
        given = {key: value for key, value in params.items() if value != "auto"}
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in zip(built, WEIGHT_DECAYS, strict=False)
        ]
        # The JSON's learning rate may be too small for visible updates.
        self.optimizer = optimizer_class(name)(groups, **{**given, "lr": LEARNING_RATE})
        preserve_state_dtypes(self.optimizer)
        self.set_parameters(self.values)
        self.set_rate(rate)

    def set_parameters(self, values: Sequence[Sequence[nn.Parameter]]) -> None:
        for group, own in zip(self.optimizer.param_groups, values, strict=True):
            group["params"] = list(own)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, gradients: _Groups) -> None:
        for group, of_group in zip(self.values, gradients, strict=True):
            for value, gradient in zip(group, of_group, strict=True):
                value.grad = gradient.clone()
        groups = self.optimizer.param_groups
        if self.stage == COMPLETE:
            self.optimizer.step()
        elif self.stage < 3:  # DeepSpeed steps one group at a time
            for one in groups:
                self.optimizer.param_groups = [one]
                self.optimizer.step()
            self.optimizer.param_groups = groups
        else:  # one flat tensor at a time; the other groups are empty
            self.set_parameters([[] for _ in groups])
            for one, own in zip(groups, self.values, strict=True):
                for value in own:
                    one["params"] = [value]
                    self.optimizer.step()
                    one["params"] = []
            self.set_parameters(self.values)

    def load(self, saved: "_Rank") -> None:
        """Load the state of another rank through a file, as a resumed run does."""
        file = io.BytesIO()
        torch.save(saved.optimizer.state_dict(), file)
        file.seek(0)
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))
        self.set_rate(saved.optimizer.param_groups[0]["lr"])
