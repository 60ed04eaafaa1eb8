"""The seconds of a step's collectives against closed forms, from what DeepSpeed 0.19.8 sends."""

import json
from dataclasses import replace

import pytest

from launch.estimate import collectives
from launch.estimate.planned_run import plan_run
from tests import ROOT
from zerolm.ds_config.profile import Profile
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import hardware

NO_LATENCY = {"LOCAL_STEP_SECONDS": 0.0, "NETWORK_STEP_SECONDS": 0.0, "HOP_SECONDS": 0.0}
SHARE = collectives.COLLECTIVE_EFFICIENCY


@pytest.fixture(scope="module")
def model():
    return Model.load(str(ROOT / "model_configs" / "llama-160m.json"))


def planned(model, stage=3, devices=16, accumulation=1, compiled=False, **zero):
    """Return a run on hosts of eight H100."""
    ds = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
    ds["zero_optimization"] |= zero
    batch = 1024 * accumulation * devices
    settings = RunSettings(
        seq_len=1024,
        batch_tokens=batch,
        total_tokens=batch,
        micro_batch_size=1,
        compile=compiled,
        explicit=frozenset({"batch_tokens", "micro_batch_size"}),
    )
    profile = Profile.parse(ds, "test")
    return plan_run(model, profile, settings, hardware.load("H100", {}), devices, 8)


def seconds(run, monkeypatch):
    for name, value in NO_LATENCY.items():
        monkeypatch.setattr(collectives, name, value)
    return collectives.collectives(run).passes


def test_hpz_gathers_between_hosts_only_in_the_first_pass_of_a_step(model, monkeypatch):
    values, links = model.num_parameters, hardware.load("H100", {})
    between = SHARE * min(8 * links.inter_node, links.intra_node)
    inside = SHARE * links.intra_node
    gradients = 2 * 4 * values * 15 / 16 / between
    plain = seconds(planned(model, accumulation=2), monkeypatch)
    assert plain == pytest.approx(gradients + 4 * 2 * values * 15 / 16 / between)
    hpz = seconds(planned(model, accumulation=2, zero_hpz_partition_size=8), monkeypatch)
    gathers = 2 * values * (15 / 16 / between + 3 * 7 / 8 / inside)
    assert hpz == pytest.approx(gradients + gathers)


def test_quantization_sends_a_byte_of_a_weight_and_half_a_byte_of_a_gradient_twice(
    model, monkeypatch
):
    links = hardware.load("H100", {})
    between, inside = (SHARE * each for each in (links.inter_node, links.intra_node))
    plain = seconds(planned(model), monkeypatch)
    weights = seconds(planned(model, zero_quantized_weights=True), monkeypatch)
    host = min(8 * between, inside)
    assert plain - weights == pytest.approx(2 * model.num_parameters * 15 / 16 / host)
    both = planned(model, zero_quantized_weights=True, zero_quantized_gradients=True)
    matrices = sum(a * b for a, b in (s for s in model.shapes.values() if len(s) == 2))
    rest = model.num_parameters - matrices
    sent = matrices / 2 * (7 / 8 / inside + 1 / 8 / 2 / between)
    gradients = sent + 4 * rest * 15 / 16 / host
    gathers = 2 * model.num_parameters * 15 / 16 / host
    assert seconds(both, monkeypatch) == pytest.approx(gathers + gradients)
    one_host = planned(model, devices=8)
    quantized = planned(model, devices=8, zero_quantized_gradients=True)
    assert seconds(quantized, monkeypatch) == seconds(one_host, monkeypatch)


def test_a_ring_takes_a_step_for_each_rank_and_longer_ones_between_hosts(model):
    run = planned(model, devices=1024)
    assert collectives.ring_seconds(run) == pytest.approx((1023 - 127) * 3.4e-6 + 127 * 14e-6)
    assert collectives.ring_seconds(run, 8) == pytest.approx(7 * 3.4e-6)


def test_latency_grows_with_ranks_and_with_gathers(model):
    def latency(**options):
        run = planned(model, **options)
        fast = replace(run.hardware, inter_node=1e20, intra_node=1e20)
        return collectives.collectives(replace(run, hardware=fast)).seconds

    assert 1.9 < latency(devices=1024) / latency(devices=512) < 2.1
    by_layer = {"leaf_module": {"classes": ["LlamaMLP"]}}  # a file that names its own
    assert latency(devices=512) < 0.5 * latency(devices=512, **by_layer)
    assert latency(compiled=True, devices=512) == latency(devices=512), "blocks at once"
    assert latency(stage=1, devices=1024) < 0.4 * latency(devices=1024)


def test_stage_1_overlaps_its_reduction_where_owners_have_calls_of_their_own(model):
    few = collectives.collectives(planned(model, stage=1, devices=8))
    many = collectives.collectives(planned(model, stage=1, devices=512))
    all_reduced = planned(model, stage=1, devices=8, use_multi_rank_bucket_allreduce=True)
    whole = collectives.collectives(all_reduced)
    assert few.last > 0 and many.last == 0 and whole.last == 0
    assert whole.serial > few.serial + 1.5 * few.last
