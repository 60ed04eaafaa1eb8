"""The seconds and bytes of pipeline stages against closed forms, and when they beat ZeRO-3."""

import json
import re

import pytest

from launch.estimate import pipeline
from launch.estimate.estimate import Assumptions, device_memory, estimate
from launch.estimate.planned_run import plan_run
from launch.estimate.search import Candidate, break_even
from launch.estimate.step_time import step_time
from tests import ROOT
from zerolm.common.errors import ConfigError
from zerolm.ds_config.profile import Profile
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import hardware, memory

TOKENS, SEQ_LEN, HOSTS = 1 << 22, 4096, 8
WIDTH, LAYERS = 8192, 80


@pytest.fixture(scope="module")
def model():
    return Model.load(str(ROOT / "model_configs/llama-70b.json"))


def planned(model, stages=8, micro=1, gigabits=100.0, **block):
    """Return a 70B on eight hosts of eight H100; 1 stage is ZeRO-3."""
    ds = json.loads((ROOT / f"ds_configs/zero{1 if stages > 1 else 3}.json").read_text())
    if stages > 1:
        ds["pipeline"] = {"stages": stages, **block}
    settings = RunSettings(
        seq_len=SEQ_LEN, batch_tokens=TOKENS, total_tokens=TOKENS, micro_batch_size=micro,
        gradient_checkpointing=True, explicit=frozenset({"batch_tokens", "micro_batch_size"}),
    )  # fmt: skip
    devices_of = hardware.load("H100", {"inter_node": gigabits * 1e9 / 8 / 8})
    return plan_run(model, Profile.parse(ds, "test"), settings, devices_of, 8 * HOSTS, 8)


def test_transfers_send_hidden_states_and_gradients_once_over_each_boundary(model):
    run = planned(model)
    count = TOKENS // SEQ_LEN // 8  # micro-batches of a replica
    sent = 4 * TOKENS / 8 * WIDTH  # 2 bytes each, both ways
    seconds = sent / (100e9 / 8 / 8 * pipeline.LINK_EFFICIENCY)
    latency = 2 * count * pipeline.TRANSFER_SECONDS
    assert pipeline.transfer_seconds(run) == pytest.approx(seconds + latency)
    assert pipeline.idle_ratio(run) == pytest.approx(7 / count)
    found = step_time(run)
    busy = found.compute + found.elementwise + pipeline.transfer_seconds(run)
    assert found.idle == pytest.approx(busy * 7 / count)
    assert pipeline.transfer_seconds(planned(model, 1)) == 0 == step_time(planned(model, 1)).idle


def test_the_costliest_stage_sets_the_pace(model):
    even, uneven = planned(model), planned(model, layers=[3, *[11] * 7])
    ratio = step_time(uneven).compute / step_time(even).compute
    assert ratio == pytest.approx(
        pipeline.busiest_share(uneven) / pipeline.busiest_share(even)
    ) and ratio > 1.08  # fmt: skip


def test_memory_is_that_of_the_stage_that_needs_most(model):
    """The first stage stores a micro-batch for each stage, and the last computes logits."""
    run = planned(model, stages=16)
    values = sum(a * b for a, b in (each for each in model.shapes.values() if len(each) == 2))
    found = device_memory(run)
    layers = values / LAYERS * 5  # without embeddings
    assert found.weights == pytest.approx(2 * layers, rel=0.08)
    whole = memory.activations_of(model.config, SEQ_LEN, "bf16")
    first = memory.stage_activations(whole, run.profile.stage_layers, 0, 128)
    assert first.inputs == pytest.approx(16 * 5 * SEQ_LEN * WIDTH * 2)
    assert first.loss == 0 and first.outside == (16 + 2) * SEQ_LEN * WIDTH * 2
    last = memory.stage_activations(whole, run.profile.stage_layers, 15, 128)
    assert last.inputs == pytest.approx(5 * SEQ_LEN * WIDTH * 2) and last.loss == whole.loss
    few = memory.stage_activations(whole, run.profile.stage_layers, 0, 4)
    assert few.inputs == pytest.approx(4 * 5 * SEQ_LEN * WIDTH * 2)


def test_stages_are_faster_than_zero_3_below_the_links_of_the_note(model):
    """About 400 Gb/s a host for a 70B with 4 Mi tokens a step (docs/parallelism.md)."""
    assumed = Assumptions(1e-6, 300.0, 2e9)
    runs = [planned(model), planned(model, 1, micro=4)]
    candidates = [Candidate(each.profile, True, estimate(each, assumed), None) for each in runs]
    note = break_even(candidates, assumed)
    (links,) = map(float, re.findall(r"below about ([\d.e+]+) Gb/s", note))
    assert 200 < links < 800, note
    slow, fast = (step_time(planned(model, gigabits=each)).seconds for each in (50, 3200))
    slow_3, fast_3 = (
        step_time(planned(model, 1, micro=4, gigabits=each)).seconds for each in (50, 3200)
    )
    assert slow < slow_3 / 2 and fast_3 < fast < 1.2 * fast_3
    assert break_even(candidates[:1], assumed) is None


def test_too_few_micro_batches_are_refused(model):
    with pytest.raises(ConfigError, match="micro-batch"):
        planned(model, micro=64)
