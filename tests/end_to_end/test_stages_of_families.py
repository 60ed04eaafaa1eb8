"""Two stages have the curve of a whole model on one rank, in fp8 too, also of families whose hidden
states or logits are unlike Llama's.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end import runs_in_one_process
from tests.end_to_end.test_stages import DEEP, STEPS, flags
from tests.launching import VOCABULARY, rows, write_json
from tests.model_families.toy_configs import toy_config

FP8 = ("--fp8",)
# {name: (model, bf16, flags)}
CASES = {
    "fp8": (DEEP, True, FP8),
    # States are float32 between the blocks, and so are logits of the second.
    "mamba": (toy_config("mamba"), True, ()),
    "nemotron_h": (toy_config("nemotron_h"), True, ()),
    # Its inner model has another name than its base_model_prefix.
    "llama4": (toy_config("llama4_text"), False, ()),
    # Four hidden states for each token.
    "qwen4_exp_text": (toy_config("qwen4_exp_text"), True, ()),
}


def figures(run: Path) -> np.ndarray:
    return np.array([[*rows(run, key).values()] for key in ("train/loss", "train/grad_norm")])


@pytest.mark.soak
def test_stages_have_the_curve_of_a_whole_model(tmp_path, corpus) -> None:
    """And save a checkpoint, for which logits are computed."""
    for stages in (1, 2):
        jobs = []
        for name, (model, bf16, more) in CASES.items():
            given = flags(tmp_path, corpus, f"{name}-{stages}", DEEP, 1, stages, *more, bf16=bf16)
            config = write_json(tmp_path / f"{name}.json", {**model, "vocab_size": VOCABULARY})
            given[given.index("--model_config") + 1] = config
            jobs.append({"flags": given})
        runs_in_one_process.launch(jobs, tmp_path, stages)
    for name, (_, bf16, _) in CASES.items():
        whole, divided = (figures(tmp_path / f"{name}-{stages}") for stages in (1, 2))
        apart = np.abs(whole / divided - 1).max(axis=1)
        print(f"{name}: losses {apart[0]:.1e}, norms {apart[1]:.1e}")
        assert whole.shape == (2, STEPS) and whole[0, 0] == divided[0, 0], name
        # The norm's summands have another order, so clipping rounds otherwise.
        assert apart[0] < (2e-4 if bf16 else 1e-7) and apart[1] < (1e-3 if bf16 else 1e-6), name
