"""`python -m launch plan`: the figures of a plan, and its refusals."""

import argparse
import json
import math

import pytest

from launch import __main__
from launch.estimate import measured_hosts
from launch.estimate.flags import add_flags, hardware_of
from launch.estimate.reliability import daly_interval, interruptions
from tests import ROOT
from tests.launching import run_module, write_json
from zerolm.common.errors import ConfigError
from zerolm.common.provenance import installed_version
from zerolm.plan import hardware

PLACES = {"8 x H100": ("H100", 8), "64 x A100": ("A100-80GB", 64)}
GOLDEN = ROOT / "tests" / "launch" / "estimate" / "golden_plans.json"
# Tracing with other versions may move these a little, and with them times and prices.
TRACED = ("memory", "activations", "micro_batch_size")


def plan(*words):
    """Run the command in this process and return what it printed."""
    return __main__.main(["plan", *map(str, words)])


def plan_json(capsys, *words):
    assert plan("--json", *words) == 0
    return json.loads(capsys.readouterr().out)


def golden_words(model, place):
    name, devices = PLACES[place]
    # Relative, because the golden plans contain them.
    words = ["--model_config", model.relative_to(ROOT), "--hardware", name, "--devices", devices]
    return [*words, "--deepspeed_config", "ds_configs/zero2.json"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["llama-160m", "moe-1.6b", "llama-70b"])
def test_plans_are_those_of_the_golden_table(name, place, capsys):
    model = ROOT / "model_configs" / f"{name}.json"
    found = plan_json(capsys, *golden_words(model, place))
    table = json.loads(GOLDEN.read_text())
    golden, versions = table[f"{name}, {place}"], table["versions"]
    installed = {package: str(installed_version(package)).partition("+")[0] for package in versions}
    for key in golden:
        if isinstance(golden[key], (int, float)):
            tolerance = 1e-6 if installed == versions else 1e-4
            assert found[key] == pytest.approx(golden[key], rel=tolerance), key
        elif key in TRACED:
            assert found[key] == pytest.approx(golden[key], rel=0.02), key


def test_measuring_attention_logits_takes_flops(capsys):
    words = ["--model_config", "model_configs/llama-160m.json", "--seq_len", 1024]
    plain, clipped = (plan_json(capsys, *words, *more) for more in ([], ["--qk_clip", 100]))
    extra = clipped["hardware_flops_per_token"] - plain["hardware_flops_per_token"]
    config = json.loads((ROOT / "model_configs" / "llama-160m.json").read_text())
    queries = config["num_hidden_layers"] * config["hidden_size"]
    assert extra == queries * 1024  # 2 FLOPs for half of the keys
    assert clipped["flops_per_token"] == plain["flops_per_token"]
    assert clipped["tokens_per_second"] < plain["tokens_per_second"]
    assert plan("--model_config", "model_configs/qwen3-0.6b.json", "--qk_clip", 100) == 2
    assert "normalizes queries and keys (q_norm)" in capsys.readouterr().err


def test_a_plan_is_printed_by_a_process_of_its_own():
    words = golden_words(ROOT / "model_configs" / "llama-7b.json", "64 x A100")
    result = run_module("launch", "plan", *words, timeout=120)
    assert result.returncode == 0, result.stderr
    for part in (
        "6,738,415,616 parameters", "FLOPs per token", "gradients", "fp32 master weights",
        "ZeRO buckets", "logits and loss", "host memory", "tokens per second", "device-hours",
        "price", "/s read", "checkpoint", "interruptions", "Young/Daly",
    ):  # fmt: skip
        assert part in result.stdout


def text_of(capsys, model, profile, devices, *words):
    names = ["--model_config", f"model_configs/{model}.json", "--devices", devices, *words]
    assert plan(*names, "--deepspeed_config", f"ds_configs/{profile}.json") == 0
    return capsys.readouterr().out


def test_a_plan_names_what_no_benchmark_has_and_what_is_faster_on_many_devices(capsys):
    def small_steps(profile, devices):
        words = ["--batch_tokens", 8192 * devices, "--micro_batch_size", 4]
        return text_of(capsys, "llama-7b", profile, devices, *words)

    few, many = small_steps("zero3", 64), small_steps("zero3", 1024)
    assert "NO BENCHMARK" not in few and "note:" not in few
    assert "NO BENCHMARK of ZeRO-3 has more than 512 devices" in many
    (note,) = [line for line in many.splitlines() if line.startswith("note:")]
    assert "sharded over 1,024 devices" in note and "ZeRO-1, micro-batch" in note
    assert "hpZ over 8" in note
    first = small_steps("zero1", 1024)
    assert "more than 128 devices were within 8%" in first and "note:" not in first


def test_reserved_memory_beyond_the_device_is_named_but_fits(capsys):
    words = ["--gradient_checkpointing", "--micro_batch_size", 16]
    text = text_of(capsys, "llama-7b", "zero1", 8, *words)
    assert "fits, but is tight" in text and "expected reserved" in text
    text = text_of(capsys, "llama-7b", "zero3", 8, *words)
    assert text.count("fits") == 1 and "tight" not in text
    assert "hpZ's second weights" not in text
    assert "hpZ's second weights" in text_of(capsys, "llama-7b", "zeropp", 8, *words)


def test_offload_moves_memory_to_the_host_and_takes_time(capsys):
    words = golden_words(ROOT / "model_configs" / "llama-1.3b.json", "8 x H100")
    here = plan_json(capsys, *words)
    words[-1] = ROOT / "ds_configs" / "zero3_offload.json"
    there = plan_json(capsys, *words)
    assert here["memory"]["host"] == 0 and there["memory"]["optimizer"] == 0
    assert there["memory"]["host"] > 10 * here["parameters"] / 8
    assert there["step_seconds"]["offload"] > 0 and there["days"] > here["days"]


def test_a_chunked_loss_takes_less_memory_and_recomputes_the_head(capsys):
    words = golden_words(ROOT / "model_configs" / "qwen3-0.6b.json", "8 x H100")
    full = plan_json(capsys, *words, "--micro_batch_size", 8)
    chunked = plan_json(capsys, *words, "--micro_batch_size", 8, "--loss_chunk_tokens", 1024)
    head = 151936 * 1024
    assert full["memory"]["loss"] == 12 * 8 * 2048 * 151936
    assert chunked["memory"]["loss"] == 10 * 1024 * 151936 + 4 * head
    more = chunked["hardware_flops_per_token"] - full["hardware_flops_per_token"]
    assert more == 2 * head and chunked["step_seconds"]["compute"] > full["step_seconds"]["compute"]


def test_only_active_experts_count_as_flops(capsys):
    found = plan_json(
        capsys, *golden_words(ROOT / "model_configs" / "mixtral-tiny.json", "8 x H100")
    )
    assert found["active_parameters"] < found["parameters"]
    assert found["flops_per_token"] < 6 * found["parameters"]


def test_fp8_makes_only_the_matrices_faster_that_multiply_in_it(capsys):
    """Not those of routed experts, and no model without linear layers."""

    def compute(model, *flags):
        words = golden_words(ROOT / "model_configs" / f"{model}.json", "8 x H100")
        found = plan_json(capsys, *words, "--micro_batch_size", 1, *flags)
        return found["step_seconds"]["compute"]

    assert compute("llama-7b", "--fp8") < 0.7 * compute("llama-7b")
    assert 0.9 * compute("moe-1.6b") < compute("moe-1.6b", "--fp8") < compute("moe-1.6b")
    words = golden_words(ROOT / "model_configs" / "gpt2.json", "8 x H100")
    assert plan(*words, "--fp8") == 2
    assert "gpt2 has no linear layers" in capsys.readouterr().err


def test_gradient_checkpointing_costs_a_forward_pass(capsys):
    words = golden_words(ROOT / "model_configs" / "llama-7b.json", "64 x A100")
    plain = plan_json(capsys, *words)
    recomputed = plan_json(capsys, *words, "--gradient_checkpointing")
    ratio = recomputed["hardware_flops_per_token"] / plain["hardware_flops_per_token"]
    assert 1.30 < ratio < 4 / 3
    assert recomputed["activations"] == pytest.approx(
        {
            key: value * recomputed["micro_batch_size"] / plain["micro_batch_size"]
            for key, value in plain["activations"].items()
        }
    )


def test_a_moving_average_costs_memory_and_space_in_checkpoints(capsys):
    words = golden_words(ROOT / "model_configs" / "llama-7b.json", "64 x A100")
    plain, averaged = (plan_json(capsys, *words, *more) for more in ([], ["--ema_tokens", "1B"]))
    grown = averaged["memory"]["optimizer"] - plain["memory"]["optimizer"]
    assert grown == pytest.approx(4 * plain["parameters"] / 64, rel=0.01)
    grown = averaged["checkpoint_bytes"] - plain["checkpoint_bytes"]
    assert grown == 4 * plain["parameters"]


def with_form(tmp_path, stage, **form):
    """Write the JSON of a ZeRO stage with a form of parallelism in it."""
    path = tmp_path / f"{next(iter(form))}.json"
    profile = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    path.write_text(json.dumps(profile | form))
    return path


def test_devices_of_a_replica_hold_only_their_shard(capsys, tmp_path):
    """Four devices per replica; expected values are computed by hand."""
    words = golden_words(ROOT / "model_configs" / "llama-7b.json", "8 x H100")
    words += ["--micro_batch_size", 1, "--batch_tokens", 1 << 20]
    plain = plan_json(capsys, *words)
    words[5] = 16
    words[7] = with_form(tmp_path, 1, tensor_parallel={"autotp_size": 4})
    tensor = plan_json(capsys, *words)
    words[7] = with_form(tmp_path, 2, sequence_parallel_size=4)
    sequence = plan_json(capsys, *words)
    layers, hidden, vocabulary, total = 32, 4096, 32000, plain["parameters"]
    unsharded = vocabulary * hidden + (2 * layers + 1) * hidden  # the embedding and the norms
    assert tensor["memory"]["weights"] == 2 * (unsharded + (total - unsharded) // 4)
    assert tensor["memory"]["master"] == pytest.approx(
        4 * (unsharded + (total - unsharded) / 4) / 4
    )
    assert sequence["memory"]["weights"] == 2 * total
    assert sequence["memory"]["master"] == pytest.approx(4 * total / 16)
    for found in (tensor, sequence):
        assert found["accumulation"] == (1 << 20) // 2048 // 4
        assert found["step_seconds"]["compute"] == pytest.approx(
            plain["step_seconds"]["compute"] / 2
        )
    assert sequence["activations"]["without_checkpointing"] == pytest.approx(
        plain["activations"]["without_checkpointing"] / 4, rel=0.01
    )
    # With checkpointing mostly layer inputs are kept, which every device has in full.
    checkpointed = tensor["activations"]["with_checkpointing"]
    assert checkpointed == pytest.approx(plain["activations"]["with_checkpointing"], rel=0.1)
    # Per layer 2 all-reduces of (tokens, hidden) forward and 5 backward, and the head's.
    moved = 2048 * 2 * 3 / 4 * (2 * (7 * layers + 1) * hidden + 2 * vocabulary)
    least = moved * tensor["accumulation"] / hardware.load("H100", {}).intra_node
    assert least < tensor["step_seconds"]["exposed"] < 2 * least
    # All-to-all of q, k, v and the output, for a quarter of the tokens, forward and backward.
    moved = 2048 / 4 * 2 * 3 / 4 * 8 * layers * hidden
    least = moved * tensor["accumulation"] / hardware.load("H100", {}).intra_node
    assert sequence["step_seconds"]["exposed"] > least


def test_groups_send_only_a_shard_between_hosts_and_hold_the_states_of_a_host(capsys):
    """Expected values are computed by hand."""
    words = golden_words(ROOT / "model_configs" / "llama-7b.json", "8 x H100")
    words += ["--micro_batch_size", 1, "--batch_tokens", 1 << 20]
    words[5], words[7] = 64, ROOT / "ds_configs" / "zero1.json"
    plain, grouped = (plan_json(capsys, *words, *more) for more in ([], ["--shard_within", 8]))
    total, device = plain["parameters"], hardware.load("H100", {})
    waits = (each["checkpoint_stall_seconds"] for each in (grouped, plain))
    assert next(waits) == pytest.approx(8 * next(waits)), "one group copies the states"
    assert grouped["memory"]["master"] == pytest.approx(4 * total / 8)
    assert plain["memory"]["master"] == pytest.approx(4 * total / 64)
    inside = (4 + 2) * total * 7 / 8 / device.intra_node
    between = 2 * 4 * total / 8 * 7 / 8 / device.inter_node
    sent, usually = (each["step_seconds"]["communication"] for each in (grouped, plain))
    assert sent == pytest.approx((inside + between) / 0.8, rel=0.02), "and little latency"
    # The usual bytes pass through the links of a host, eight of them together.
    usual = (4 + 2) * total * 63 / 64 / min(device.intra_node, 8 * device.inter_node)
    hops = 63 * 1e-5 * (math.ceil(total / 5e7) + 2 * 64)  # of a call for each bucket and part
    assert usually == pytest.approx(usual / 0.8 + hops, rel=0.02)


def test_parallelism_that_pretrain_refuses_has_no_plan(capsys, tmp_path):
    tensor = with_form(tmp_path, 1, tensor_parallel={"autotp_size": 4})
    sequence = with_form(tmp_path, 2, sequence_parallel_size=3)
    for model, ds, part in (
        ("mixtral-8x7b", tensor, "not supported for mixtral"),
        ("llama-7b", sequence, "must divide the world size 8"),
    ):
        path = ROOT / "model_configs" / f"{model}.json"
        assert plan("--model_config", path, "--deepspeed_config", ds) == 2
        assert part in capsys.readouterr().err


def test_flags_and_files_replace_figures_of_a_device(capsys, tmp_path):
    words = golden_words(ROOT / "model_configs" / "llama-160m.json", "8 x H100")
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"devices": {"ours": {"like": "H100", "price_per_hour": 1}}}))
    usual = plan_json(capsys, *words)
    words[3] = own
    cheap = plan_json(capsys, *words)
    assert cheap["price"] == pytest.approx(usual["price"] / 2.99)
    dear = plan_json(capsys, *words, "--price_per_hour", 10)
    assert dear["price"] == pytest.approx(10 * cheap["price"])
    fixed = plan_json(capsys, *words, "--mfu", 0.25)
    assert fixed["mfu"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--hardware", "H1000"], "no such device"),
        (["--devices", "12"], "must be a multiple of --devices_per_node 8"),
        (["--micro_batch_size", "0"], "must be at least 1"),
        (["--write", "ds.json"], "needs --search"),
        (["--hardware", "V100", "--precision", "bf16"], "bf16 is not supported by V100"),
        (["--hardware", "MI300X", "--fp8"], "--fp8: not supported on MI300X"),
        (["--batch_tokens", "1000"], "must be a multiple of --seq_len"),
    ],
)
def test_refusals_name_the_flag_and_the_fix(words, part, capsys):
    model = ROOT / "model_configs" / "tiny.json"
    ds = ROOT / "ds_configs" / "zero2.json"
    assert plan("--model_config", model, "--deepspeed_config", ds, *words) == 2
    error = capsys.readouterr().err
    assert part in error and "Traceback" not in error


def test_every_device_has_sources_and_a_dated_price():
    devices = hardware.devices_of(hardware.FILE)
    assert {"A100-40GB", "A100-80GB", "H100", "H200", "B200", "A10G", "L4", "MI300X", "V100"} <= (
        set(devices)
    )
    for one in devices.values():
        assert one.source and one.price_source and one.price_date
    assert hardware.recognize("NVIDIA H100 80GB HBM3").name == "H100"
    assert hardware.recognize("NVIDIA A100-SXM4-40GB").name == "A100-40GB"
    assert hardware.recognize("a CPU") is None


def test_the_checkpoint_interval_has_the_least_expected_time():
    """Daly's interval against a search over the exact expected time (Daly 2006, equation 20)."""
    stall, mean = 60.0, 24 * 3600.0

    def wall(interval):
        return mean * (math.exp((interval + stall) / mean) - 1) / interval

    best = min(range(100, 20_000, 10), key=wall)
    assert daly_interval(stall, mean) == pytest.approx(best, rel=0.01)


def test_interruptions_match_those_reported_for_llama_3():
    rate = hardware.assumed()["failures_per_device_hour"]
    found = interruptions(54 * 86400, 16_384, rate, 10, 60, 600)
    assert found.expected == pytest.approx(466, rel=0.01)
    assert found.mean_seconds == pytest.approx(54 * 86400 / 466, rel=0.01)


def test_a_plan_has_the_ranks_that_the_launcher_would_start(tmp_path, monkeypatch, capsys) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=4\ntwo slots=4\nthree slots=4\n")

    def planned(*flags: object) -> tuple[int, int]:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        arguments = parser.parse_args([str(flag) for flag in flags])
        hardware_of(arguments)
        return arguments.devices, arguments.devices_per_node

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert planned() == (8, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert planned() == (3, 3)
    assert "note: 3 device(s), as CUDA_VISIBLE_DEVICES says" in capsys.readouterr().err
    assert planned("--devices", 16) == (16, 8) and planned("--hardware", "cpu") == (1, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-12")
    assert planned() == (8, 8)
    assert planned("--num_gpus", 2) == (2, 2) and planned("--num_nodes", 3) == (24, 8)
    assert planned("--hostfile", hosts) == (12, 4)
    assert planned("--hostfile", hosts, "--num_nodes", 2, "--num_gpus", 3) == (6, 3)
    assert planned("--hostfile", hosts, "--exclude", "one@two:0") == (7, 4)
    with pytest.raises(ConfigError, match=r"--devices: 8, but .* start 12 ranks"):
        planned("--hostfile", hosts, "--devices", 8)


def test_a_plan_takes_devices_and_links_as_the_doctor_has_measured_them(tmp_path) -> None:
    path, hosts = tmp_path / "measured.json", tmp_path / "hosts"
    found = {"hardware": "H200", "devices": 16, "devices_per_node": 4, "inter_node": 3e9}
    line = measured_hosts.write(path, {**found, "hosts": ["one"], "date": "2026-11-29"})
    assert line.endswith(f"zerolm plan --search --measured {path}")

    def planned(*flags: object) -> tuple[str, int, int, float]:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        arguments = parser.parse_args(["--measured", str(path), *map(str, flags)])
        device = hardware_of(arguments)
        place = arguments.devices, arguments.devices_per_node
        return device.name, *place, device.inter_node

    assert planned() == ("H200", 16, 4, 3e9)
    assert planned("--devices", 64, "--inter_node", "5e9") == ("H200", 64, 4, 5e9)
    assert planned("--hardware", "A100")[:2] == ("A100-80GB", 16)
    hosts.write_text("one slots=8\ntwo slots=8\nthree slots=8\n")
    assert planned("--hostfile", hosts) == ("H200", 24, 8, 3e9)
    write_json(path, {**found, "inter_node": -1.0, "hosts": [], "date": ""})
    with pytest.raises(ConfigError, match=r"measured.json: inter_node: -1.0 must be above 0"):
        planned()
    write_json(path, {**found, "devices": "many", "hosts": [], "date": ""})
    with pytest.raises(ConfigError, match=r"measured.json: devices"):
        planned()
    path.unlink()
    with pytest.raises(ConfigError, match=r"--measured: .*no such file. Write it again: zerolm"):
        planned()
