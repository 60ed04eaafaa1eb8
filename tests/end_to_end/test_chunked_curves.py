"""The chunked loss gives the curve of the unchunked one, at every ZeRO stage."""

import json

import numpy as np
import pytest

from tests.end_to_end.recipe import profile, recipe
from tests.launching import LLAMA, VOCABULARY, rows, run_ranks, write_json

STEPS = 20
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
MODELS = {
    "llama": LLAMA,
    "tied gpt2": {
        "model_type": "gpt2", **SIZES, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": True,
    },
    "mixtral": {
        **LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.02,
    },
}  # fmt: skip
CASES = [  # model, stage, precision, gradient checkpointing
    ("tied gpt2", 3, "fp32", True),
    ("tied gpt2", 2, "bf16", False),
    ("llama", 1, "fp32", True),
    ("llama", 2, "autocast", False),
    ("llama", 3, "autocast", True),
    ("llama", 3, "bf16", False),
    ("mixtral", 2, "fp32", False),
    ("mixtral", 3, "bf16", True),
]
# float32: sums in another order. 16 bits: a weight's gradient is rounded once per chunk.
TOLERANCES = {"fp32": (1e-6, 1e-5), "bf16": (1e-3, 1e-2), "autocast": (1e-3, 1e-2)}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "stage", "precision", "checkpointing"), CASES)
def test_chunks_change_the_curve_by_rounding_only(
    tmp_path, corpus, held_out, name, stage, precision, checkpointing
) -> None:
    ds = profile(tmp_path / "ds.json", stage, precision == "bf16")
    if precision == "autocast":
        autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        ds = write_json(ds, json.loads(ds.read_text()) | autocast)
    model = write_json(tmp_path / "model.json", MODELS[name])
    found = []
    for chunk in (0, 24):  # of 64 tokens: the last chunk is smaller
        run = tmp_path / f"run-{chunk}"
        flags = [*recipe(model, corpus, run, ds, STEPS, micro=2), "--val_data", held_out]
        flags += ["--eval_interval", STEPS, "--loss_chunk_tokens", chunk, "--wandb", "off"]
        flags += ["--gradient_checkpointing"] if checkpointing else []
        done = run_ranks(2, *flags)
        assert done.returncode == 0, done.stdout[-4000:]
        keys = ("train/loss", "train/grad_norm", "eval/loss")
        found.append([np.array(list(rows(run, key).values())) for key in keys])
    losses, norms, held = (np.abs(b / a - 1).max() for a, b in zip(*found, strict=True))
    print(f"{name}, ZeRO-{stage}, {precision}: {losses:.1e} {norms:.1e} {held:.1e}")
    assert len(found[0][0]) == STEPS and found[0][0][0] - found[0][0][-1] > 0.1
    loss_tolerance, norm_tolerance = TOLERANCES[precision]
    assert max(losses, held) < loss_tolerance and norms < norm_tolerance
