"""Each optimizer at each ZeRO stage has plain PyTorch's curve, and resumes bit for bit."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.end_to_end import plain_optimizers, plain_pytorch, runs_in_one_process, step_comparison
from tests.end_to_end.killed_runs import stopped_and_resumed
from tests.end_to_end.recipe import (
    CLIPPING,
    PEAK,
    STEPS,
    WARMUP_TOKENS,
    recipe,
)
from tests.launching import LLAMA, rows, write_json

STOP, MICRO = 9, 2  # accumulation 2 on two ranks
MUON_RATE = 0.02


class Case(NamedTuple):
    """An optimizer with a profile, and the tolerance of its losses.

    Attributes:
        tolerance: relative difference of losses from plain PyTorch's.
        by_step: also compare each step, starting from the run's weights.
        exact: run Newton-Schulz in float32, as on machines that do not multiply in fp16.
    """

    optimizer: dict[str, Any]
    stage: int
    bf16: bool = False
    offload: bool = False
    tolerance: float = 1e-6
    by_step: bool = False
    exact: bool = False

    @property
    def name(self) -> str:
        kind = self.optimizer["type"].rpartition(".")[2]
        parts = [kind, str(self.stage), "bf16" if self.bf16 else "fp32"]
        options = [name for name in ("offload", "exact") if getattr(self, name)]
        return "-".join([*parts, *options])

    def reference(self):
        return {
            "Muon": plain_optimizers.muon(MUON_RATE / PEAK),
            "Lion": plain_optimizers.lion,
            OWN["type"]: plain_optimizers.rmsprop(OWN["params"]["scale"]),
        }.get(self.optimizer["type"], plain_pytorch.adamw)

    def profile(self, path: Path) -> Path:
        zero: dict[str, Any] = {"stage": self.stage, "reduce_scatter": self.stage != 3}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        return write_json(
            path,
            {
                "zero_optimization": zero,
                "bf16": {"enabled": self.bf16},
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "fp32",
                "gradient_clipping": self.clipping,
                "optimizer": self.optimizer,
                "zero_allow_untested_optimizer": True,
            },
        )

    @property
    def clipping(self) -> float:
        return 0.0 if self.optimizer["type"] == "Muon" else CLIPPING


ADAMW = {"type": "AdamW"}
MUON = {"type": "Muon", "params": {"muon_lr": MUON_RATE}}
LION = {"type": "Lion"}
OWN = {"type": "tests.end_to_end.own_optimizer.ScaledGradient", "params": {"scale": 0.6}}
# Changing only the rounding of plain PyTorch changes its own losses this much (test_rounding.py):
# Newton-Schulz in fp16 by 3.0e-5; rounding the weights changes Lion's by 2.7e-4, because one value
# in the fifth step has the other sign. Compared one at a time, steps are exact.
FP16, SIGN, BF16 = 1e-4, 5e-4, 5e-3
MATRICES = 2e-5  # Newton-Schulz in float32, which multiplies small singular values by 485
KEYS = ("train/loss", "train/grad_norm", "train/param_norm")
EXACT = {"exact": True, "by_step": True}
FAMILIES = {
    "own": [Case(OWN, stage) for stage in (1, 2, 3)],
    "AdamW": [Case(ADAMW, stage, offload=True) for stage in (2, 3)],  # test_parity.py has the rest
    "Muon": [
        *(Case(MUON, stage, bf16, tolerance=BF16 if bf16 else FP16)
          for stage in (1, 2, 3) for bf16 in (False, True)),
        *(Case(MUON, stage, offload=True, tolerance=FP16) for stage in (2, 3)),
        *(Case(MUON, stage, **EXACT) for stage in (1, 2, 3)),
        *(Case(MUON, stage, offload=True, **EXACT) for stage in (2, 3)),
    ],
    "Lion": [Case(LION, stage, offload=True, tolerance=SIGN, by_step=True) for stage in (1, 2, 3)],
}  # fmt: skip


def arguments(case: Case, run_dir: Path, llama: Path, corpus: Path, json_file: Path) -> list[Any]:
    flags = recipe(llama, corpus, run_dir, json_file, STEPS, MICRO)
    flags += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    flags += ["--checkpoint_interval", 1000, "--spike_threshold", 0]
    return flags


@pytest.mark.soak  # always: tests/zerolm/optim, AdamW in test_parity.py
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", FAMILIES)
def test_curves_equal_plain_pytorch_and_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path, llama, corpus, family
) -> None:
    jobs, cases, wrong = [], FAMILIES[family], []
    for case in cases:
        json_file = case.profile(tmp_path / f"{case.name}.json")
        uninterrupted, resumed = (
            tmp_path / f"{case.name}-{how}" for how in ("uninterrupted", "resumed")
        )
        more: dict[str, Any] = {"exact": case.exact}
        if case.by_step:
            more["weights"] = tmp_path / f"{case.name}-weights"
            more["weights"].mkdir()
        jobs.append({"flags": arguments(case, uninterrupted, llama, corpus, json_file), **more})
        if not case.exact:
            first = {"flags": arguments(case, resumed, llama, corpus, json_file), **more}
            jobs += stopped_and_resumed(first, STOP)
    output = runs_in_one_process.launch(jobs, tmp_path)
    for case in cases:
        uninterrupted, resumed = (
            tmp_path / f"{case.name}-{how}" for how in ("uninterrupted", "resumed")
        )
        run_dir = resumed if resumed.exists() else uninterrupted
        wrong += curve_problems(case, run_dir, corpus)
        if case.by_step:
            weights = tmp_path / f"{case.name}-weights"
            wrong += step_problems(case, weights, run_dir, corpus)
        for key in KEYS if resumed.exists() else ():
            if rows(uninterrupted, key) != rows(resumed, key):
                wrong.append(f"{case.name}: {key} of the resumed run differs")
    assert not wrong, "\n".join(wrong) + output[-3000:]
    if any(case.optimizer is MUON for case in cases):
        assert "Muon: 14 matrix tensors with 73,728 values; AdamW: the 7 other tensors" in output


def plain_curve(case: Case, corpus: Path, optimizer_of: Any = None) -> list[plain_pytorch.Step]:
    return plain_pytorch.train(
        LLAMA, corpus, steps=STEPS, clipping=case.clipping, bf16=case.bf16,
        optimizer_of=optimizer_of or case.reference(),
    )  # fmt: skip


def step_problems(case: Case, weights: Path, run_dir: Path, corpus: Path) -> list[str]:
    """Return the differences of a run's steps from plain PyTorch's, started at its weights."""
    follower = step_comparison.RunFollower(case.reference(), weights)
    curve = plain_curve(case, corpus, follower)
    found = np.array(list(rows(run_dir, "train/loss").values()))
    loss = float(np.abs(found / np.array([step.loss for step in curve]) - 1).max())
    steps = follower.steps
    max_value = max(step.max_value for step in steps)
    num_flips = max(step.num_sign_flips for step in steps)
    num_certain = max(step.num_certain_flips for step in steps)
    matrices = max(max(v for k, v in step.updates.items() if "_proj" in k) for step in steps)
    print(
        f"{case.name}: each step from the run's weights: losses at most {loss:.1e} from plain "
        f"PyTorch, updates of matrices {matrices:.1e}, values {max_value:.1e}; signs {num_flips}"
    )
    if case.optimizer is LION:  # a value of about 1 is rounded to 1.2e-7
        equal = max_value <= 1.2e-7 and not num_certain
    else:
        equal = matrices <= MATRICES
    return [] if equal and loss <= 1e-6 else [f"{case.name}: its steps differ: {steps}"]


def curve_problems(case: Case, run_dir: Path, corpus: Path) -> list[str]:
    """Return the differences of a run's curve from plain PyTorch's."""
    curve = plain_curve(case, corpus)
    expected = np.array([step.loss for step in curve])
    found = np.array(list(rows(run_dir, "train/loss").values()))
    assert len(found) == STEPS and expected[0] - expected[-1] > 0.1, case.name
    difference = float(np.abs(found / expected - 1).max())
    print(f"{case.name}: losses at most {difference:.1e} from plain PyTorch")
    wrong = []
    if difference > case.tolerance:
        wrong.append(f"{case.name}: losses {difference:.1e} from plain PyTorch")
    return wrong
