"""An exported model has the logits of the engine that trained it, bit for bit."""

import json
import resource
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.end_to_end.recipe import STEP_TOKENS, profile, recipe
from tests.launching import LLAMA, VOCABULARY, run_module, run_ranks, write_json
from zerolm.__main__ import main
from zerolm.common.errors import CheckpointError
from zerolm.export.export import export

SHARD_BYTES = 100_000
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt2": {**SMALL, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "mixtral": {
        **SMALL, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 48, "num_local_experts": 4, "num_key_value_heads": 2,
        "output_router_logits": True,
    },
}  # fmt: skip
COMBINATIONS = [
    pytest.param(model, stage, precision, id=f"{model}-{stage}-{precision}")
    for model in MODELS for stage in (2, 3) for precision in ("fp32", "bf16")
]  # fmt: skip


def logits_of(directory: Path, saved: dict) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        found = model(input_ids=torch.tensor([saved["input_ids"]])).logits[0].float()
    return found[saved["positions"]][:, saved["token_ids"]]


@pytest.mark.soak  # always: tests/zerolm/export/test_weights.py
@pytest.mark.parametrize(("model", "stage", "precision"), COMBINATIONS)
def test_an_export_has_the_logits_of_the_engine(
    tmp_path, corpus, model, stage, precision, capsys
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "model"
    config = write_json(tmp_path / "model.json", MODELS[model])
    json_file = profile(tmp_path / "ds.json", stage, precision == "bf16")
    flags = recipe(config, corpus, run_dir, json_file, steps=6, micro=2)
    done = run_ranks(2, *flags, "--wandb", "off")
    assert done.returncode == 0, done.stdout[-4000:]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SHARD_BYTES, limits[1]))
    try:
        code = main(["export", str(run_dir), str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    errors = capsys.readouterr().err
    assert code == 1 and "Traceback" not in errors, errors
    assert f"{out}: nothing was exported: " in errors and "File too large" in errors
    exported = run_module("zerolm", "export", run_dir, out, "--max_shard_size", SHARD_BYTES)
    assert exported.returncode == 0, exported.stderr
    assert "are bit-identical" in exported.stdout
    [checkpoint] = (run_dir / "checkpoints").glob("step-*")
    saved = json.loads((checkpoint / "MANIFEST.json").read_text())["probe"]["logits"]
    engine = torch.tensor(saved["values"])
    assert len(saved["input_ids"]) == 32 and engine.shape == (8, 16)
    assert torch.equal(logits_of(out, saved), engine), "not the engine's logits"

    fp32 = run_module("zerolm", "export", run_dir, tmp_path / "fp32", "--precision", "fp32")
    assert fp32.returncode == 0, fp32.stderr
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").state_dict()
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    assert main(["export", str(run_dir), str(out)]) == 2, "an existing directory is kept"
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1 and (out / "model.safetensors.index.json").is_file()
    card = ModelCard.load(out / "README.md")
    assert (
        card.data.to_dict()["library_name"] == "transformers"
        and f"{6 * STEP_TOKENS:,} tokens" in card.text
    )
    assert (out / "loss.png").is_file()
    assert not list(tmp_path.glob("*.tmp"))

    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["probe"]["logits"]["values"][3][5] += 0.5
    with pytest.raises(CheckpointError, match="not the trained model"):
        export(checkpoint, manifest, tmp_path / "other", None, None, None, lambda _: {})
    assert not list(tmp_path.glob("other*"))
