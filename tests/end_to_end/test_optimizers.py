"""Each optimizer under each ZeRO stage learns plain PyTorch's curve, and resumes to the bit."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plain_optimizers
import plain_pytorch
import pytest
import several_runs
import test_mixtures_of_experts as experts
from recipe import BATCH, CLIPPING, MINIMUM, PEAK, SEED, SEQ_LEN, STEP_TOKENS, recipe

from tests.launching import LLAMA, rows, write_json

STEPS, STOP, MICRO = 20, 9, 2  # accumulation 2 on two ranks
WARMUP_TOKENS = 4 * STEP_TOKENS
MUON_RATE = 0.02


class Case(NamedTuple):
    """An optimizer under a profile, and how far its losses may be from plain PyTorch's."""

    optimizer: dict[str, Any]
    stage: int
    bf16: bool = False
    offload: bool = False
    tolerance: float = 1e-5
    adaptive_clip: float = 0.0
    steps: int = STEPS
    stop: int = STOP

    @property
    def name(self) -> str:
        kind = "ZClip" if self.adaptive_clip else self.optimizer["type"]
        words = [kind, str(self.stage), "bf16" if self.bf16 else "fp32"]
        return "-".join([*words, "offload"] if self.offload else words)

    def reference(self):
        return {"Muon": plain_optimizers.muon(MUON_RATE / PEAK), "Lion": plain_optimizers.lion}.get(
            self.optimizer["type"], plain_pytorch.adamw
        )

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
            },
        )

    @property
    def clipping(self) -> float:
        return 0.0 if self.optimizer["type"] == "Muon" or self.adaptive_clip else CLIPPING


ADAMW = {"type": "AdamW"}
MUON = {"type": "Muon", "params": {"muon_lr": MUON_RATE}}
LION = {"type": "Lion"}
BF16 = 5e-3
KEYS = ("train/loss", "train/grad_norm", "train/clip_norm", "train/param_norm")
ZCLIP = {"adaptive_clip": 0.8, "steps": 44, "stop": 33}  # it begins after 25 steps
SHORT = {"steps": 34, "stop": 29}
FAMILIES = {
    "always": [Case(MUON, 3, tolerance=1e-4), Case(ADAMW, 2, **ZCLIP | SHORT)],
    "AdamW": [Case(ADAMW, stage, offload=True) for stage in (2, 3)],  # test_parity.py has the rest
    "Muon": [
        *(Case(MUON, stage, bf16, tolerance=BF16 if bf16 else 1e-4)
          for stage in (1, 2, 3) for bf16 in (False, True)),
        *(Case(MUON, stage, offload=True, tolerance=1e-4) for stage in (2, 3)),
    ],
    "Lion": [Case(LION, stage, offload=True, tolerance=1e-3) for stage in (1, 2, 3)],
    "ZClip": [
        Case(ADAMW, 1, bf16=True, tolerance=BF16, **ZCLIP),
        Case(ADAMW, 2, **ZCLIP),
        Case(ADAMW, 2, offload=True, **ZCLIP),
        Case(ADAMW, 3, bf16=True, tolerance=BF16, **ZCLIP),
    ],
}  # fmt: skip


def arguments(case: Case, run_dir: Path, llama: Path, corpus: Path, json_file: Path) -> list[Any]:
    words = recipe(llama, corpus, run_dir, json_file, case.steps, MICRO)
    words += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    words += ["--report_interval", 0, "--checkpoint_interval", 1000, "--spike_threshold", 0]
    return [*words, "--adaptive_clip", case.adaptive_clip]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "always" else pytest.mark.soak) for name in FAMILIES],
)
def test_curves_equal_plain_pytorch_and_a_resume_is_exact(tmp_path, llama, corpus, family) -> None:
    jobs, cases, wrong = [], FAMILIES[family], []
    for case in cases:
        json_file = case.profile(tmp_path / f"{case.name}.json")
        whole, cut = (tmp_path / f"{case.name}-{how}" for how in ("whole", "cut"))
        if family != "always":
            jobs.append({"words": arguments(case, whole, llama, corpus, json_file)})
        jobs.append({"words": arguments(case, cut, llama, corpus, json_file), "until": case.stop})
        jobs.append({"words": arguments(case, cut, llama, corpus, json_file)})
    if family == "always":  # in this launch: another would take as long again
        jobs.append(experts.job(tmp_path, corpus, "mixtral", 3, False))
    said = several_runs.launch(jobs, tmp_path)
    if family == "always":
        curve = experts.plain_curve("mixtral", corpus)
        wrong += experts.differences(tmp_path / jobs[-1]["name"], curve, 1e-5)
    for case in cases:
        whole, cut = (tmp_path / f"{case.name}-{how}" for how in ("whole", "cut"))
        wrong += compared(case, cut, corpus)
        for key in KEYS if family != "always" else ():
            if rows(whole, key) != rows(cut, key):
                wrong.append(f"{case.name}: {key} of the resumed run differs")
    assert not wrong, "\n".join(wrong) + said[-3000:]
    if any(case.optimizer is MUON for case in cases):
        assert "Muon: 14 tensors of matrices with 73,728 values; AdamW: the 7 others" in said


def compared(case: Case, run_dir: Path, corpus: Path) -> list[str]:
    """Return what tells a run from plain PyTorch."""
    curve = plain_pytorch.train(
        LLAMA, corpus, seed=SEED, seq_len=SEQ_LEN, batch_sequences=BATCH, micro_batch_size=MICRO,
        steps=case.steps, peak=PEAK, minimum=MINIMUM, warmup_tokens=WARMUP_TOKENS,
        clipping=case.clipping, bf16=case.bf16, optimizer_of=case.reference(),
        adaptive_clip=case.adaptive_clip,
    )  # fmt: skip
    expected = np.array([step.loss for step in curve])
    found = np.array(list(rows(run_dir, "train/loss").values()))
    assert len(found) == case.steps and expected[0] - expected[-1] > 0.1, case.name
    most = float(np.abs(found / expected - 1).max())
    print(f"{case.name}: losses at most {most:.1e} from plain PyTorch")
    wrong = [f"{case.name}: losses {most:.1e} from plain PyTorch"] if most > case.tolerance else []
    if case.adaptive_clip:
        bounds = {step: one.clipped_to for step, one in enumerate(curve, 1)
                  if np.isfinite(one.clipped_to)}  # fmt: skip
        seen = rows(run_dir, "train/clip_norm")
        assert min(bounds) > 25 and min(bounds) <= case.stop < max(bounds), bounds
        off = max(abs(seen.get(step, 0.0) / bound - 1) for step, bound in bounds.items())
        print(f"{case.name}: clipped in steps {list(bounds)}, bounds at most {off:.1e} away")
        if list(seen) != list(bounds) or off > 20 * case.tolerance:
            wrong.append(f"{case.name}: clipped to {seen}, plain PyTorch to {bounds}")
    return wrong
