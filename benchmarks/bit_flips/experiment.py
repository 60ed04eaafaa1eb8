"""A run of a tiny model in this process that can be set back, and have single bits flipped.

The command plans and counts the flips.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bit_flips.tiny_run import BATCH, SEQ_LEN, flags, start

WARMUP = 48
KINDS = {"weights (bf16)": "weights", "first moment": "exp_avg", "second moment": "exp_avg_sq"}


class Experiment:
    """A run that can be set back to the end of its warm-up."""

    def __init__(self, directory: Path, steps: int):
        from zerolm.integrity.checks import Integrity

        self.directory, self.steps = directory, steps
        self.run = run = start(flags(directory, "flips"))
        self.checks = run.integrity
        self.no_checks = Integrity(
            run.engine, lambda: None, enabled=False, interval=0, seed=0, replicated=False,
            overflows_are_normal=False,
        )  # fmt: skip
        self.action: Callable[[str], None] | None = None
        self._hook()
        batches = run.batches()
        for _ in range(WARMUP):
            run.step(batches)
        self._tensors = [each.clone() for each in self._live()]
        self._scalars = [copy.deepcopy(each) for each in self._groups()]
        self._objects = {
            "progress": copy.deepcopy(run.progress),
            "history": copy.deepcopy(run.spike_guard.history),
            "bounds": copy.deepcopy(self.checks._bounds),
        }
        self.clean = self.play(None, checks=False)
        assert self.play(None, checks=False) == self.clean, "setting back does not reproduce"
        assert self.play(None, checks=True)["losses"] == self.clean["losses"]

    def _live(self) -> list[torch.Tensor]:
        from zerolm.integrity.zero_state import states

        inner = self.run.engine.optimizer.optimizer
        single = [
            value for state in inner.state.values() for value in state.values()
            if torch.is_tensor(value) and value.numel() == 1
        ]  # fmt: skip
        return [each.values for each in states(self.run.engine)] + single

    def _groups(self) -> list[dict]:
        inner = self.run.engine.optimizer.optimizer
        found = [
            {key: value for key, value in state.items() if not torch.is_tensor(value)}
            for state in inner.state.values()
        ]
        return found + [
            {key: value for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ]

    def _hook(self) -> None:
        """Call `self.action` at the moments of a step."""
        engine, gate = self.run.engine, self.run.gate
        backward, step = engine.backward, gate.step

        def after_backward(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            if engine.is_gradient_accumulation_boundary():
                self._act("backward")
            return result

        def before_update(*args: Any, **kwargs: Any) -> Any:
            if not args[1]:  # not a skip
                self._act("update")
            return step(*args, **kwargs)

        engine.backward, gate.step = after_backward, before_update

    def _act(self, moment: str) -> None:
        if self.action is not None:
            self.action(moment)

    def restore(self) -> None:
        run = self.run
        for live, kept in zip(self._live(), self._tensors, strict=True):
            live.copy_(kept)
        inner = run.engine.optimizer.optimizer
        for live, kept in zip(
            [*inner.state.values(), *inner.param_groups], self._scalars, strict=True
        ):
            live.update(copy.deepcopy(kept))
        run.progress = copy.deepcopy(self._objects["progress"])
        run.spike_guard.history = copy.deepcopy(self._objects["history"])
        self.checks._bounds = copy.deepcopy(self._objects["bounds"])
        self.checks._corrections, self.checks._started = 0, True
        self.checks.restart()
        self.checks._started = True
        self.checks.end_step(run.progress.step)
        run.stopping = False

    def play(self, flip: dict | None, checks: bool) -> dict[str, Any]:
        """Train the steps after the warm-up; return losses, final digest and what was found."""
        from zerolm.common.errors import CorruptionError, ShardReadError
        from zerolm.integrity.digests import digest

        run = self.run
        self.restore()
        run.integrity = self.checks if checks else self.no_checks
        disk = None
        if flip and flip["place"] == "shard on disk":
            disk = self._token_on_disk(flip)
            disk.flip()
            if checks:
                self._forget_verified_blocks()
        batches = run.batches()
        losses, found = [], None
        try:
            for number in range(self.steps):
                flipping = flip is not None and number == flip["step"]
                if flipping and flip["place"] == "batch in memory":
                    batches = flipped_batches(batches, flip)
                if flipping:
                    self._arm(flip)
                run.step(batches)
                self.action = None
                losses.append(run.last_step.loss if run.last_step.applied else None)
                replayed = run.integrity.replayed
                if replayed is not None and replayed.wrong:
                    found = f"{replayed.why} step computed again"
                elif losses[-1] is None and found is None:
                    found = "refused by the spike guard"
        except CorruptionError as error:
            found = "data" if "token ids" in str(error) else "digest of states"
            if "three" in str(error):
                found = "three results"
            run.engine.set_gradient_accumulation_boundary(True)
            run.gate.discard(run.engine)
        except ShardReadError:
            found = "checksum of a block"
        except IndexError:
            found = "crash"
        finally:
            self.action = None
            batches.close()
            if disk is not None:
                disk.flip()
        final = [int(digest(each)) for each in self._live()]
        return {"losses": losses, "final": final, "found": found}

    def _forget_verified_blocks(self) -> None:
        """Verify blocks again when they are first read, as in a new process."""
        for source in self.run.plan.sources:
            source.files._open.clear()
            source.files._closed.clear()

    def _token_on_disk(self, flip: dict) -> "Disk":
        """Return a token of the step's batch in the file that it is read from."""
        batches = self.run.batches()
        batch = [next(batches) for _ in range(flip["step"] + 1)][-1]
        batches.close()
        column = int(flip["element"] * SEQ_LEN)
        row = batch["input_ids"][int(flip["module"] * BATCH)].numpy().astype("<u2").tobytes()
        for path in sorted((self.directory / "corpus").glob("*.bin")):
            offset = path.read_bytes().find(row)
            if offset >= 0:
                return Disk(path, offset + 2 * column, flip)
        raise AssertionError("the batch is in no shard")

    def _arm(self, flip: dict) -> None:
        """Prepare to flip the bit in the next step."""
        from zerolm.integrity.zero_state import states

        place, engine = flip["place"], self.run.engine
        live = list(states(engine))
        if place == "gradient":
            self.action = self._once("backward", lambda: flip_one(self._slices(), flip))
        elif "activation" in place:
            self._arm_activation(flip, backward=place.startswith("gradient"))
        elif place == "state, during the update":
            self.action = self._once("update", lambda: flip_one([e.values for e in live], flip))
        elif place not in ("batch in memory", "shard on disk"):
            kind = KINDS.get(place, place)
            flip_one([each.values for each in live if each.kind == kind], flip)

    def _slices(self) -> list[torch.Tensor]:
        from zerolm.integrity.zero_state import Gradients

        return Gradients(self.run.engine).slices()

    def _once(self, when: str, act: Callable[[], None]) -> Callable[[str], None]:
        def action(moment: str) -> None:
            if moment == when:
                self.action = None
                act()

        return action

    def _arm_activation(self, flip: dict, backward: bool) -> None:
        modules = [
            module for module in self.run.engine.module.modules()
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
            or type(module).__name__.endswith(("RMSNorm", "SiLUActivation"))
        ]  # fmt: skip
        module = modules[int(flip["module"] * len(modules))]

        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            handle.remove()
            if backward:
                output.register_hook(lambda gradient: (flip_one([gradient.data], flip), None)[1])
            else:
                flip_one([output.data], flip)

        handle = module.register_forward_hook(hook)


def flipped_batches(batches: Any, flip: dict) -> Any:
    for number, batch in enumerate(batches):
        if number == 0:
            name = "input_ids" if flip["module"] < 0.5 else "targets"
            flat = batch[name].view(-1)
            index = int(flip["element"] * flat.numel())
            flat[index] ^= 1 << int(flip["bit"] * 9)  # others leave the vocabulary, which raises
        yield batch


class Disk:
    """One bit of a token of the vocabulary in a shard on disk."""

    def __init__(self, path: Path, offset: int, flip: dict):
        self.path, self.offset, self.bit = path, offset, int(flip["bit"] * 9)

    def flip(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.offset)
            token = int.from_bytes(file.read(2), "little") ^ (1 << self.bit)
            file.seek(self.offset)
            file.write(token.to_bytes(2, "little"))


def flip_one(tensors: list[torch.Tensor], flip: dict) -> None:
    """Flip the bit of an element of some tensors, chosen by a number from 0 to 1."""
    from zerolm.integrity.checks import flip_bit

    index = int(flip["element"] * sum(each.numel() for each in tensors))
    for tensor in tensors:
        if index < tensor.numel():
            flip_bit(tensor, index, int(flip["bit"] * 8 * tensor.element_size()))
            return
        index -= tensor.numel()
