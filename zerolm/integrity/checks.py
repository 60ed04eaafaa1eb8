"""`Checks`: detects silent hardware errors before their values reach the weights.

Before a step is applied, it is recomputed from the same batch if its figures are suspicious or it
was chosen at random. States are compared between steps, and batches during steps. Every rank makes
the same decision in the same step, since figures are summed over ranks along with the losses.
"""

import hashlib
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerolm.common.errors import CorruptionError
from zerolm.common.faults import FLIP
from zerolm.distributed.collectives import gather_objects
from zerolm.distributed.pipeline import Link
from zerolm.engine.gradients import gradients
from zerolm.engine.protocol import Engine
from zerolm.integrity.bounds import Bounds
from zerolm.integrity.passes import Pass, PassRecorder
from zerolm.integrity.seal import Seal

IGNORED = -100  # target at positions without loss, as in zerolm.model.loss
Batch = dict[str, torch.Tensor]
# Largest relative difference between the norms in two passes that kernels without a fixed summation
# order can explain. The tolerance is a multiple of the measured difference. The first replay after
# a launch never ends the run, because the differences caused by the kernels are not yet known.
NONDETERMINISM, TOLERANCE_FACTOR = 1e-3, 10.0
# number of corrected steps since launch at which the run ends: the device is broken
MAX_CORRECTIONS = 3
ODD, SPOT = "odd", "spot"


class Replayed(NamedTuple):
    """A recomputed step.

    Attributes:
        why: `ODD` or `SPOT`.
        wrong: description of the wrong pass; None if the passes agreed.
        places: locations of the ranks that computed the wrong pass.
        parameters: names of the parameters with wrong gradients.
        tolerance: tolerance for norms, if this replay showed that the run's kernels are not
            deterministic.
    """

    why: str
    wrong: str | None = None
    places: Sequence[dict[str, Any]] = ()
    parameters: Sequence[str] = ()
    tolerance: float | None = None


class Checks:
    """The checks on one rank. Every rank must make the same calls.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3.
        discard: clears the accumulated gradient.
        interval: in each interval of this many steps, a random step is recomputed; 0: none.
        seed: seed for the random choice of recomputed steps.
        replicated: whether ranks store the same weights, as in `Layout.weights_have_copies`.
        link: to the neighbouring pipeline stages, if there are any.
        overflows_are_normal: whether gradients may be infinite, as when fp16 searches for its loss
            scale.

    Attributes:
        replayed: result of recomputing the last step; None if it was not recomputed.
        summed: the last pass's `figures`, summed over ranks.
    """

    def __init__(
        self,
        engine: Engine,
        discard: Callable[[], None],
        *,
        interval: int,
        seed: int,
        replicated: bool,
        overflows_are_normal: bool,
        link: Link | None = None,
    ):
        self._engine, self._discard = engine, discard
        self._interval, self._seed = interval, seed
        self.replayed: Replayed | None = None
        self._started = False
        self._corrections = 0
        self._tolerance = 0.0  # relative difference between norms; 0: bits must be equal
        self._watched: tuple[Sequence[Batch], str | None] | None = None  # in a first pass
        self.summed: Sequence[float] = ()
        self._recorder = PassRecorder(engine, link)
        self._seal = Seal(engine, replicated and engine.world_size > 1)
        self._bounds = Bounds(non_finite_is_odd=not overflows_are_normal)

    def restart(self) -> None:
        """Drop the digests, after other states have been loaded."""
        self._seal.drop()
        self._started = False

    def end_step(self, step: int) -> None:
        """Compute digests of the states after an optimizer step, whether or not it was applied."""
        self._seal.close(step)

    # ---- The passes of a step

    def checked(
        self,
        step: int,
        batches: Sequence[Batch],
        run: Callable[[], Any],
        fault: str | None = None,
    ) -> Any:
        """Compute a step in as many passes as are needed to trust it; return the last pass's
        result.

        Afterwards, the accumulated gradient belongs to that result.

        Args:
            batches: this rank's micro-batches.
            run: runs a pass, then sums `figures` over ranks; returns the pass's `StepResult`.
            fault: fault to inject into this rank's first pass; for tests.

        Raises:
            CorruptionError: states or the batch changed, or passes disagree; raised on every rank.
        """
        self.replayed = None
        self._seal.begin_step()
        self._recorder.begin()
        self._watched = batches, fault
        result = run()
        self._recorder.end()
        odd, damaged, *sealed = self.summed
        changed, unequal = self._seal.agree(sealed)
        if damaged or changed or unequal:
            raise self._state_error(step, batches, changed, unequal)
        if odd or self._is_due(step):
            result = self._replay(step, ODD if odd else SPOT, result, run)
        self._started = True
        return result

    def _is_due(self, step: int) -> bool:
        if not self._interval:
            return False
        number, offset = divmod(step, self._interval)
        chosen = hashlib.sha256(f"{self._seed}/replay/{number}".encode()).digest()
        return not self._started or offset == int.from_bytes(chosen[:8], "little") % self._interval

    @torch.no_grad()
    def figures(self, losses: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return this rank's figures to sum over ranks, as a float64 tensor (n,) on the device.

        Returns None except in the first pass of a step.

        Args:
            losses: the mean loss of each micro-batch, if this rank computes losses.
        """
        if self._watched is None:
            return None
        (batches, fault), self._watched = self._watched, None
        device = self._engine.device
        if fault == FLIP:
            flip_bit(max((each for _, each in gradients(self._engine)), key=torch.numel))
        largest = torch.stack([*losses]).max() if losses else torch.ones((), device=device)
        norms = self._recorder.norms()
        figures = torch.cat([norms.to(device), largest.to(device, torch.float32)[None]])
        odd = self._bounds.add(figures)
        broken = [_broken_shifts(batch) for batch in batches if not _is_shifted(batch)]
        damaged = torch.stack(broken).sum() if broken else odd.new_zeros(())
        head = torch.stack([odd, damaged])
        return torch.cat([head.double(), self._seal.figures()])

    def _replay(self, step: int, why: str, first: Any, run: Callable[[], Any]) -> Any:
        passes = [self._recorder.result(first.micro_losses)]
        result = self._another(run, passes)
        if all(gather_objects(self._agree(*passes))):
            if why == ODD:
                self._bounds.widen()
            self.replayed = Replayed(why)
            return result
        result = self._another(run, passes)
        # the third pass is right if it agrees with either of the other two
        pairs = ((1, 2), (0, 2))
        agreed = [self._agree(passes[a], passes[b]) for a, b in pairs]
        apart = max(passes[a].distance(passes[b]) for a, b in (*pairs, (0, 1)))
        found = gather_objects((agreed, apart))
        for wrong in (0, 1):
            if all(agreed[wrong] for agreed, _ in found):
                self.replayed = self._correction(why, passes[wrong], passes[2], wrong)
                self._corrections += 1
                if self._corrections >= MAX_CORRECTIONS:
                    text = f"{self._corrections} steps since the start were computed wrongly"
                    raise self._error(step, text, self.replayed.places)
                return result
        apart = max(each for _, each in found)
        first = not self._started and math.isfinite(apart)
        if self._tolerance == 0.0 and (first or apart <= NONDETERMINISM):
            self._tolerance = TOLERANCE_FACTOR * min(apart, NONDETERMINISM)
            self.replayed = Replayed(why, tolerance=self._tolerance)
            return result
        places = self._places(passes[0], passes[2]) or self._places(passes[1], passes[2])
        raise self._error(step, "three passes over the same batch gave three results", places)

    def _another(self, run: Callable[[], Any], passes: list[Pass]) -> Any:
        self._discard()
        self._recorder.begin()
        result = run()
        self._recorder.end()
        passes.append(self._recorder.result(result.micro_losses))
        return result

    def _agree(self, one: Pass, other: Pass) -> bool:
        return one.same_bits(other) or one.distance(other) <= self._tolerance > 0.0

    def _correction(self, why: str, wrong: Pass, right: Pass, number: int) -> Replayed:
        names = gather_objects(wrong.changed(right, self._recorder.names()))
        changed = list(dict.fromkeys(name for each in names for name in each))
        text = f"the {('first', 'second')[number]} pass over the batch was wrong"
        return Replayed(why, text, self._places(wrong, right), changed)

    def _places(self, wrong: Pass, right: Pass) -> list[dict[str, Any]]:
        """Return the locations of the ranks that computed a wrong pass.

        A fault in the loss or an activation is visible only on the rank where it occurred. A fault
        in a weight's gradient or during the reduction is visible on the ranks that own that part
        of the sum.
        """
        found = gather_objects(
            (place(self._engine), wrong.own_work_differs(right), wrong.same_bits(right))
        )
        own = [where for where, differs, _ in found if differs]
        return own or [where for where, _, same in found if not same]

    # ---- States and data

    def _state_error(
        self, step: int, batches: Sequence[Batch], changed: bool, unequal: bool
    ) -> CorruptionError:
        lines = self._seal.changed() if changed else []
        if sum(int(_broken_shifts(batch)) for batch in batches):
            lines.append("token ids of the batch")
        digests = gather_objects(self._seal.digests_of_copies()) if unequal else []
        found = gather_objects((place(self._engine), lines))
        guilty = [where for where, lines in found if lines]
        texts = [f"{shown(where)}: {'; '.join(lines)}" for where, lines in found if lines]
        if guilty:
            return self._error(step, f"changed in memory: {' | '.join(texts)}", guilty)
        slots = {slot for each in digests for slot in each}
        ranks = sorted({rank for slot in slots for rank in _odd(digests, slot)})
        guilty = [found[rank][0] for rank in ranks]
        return self._error(step, f"ranks have different copies of {self._seal.copied}", guilty)

    def _error(self, step: int, what: str, places: Sequence[dict[str, Any]]) -> CorruptionError:
        where = ", ".join(map(shown, places)) or "an unknown rank"
        return CorruptionError(
            f"step {step}: {what} ({where}). The step was not applied. Test the hardware there; "
            f"the same command resumes from the newest checkpoint. Leave that host out if you can.",
            places,
        )


def _odd(digests: Sequence[Mapping[int, int]], slot: int) -> list[int]:
    """Return the ranks whose digest in a slot differs from that of most; if there is no majority,
    all that have it.
    """
    found = {rank: each[slot] for rank, each in enumerate(digests) if slot in each}
    values = list(found.values())
    usual = max(values, key=values.count, default=0)
    clear = 2 * values.count(usual) > len(values)
    return [rank for rank, each in found.items() if each != usual or not clear]


def _broken_shifts(batch: Batch) -> torch.Tensor:
    """Count the targets that differ from the next input, which should be the same token."""
    following, targets = batch["input_ids"][:, 1:], batch["targets"][:, :-1]
    return ((following != targets) & (targets != IGNORED)).sum()


def _is_shifted(batch: Batch) -> bool:
    """Return whether no target differs from the next input, without waiting for a GPU."""
    targets = batch["targets"]
    return targets.device.type == "cpu" and torch.equal(batch["input_ids"][:, 1:], targets[:, :-1])


def place(engine: Engine) -> dict[str, Any]:
    """Return this rank's location: its rank, host and device."""
    device = str(engine.device)
    if engine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(engine.device)
        device += f" {properties.name} {getattr(properties, 'uuid', '')}".rstrip()
    return {"rank": engine.global_rank, "host": socket.gethostname(), "device": device}


def shown(where: dict[str, Any]) -> str:
    """Format the result of `place` as text."""
    return f"rank {where['rank']} on {where['host']}, {where['device']}"


@torch.no_grad()
def flip_bit(values: torch.Tensor, index: int | None = None, bit: int = -2) -> None:
    """Flip a bit of one value in a tensor, in place; by default, the middle value's highest
    exponent bit.
    """
    flat = values.detach().view(-1)
    index = flat.numel() // 2 if index is None else index
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    mask = 1 << (bit % (8 * flat.element_size()))
    word = flat[index : index + 1].view(kind)
    signed = (
        mask - (1 << 8 * flat.element_size()) if mask >> (8 * flat.element_size() - 1) else mask
    )
    word.bitwise_xor_(torch.tensor(signed, dtype=kind, device=flat.device))
