"""`plan --probe`: real steps through the real launcher, compared with the prediction."""

import json
from pathlib import Path

import pytest

from launch.estimate.probe import _prepare
from tests.launching import LLAMA, ROOT, run_module, write_json
from zerolm.model.model import Model
from zerolm.parts.parse import parse_settings

DS = ROOT / "ds_configs" / "zero2.json"


def probe(tmp_path, *words, **more):
    model = write_json(tmp_path / "model.json", {**LLAMA, **more})
    command = ["plan", "--probe", "--model_config", model, "--seq_len", 32]
    command += ["--micro_batch_size", 2, *words]
    return run_module("launch", *command, TMPDIR=str(tmp_path))


@pytest.mark.soak
def test_a_probe_agrees_with_the_prediction_and_plans_with_it(tmp_path):
    result = probe(tmp_path, "--deepspeed_config", str(DS), "--probe_ranks", "2", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    measured = found["probe"]
    for name, predicted in measured["predicted"].items():
        assert predicted == pytest.approx(measured["counted"][name], rel=0.01), name
    assert measured["predicted_checkpoint_bytes"] == pytest.approx(
        measured["checkpoint_bytes"], rel=0.25
    )
    assert measured["step_seconds"] > 0 and measured["ranks"] == 2
    assert measured["memory_ratio"] == pytest.approx(1, rel=0.01)
    assert found["plan"]["hardware"] == "H100" and found["plan"]["memory"]["fits"]
    assert not list(Path(tmp_path).glob("zerolm-probe-*"))


def test_a_probe_runs_with_the_flags_of_the_plan(tmp_path):
    given = ["--compile", "--fp8", "--loss_chunk_tokens=64", "--precision=bf16", "--qk_clip=30.0"]
    given += ["--ema_tokens=4096"]
    settings, problems = parse_settings(given)
    assert problems == []
    path = write_json(tmp_path / "model.json", LLAMA)
    flags = _prepare(Model.load(str(path)), settings, str(DS), 1, tmp_path)
    assert set(" ".join(given).replace("=", " ").split()) <= set(flags)


def test_a_failed_probe_is_an_error_without_a_traceback(tmp_path):
    result = probe(tmp_path, "--deepspeed_config", str(DS), num_attention_heads=5)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
