"""One draw: its runs, and how they differ from what they must equal."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from tests.combinations import plain
from tests.combinations.draws import FAULTS, PLAIN, Draw
from tests.combinations.runs import STEPS, Topology, flags, other_topologies, topology_of
from tests.end_to_end.run_digest import newest_checkpoint
from tests.launching import events, kill_session, rows, run_ranks, start_ranks
from tests.soak import comparison
from zerolm.ds_files.zero_files import MASTER, Weights
from zerolm.watchdog.progress import read_heartbeats

SECONDS = 400.0  # of a run
SKIPPED_STEP, KILLED_STEP, SAVED_STEP = 3, 5, 4
# Largest relative differences between topologies, and from plain PyTorch. bf16 weights are rounded
# to their neighbour now and then; fp8 and compiled products round at other places.
LOSS = {"fp32": 2e-5, "bf16": 4e-3}
WEIGHTS = {"fp32": 1e-4, "bf16": 1e-2}
CPP_ERROR = "CppCompileError"  # of torch 2.13 for bf16 on a CPU: it declares a variable twice
# DeepSpeed's Lion for CPUs sets this key, which it never reads, when its state is loaded.
ADDED_BY_LION = "amsgrad: 0x0.0p+0, expected absent"
SIGNS = 20  # times more for Lion's weights in bf16: each takes the sign of a rounded value
ROUNDING, CLOSE_TO_0 = 1e-5, 1e-4  # a difference of a value; the share of signs of small values
# DeepSpeed's Muon iterates in fp16 on CPUs with such instructions. Whole models with micro-batches
# of another size then differ from themselves by 3e-6 and 5e-4 (docs/optimizers.md).
MUON_IN_FP16 = 1e-4, 1e-2
OTHER_TOPOLOGIES = 4  # tries to find one that is not refused


class Trial:
    """The runs of a draw, below a directory of their own.

    Args:
        base: directory that has `data/`, and gets the runs.
    """

    def __init__(self, draw: Draw, number: int, base: Path):
        self.draw, self.number, self.base = draw, number, base
        self.directory = base / f"draw-{number:04d}"
        self.topology = topology_of(draw)
        self.problems: list[str] = []

    def run(self) -> dict[str, Any]:
        """Train, compare, and return the entry of the log; the directory is kept if it differs."""
        shutil.rmtree(self.directory, ignore_errors=True)
        began = time.monotonic()
        entry: dict[str, Any] = {"number": self.number, "draw": dict(self.draw)}
        code, output = self.train("straight", self.topology)
        if code == 2:
            entry |= self.refusal(output)
        elif CPP_ERROR in output and self.draw["precision"] == "bf16":
            entry["not_compiled"] = CPP_ERROR
        elif code:
            self.problems.append(f"straight: exit code {code}: {last_error(output)}")
        else:
            entry |= self.compare_all()
        entry |= {"problems": self.problems, "seconds": round(time.monotonic() - began, 1)}
        if not self.problems:
            shutil.rmtree(self.directory)
        return entry

    def compare_all(self) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        self.interrupt("killed")
        if self.problems:
            return entry
        (self.directory / "moved-ledger").mkdir()
        for part in ("", "-once"):  # with the faults that have happened
            shutil.copytree(self.directory / f"killed{part}", self.directory / f"moved{part}")
        self.resume_on_same_topology()
        if not self.problems:
            entry |= self.resume_elsewhere()
        if self.draw["between"] not in FAULTS and PLAIN.items() <= self.draw.items():
            entry |= self.compare_with_plain()
        return entry

    # ---- Runs

    def train(self, name: str, topology: Topology, **more: str) -> tuple[int, str]:
        """Train on a topology in the run directory `name`; return the exit code and the output."""
        arguments = flags(self.draw, topology, self.base, self.directory / name)
        more = self.variables(name) | more
        try:
            done = run_ranks(topology.ranks, *arguments, timeout=SECONDS, **more)
        except AssertionError as error:
            return -1, str(error)
        (self.directory / f"{name}.log").open("a").write(done.stdout)
        return done.returncode, done.stdout

    def variables(self, name: str) -> dict[str, str]:
        ledger, once = (self.directory / f"{name}-{each}" for each in ("ledger", "once"))
        for directory in (ledger, once):
            directory.mkdir(parents=True, exist_ok=True)
        variables = {
            "ZEROLM_LEDGER": str(ledger),
            "FAULT": ",".join(self.faults()),
            "TORCHINDUCTOR_CACHE_DIR": str(self.base / "inductor"),
        }
        # A rollback goes around the window. A skipped step is skipped again if it is done again.
        return variables | ({"FAULT_ONCE": str(once)} if self.draw["between"] == "rollback" else {})

    def faults(self) -> Iterator[str]:
        if self.draw["between"] in FAULTS:
            yield f"step.backward:0:{SKIPPED_STEP}:nan"

    def interrupt(self, name: str) -> None:
        """Train until the run is interrupted, after it has published a checkpoint."""
        kind, faults = self.draw["interruption"], list(self.faults())
        if kind == "stopped":
            return self.stop(name, [*faults, f"step.begin:*:{SAVED_STEP}:sleep=3"])
        point = f"step.begin:0:{KILLED_STEP}:kill"
        if kind == "killed_in_a_save":
            point = f"checkpoint.rename:0:{SAVED_STEP}:kill"
        code, output = self.train(name, self.topology, FAULT=",".join([*faults, point]))
        if code in (0, 1, 2):
            self.problems.append(f"killed: exit code {code}: {last_error(output)}")

    def stop(self, name: str, faults: list[str]) -> None:
        run_dir, path = self.directory / name, self.directory / f"{name}.log"
        arguments = flags(self.draw, self.topology, self.base, run_dir)
        more = self.variables(name) | {"FAULT": ",".join(faults)}
        with path.open("w") as log:
            ranks = start_ranks(self.topology.ranks, log, *arguments, **more)
        try:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                metrics = run_dir / "metrics.jsonl"
                if metrics.exists() and f'"step": {SAVED_STEP - 1},' in metrics.read_text():
                    break
                time.sleep(0.05)
            os.kill(read_heartbeats(run_dir)[0]["pid"], signal.SIGTERM)
            codes = ranks.codes(timeout=SECONDS)
        finally:
            kill_session(ranks.session)
        if {code for _, code in codes or ()} != {75}:
            self.problems.append(f"stopped: exit codes {codes}: {last_error(path.read_text())}")

    def refusal(self, output: str) -> dict[str, Any]:
        """Require that `--check` refuses this draw, with the same lines."""
        arguments = flags(self.draw, self.topology, self.base, self.directory / "check")
        checked = run_ranks(
            1, *arguments, "--check", "--world_size", self.topology.ranks, timeout=SECONDS
        )
        lines = [
            refusals(text.replace(f"{self.directory}/", "").replace(f"{name}.ds.json", "ds.json"))
            for name, text in (("straight", output), ("check", checked.stdout))
        ]
        if checked.returncode != 2 or lines[0] != lines[1]:
            self.problems.append(f"--check: {checked.returncode}: {lines[1]}, the run: {lines[0]}")
        return {"refused": lines[0]}

    # ---- Comparisons

    def resume_on_same_topology(self) -> None:
        code, output = self.train("killed", self.topology)
        if code:
            self.problems.append(f"resume: exit code {code}: {last_error(output)}")
            return
        steps = [event["step"] for event in events(self.directory / "killed", "resume")]
        if not steps or not 0 < steps[-1] < STEPS:
            self.problems.append(f"resume: at {steps}, so nothing was trained after a resume")
        found, expected = (
            comparison.digest(self.directory / name, self.directory / f"{name}-ledger")
            for name in ("killed", "straight")
        )
        differences = [
            line
            for line in comparison.differences(found, expected)
            if self.draw["optimizer"] != "lion" or not line.endswith(ADDED_BY_LION)
        ]
        self.problems += [f"resume: {each}" for each in differences[:9]]

    def resume_elsewhere(self) -> dict[str, Any]:
        """Resume on another topology; require the same curve and weights, within rounding."""
        refused: list[str] = []
        for topology in other_topologies(self.draw, self.number):
            code, output = self.train("moved", topology)
            if code != 2 or len(refused) == OTHER_TOPOLOGIES:
                break
            refused += refusals(output)[:1]
        entry: dict[str, Any] = {"moved": topology._asdict()} | (
            {"moves_refused": refused} if refused else {}
        )
        if code == 2:
            return {"moves_refused": [*refused, *refusals(output)[:1]]}
        if code:
            self.problems.append(f"{topology}: exit code {code}: {last_error(output)}")
            return entry
        precision = self.draw["precision"]
        loss = self.largest_difference("train/loss", self.losses("moved"))
        weights = self.weights_difference()
        most = LOSS[precision], WEIGHTS[precision]
        if precision == "bf16" and self.draw["optimizer"] == "lion":
            most = most[0], most[1] * SIGNS
        if precision == "fp32" and self.draw["optimizer"] == "muon" and multiplies_fp16():
            most = MUON_IN_FP16
        if not loss <= most[0] or not weights <= most[1]:
            self.problems.append(f"{topology}: loss by {loss:.1e}, weights by {weights:.1e}")
        return entry | {"moved_loss": loss, "moved_weights": weights}

    def losses(self, name: str) -> dict[int, float]:
        return rows(self.directory / name, "train/loss")

    def largest_difference(self, key: str, found: dict[int, float]) -> float:
        """Return the largest relative difference from the uninterrupted run."""
        expected = rows(self.directory / "straight", key)
        if list(found) != list(expected):
            return float("inf")
        both = [(found[step], value) for step, value in expected.items() if value is not None]
        return max(abs(ours / value - 1) for ours, value in both)

    def weights_difference(self) -> float:
        """Return how far the last checkpoints are apart: the norm, relative to that of the weights.

        Of all weights together: a key bias has no gradient but rounding, which AdamW scales up.
        """
        paths = [newest_checkpoint(self.directory / name) for name in ("moved", "straight")]
        try:
            ours, expected = map(weights_by_deepspeed, paths)
        except ValueError:  # its tool does not read what its optimizer for ZeRO-1 and bf16 writes
            ours, expected = map(weights_by_zerolm, paths)
        if set(ours) != set(expected):
            return float("inf")
        differences = {name: ours[name].detach() - each.detach() for name, each in expected.items()}
        if self.draw["optimizer"] == "lion" and self.draw["precision"] == "fp32":
            self.forget_signs_of_rounding(differences, paths)
        return norm(differences.values()) / norm([each.detach() for each in expected.values()])

    def forget_signs_of_rounding(
        self, differences: dict[str, torch.Tensor], paths: list[Path]
    ) -> None:
        """Zero the differences that Lion makes where what it takes the sign of is only rounding.

        That is wherever the momentum is, as that of a key bias. Of other values few are that close
        to 0 in a step: at most `CLOSE_TO_0`, each changed by at most twice the rates of all steps.
        """
        momenta = [weights_by_zerolm(path, "exp_avg") for path in paths]
        values = sum(each.numel() for each in differences.values())
        scale = norm(momenta[1].values()) / values**0.5
        limit = 2.01 * sum(rows(self.directory / "straight", "train/learning_rate").values())
        close = 0
        for name in differences.keys() - momenta[0].keys():
            del differences[name]  # another name of a tied weight
        for name, difference in differences.items():
            changed = (difference.abs() > ROUNDING) & (difference.abs() <= limit)
            rounding = torch.stack([each[name].abs() for each in momenta]).amax(0) < 1e-5 * scale
            close += int((changed & ~rounding).sum())
            difference[changed] = 0
        if close > CLOSE_TO_0 * values:
            self.problems.append(f"{close} of {values} values of Lion have another sign")

    def compare_with_plain(self) -> dict[str, Any]:
        expected = plain.losses(self.draw, self.base)
        found = list(self.losses("straight").values())
        difference = max(abs(ours / one - 1) for ours, one in zip(found, expected, strict=True))
        if not difference <= LOSS[self.draw["precision"]]:
            self.problems.append(f"plain PyTorch: loss by {difference:.1e}: {found}, {expected}")
        return {"plain_loss": difference}


def multiplies_fp16() -> bool:
    """Return whether DeepSpeed takes this CPU for one that multiplies in fp16."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def weights_by_deepspeed(path: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)


def weights_by_zerolm(path: Path, state: str = MASTER) -> dict[str, torch.Tensor]:
    weights = Weights(path, json.loads((path / "MANIFEST.json").read_text()), state=state)
    return {name: weights[name] for name in weights.shapes}


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([each.double().norm() for each in tensors]).norm())


def refusals(output: str) -> list[str]:
    """Return the lines of a refusal, without what comes before their second colon: the paths."""
    lines = output.partition("refused, nothing was written.\n")[2].splitlines()
    found = [line.partition(": ")[2] for line in lines if line.endswith(".") and ": " in line]
    return sorted(set(found))


def last_error(output: str) -> str:
    lines = [line for line in output.splitlines() if "Error" in line or "error" in line]
    return (lines or output.splitlines() or ["no output"])[-1][:300]
