"""`plan --search`: ranking, rejections with reasons, and a written profile that runs."""

import itertools
import json

import pytest

from launch import __main__
from tests.launching import ROOT, write_json, write_shards
from zerolm.parts.parse import parse_settings
from zerolm.preflight import check

LLAMA_7B = ROOT / "model_configs" / "llama-7b.json"
LLAMA_13B = ROOT / "model_configs" / "llama-13b.json"


def search(capsys, *words):
    code = __main__.main(["plan", "--search", "--json", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)


def test_profiles_that_do_not_fit_are_rejected_with_the_reason(capsys):
    """13B parameters: 6 bytes each do not fit one device, an eighth of them does."""
    _, found = search(capsys, "--model_config", LLAMA_13B, "--devices", 8)
    fitting = [one for one in found if one["rejected"] is None]
    rejected = {one["profile"]: one["rejected"] for one in found if one["rejected"]}
    assert fitting == found[: len(fitting)], "the usable ones are first"
    assert "too much on the device" in rejected["ZeRO-1"] and "gradients" in rejected["ZeRO-1"]
    assert all(one["figures"]["memory"]["fits"] for one in fitting)
    assert all(not one["figures"]["memory"]["fits"] for one in found[len(fitting) :])
    seconds = [one["figures"]["step_seconds"]["total"] for one in fitting]
    for before, after in itertools.pairwise(seconds):
        assert before < 1.05 * after, "fastest first, within the resolution of the estimate"
    batches = {one["figures"]["batch_tokens"] for one in found}
    assert len(batches) == 1, "every profile trains the same batch"


def test_a_7b_model_on_one_device_needs_offload(capsys):
    code, found = search(capsys, "--model_config", LLAMA_7B, "--devices", 1)
    fitting = [one["profile"] for one in found if one["rejected"] is None]
    assert code == 0 and fitting and all("on the host" in name for name in fitting)
    words = ["--model_config", LLAMA_7B, "--devices", 1, "--host_memory_bytes", "16e9"]
    code, found = search(capsys, *words)
    assert code == 2 and all(one["rejected"] for one in found)
    assert any("on the host, which exceeds a device's share" in one["rejected"] for one in found)


def test_zeropp_is_first_where_the_network_is_slow_and_absent_on_one_host(capsys):
    words = ["--model_config", LLAMA_7B, "--batch_tokens", 1 << 19, "--inter_node", "3e9"]
    _, found = search(capsys, *words, "--devices", 64)
    best = found[0]["ds_config"]["zero_optimization"]
    assert best["zero_quantized_weights"] and best["zero_hpz_partition_size"] == 8
    names = [one["profile"] for one in found if one["rejected"] is None]
    assert names.index("ZeRO-3 + hpZ over 8") < names.index("ZeRO-3")
    _, found = search(capsys, *words, "--devices", 8)
    assert not any("hpZ" in one["profile"] or "++" in one["profile"] for one in found)


def test_a_device_without_bf16_gets_fp16(capsys):
    tiny = ROOT / "model_configs" / "tiny.json"
    _, found = search(capsys, "--model_config", tiny, "--hardware", "V100")
    assert found[0]["ds_config"]["fp16"] == {"enabled": True}
    assert found[0]["figures"]["precision"] == "fp16"


@pytest.mark.parametrize("devices", [8, 1])
def test_pretrain_accepts_the_profile_that_is_written(devices, tmp_path, capsys):
    model = ROOT / "model_configs" / "llama-1.3b.json"
    ds = tmp_path / "best.json"
    words = ["--model_config", str(model), "--devices", str(devices), "--write", str(ds)]
    assert __main__.main(["plan", "--search", *words]) == 0
    output = capsys.readouterr().out
    assert "Tensor and sequence parallelism are not tried" in output
    (line,) = [line for line in output.splitlines() if line.startswith("wrote ")]
    flags = line.partition("for pretrain.py: ")[2].split()
    assert not parse_settings(flags)[1]
    data = write_shards(tmp_path / "shards")
    flags += ["--model_config", str(model), "--data", str(data), "--run_dir", str(tmp_path / "run")]
    flags += ["--world_size", str(devices), "--hardware", "H100"]
    check.check(["--check", *flags], {})


def test_search_refuses_a_given_profile():
    tiny = str(ROOT / "model_configs" / "tiny.json")
    ds = str(ROOT / "ds_configs" / "zero2.json")
    words = ["--model_config", tiny, "--deepspeed_config", ds]
    assert __main__.main(["plan", "--search", *words]) == 2


def test_divided_experts_are_tried_for_a_mixture_and_written_with_their_flag(capsys, tmp_path):
    """Nothing else is faster on one host, where a step has few tokens."""
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 32000,
        "hidden_size": 1024, "num_hidden_layers": 12, "head_dim": 64, "num_attention_heads": 16,
        "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1024, "intermediate_size": 1024, "max_position_embeddings": 2048,
    }  # fmt: skip
    words = [
        "--model_config", write_json(tmp_path / "model.json", config), "--devices", 8,
        "--batch_tokens", 1 << 14,
    ]  # fmt: skip
    _, found = search(capsys, *words)
    best = found[0]
    assert best["profile"] == "ZeRO-1 + experts over 8", [each["profile"] for each in found[:3]]
    assert best["figures"]["expert_parallel"] == 8
    ds = tmp_path / "best.json"
    assert __main__.main(["plan", "--search", *map(str, words), "--write", str(ds)]) == 0
    assert "--expert_parallel 8" in capsys.readouterr().out
    _, found = search(capsys, *words, "--expert_parallel", 4)
    assert {each["figures"]["expert_parallel"] for each in found if each["figures"]} == {4}
    assert {each["figures"]["zero_stage"] for each in found if each["figures"]} == {1, 2, 3}
