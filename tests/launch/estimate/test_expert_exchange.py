"""The seconds that divided experts need against closed forms, and when they beat ZeRO-3."""

import dataclasses
import json
import math

import pytest

from launch.estimate import collectives, expert_exchange
from launch.estimate.estimate import device_memory
from launch.estimate.planned_run import plan_run
from launch.estimate.step_time import COSTS, step_time
from tests import ROOT
from tests.launching import write_json
from zerolm.__main__ import main
from zerolm.ds_config.profile import Profile
from zerolm.model.architecture import is_routed_expert
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import exchange, hardware

SHARE = collectives.COLLECTIVE_EFFICIENCY
LAYERS, HIDDEN, ACTIVE, ACCUMULATION = 4, 256, 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 8192, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 64,
        "num_experts_per_tok": ACTIVE, "moe_intermediate_size": 512,
        "intermediate_size": 512, "mlp_only_layers": [0], "max_position_embeddings": 1024,
    }  # fmt: skip
    return Model.load(str(write_json(tmp_path_factory.mktemp("model") / "config.json", config)))


def planned(model, stage=1, degree=8, devices=16, recomputed=False, micro=1, **links):
    """Return a run on hosts of eight H100; degree None is whole experts."""
    ds = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
    batch = 1024 * micro * ACCUMULATION * devices
    settings = RunSettings(
        seq_len=1024, batch_tokens=batch, total_tokens=batch, micro_batch_size=micro,
        expert_parallel=degree, gradient_checkpointing=recomputed,
        explicit=frozenset({"batch_tokens", "micro_batch_size"}),
    )  # fmt: skip
    devices_of = hardware.load("H100", links)
    return plan_run(model, Profile.parse(ds, "test"), settings, devices_of, devices, 8)


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_are_exchanged_in_each_pass_of_each_layer_with_experts(model, recomputed):
    run = planned(model, recomputed=recomputed)
    sent = 1024 * ACTIVE * HIDDEN * 2 * 7 / 8 * exchange.IMBALANCE  # bf16; there or back
    each = 2 * sent / (run.hardware.intra_node * SHARE) + 3 * expert_exchange.CALL_SECONDS
    passes = (3 if recomputed else 2) * (LAYERS - 1) * ACCUMULATION
    assert expert_exchange.exchange_seconds(run, SHARE) == pytest.approx(passes * each)
    assert expert_exchange.exchange_seconds(planned(model, degree=None), SHARE) == 0


def test_an_experts_gradient_is_sent_among_the_ranks_that_have_it(model):
    run, links = planned(model), hardware.load("H100", {})
    experts = sum(
        math.prod(shape) // 8 for name, shape in model.shapes.items() if is_routed_expert(name)
    )
    shapes = model.shapes.items()
    dense = sum(math.prod(shape) for name, shape in shapes if not is_routed_expert(name))
    between = SHARE * min(8 * links.inter_node, links.intra_node)
    expected = dense * 15 / 16 / between + experts / 2 / (links.inter_node * SHARE)
    assert expert_exchange.byte_seconds(run, between, SHARE) == pytest.approx(expected)
    alone = planned(model, devices=8)
    assert alone.layout.axis("expert_copies").size == 1
    inside = SHARE * links.intra_node
    found = expert_exchange.byte_seconds(alone, inside, SHARE)
    assert found == pytest.approx(dense * 7 / 8 / inside)


def test_zero_3_gathers_experts_among_the_ranks_that_have_them(model):
    """Both passes of each micro-batch gather weights in bf16, and the second one sums gradients."""
    run = planned(model, 3)
    between = collectives.bus_bandwidth(run)
    each = expert_exchange.byte_seconds(run, between, SHARE)
    latencies = ACCUMULATION * collectives.ring_seconds(run)
    sent = ACCUMULATION * (2 * 2 + run.profile.communication_bytes) * each
    found = collectives.collectives(run)
    assert 0 < found.passes - sent < 1000 * latencies
    assert found.serial == pytest.approx(expert_exchange.exchange_seconds(run, SHARE))
    whole = collectives.collectives(planned(model, 3, None))
    assert whole.serial == 0 and whole.passes > found.passes


@pytest.mark.parametrize("imbalance", [1.0, 3.0, 50.0])
def test_the_busiest_rank_sets_pace_and_memory(model, imbalance):
    """Its tokens are at most all tokens of the group, which are as many means as it has ranks."""
    busiest = min(imbalance, 8)
    run = planned(model)
    other = dataclasses.replace(run, rank_imbalance=imbalance)
    calls = 2 * (LAYERS - 1) * ACCUMULATION * 3 * expert_exchange.CALL_SECONDS
    seconds = [expert_exchange.exchange_seconds(each, SHARE) - calls for each in (run, other)]
    assert seconds[1] / seconds[0] == pytest.approx(busiest / exchange.IMBALANCE)
    rows = 1024 * ACTIVE * HIDDEN * 2
    found = [device_memory(each).activations for each in (run, other)]
    copies = exchange.KEPT_COPIES * (LAYERS - 1) + exchange.LIVE_COPIES
    assert found[1] - found[0] == pytest.approx(copies * rows * (busiest - exchange.IMBALANCE))
    products = [step_time(each).compute for each in (run, other)]
    rate = run.hardware.bf16 * run.hardware.attained
    more = COSTS.experts * run.routed_flops * (busiest - exchange.IMBALANCE) / rate
    assert products[1] - products[0] == pytest.approx(1024 * ACCUMULATION * more)


def test_a_plan_takes_the_imbalance_that_a_run_has_measured(model, capsys, tmp_path):
    def plan(*words):
        code = main(["plan", "--json", "--total_tokens", "1B", *map(str, words)])
        return code, capsys.readouterr()

    names = ["--model_config", model.path, "--deepspeed_config", ROOT / "ds_configs/zero1.json"]
    names += ["--expert_parallel", 8]
    usual, uneven = (
        json.loads(plan(*names, *more)[1].out) for more in ([], ["--rank_imbalance", 2.5])
    )
    assert (usual["rank_imbalance"], uneven["rank_imbalance"]) == (exchange.IMBALANCE, 2.5)
    assert uneven["tokens_per_second"] < usual["tokens_per_second"]
    searched = [
        json.loads(plan("--search", "--model_config", model.path, *more)[1].out)
        for more in ([], ["--rank_imbalance", 2.5])
    ]
    rates = [{each["profile"]: each["figures"] for each in found} for found in searched]
    for name, figures in rates[0].items():
        slower = figures["tokens_per_second"] > rates[1][name]["tokens_per_second"]
        assert slower == ("experts over" in name), name
    code, printed = plan(*names, "--rank_imbalance", 0.5)
    assert code == 2 and "--rank_imbalance: 0.5 must be at least 1" in printed.err
    dense = ["--model_config", ROOT / "model_configs/llama-160m.json", "--rank_imbalance", 2]
    code, printed = plan(*dense)
    assert code == 2 and "llama-160m.json is not a mixture of experts" in printed.err


def test_divided_experts_beat_zero_3_only_where_links_between_hosts_are_slow(model):
    ratios = []
    for gigabits in (50, 3200):
        link = {"inter_node": gigabits / 8 * 1e9 / 8, "micro": 64}
        divided = step_time(planned(model, devices=64, **link)).seconds
        ratios.append(step_time(planned(model, 3, None, 64, **link)).seconds / divided)
    assert ratios[0] > 1.5 and ratios[1] < 1.0, ratios
