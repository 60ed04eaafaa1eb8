"""Predicted memory equals the tensors that DeepSpeed's engines keep."""

import json
import subprocess
import sys

import pytest

from tests.launching import LAUNCH_SECONDS, ROOT, environment, free_port, kill_session
from tests.zerolm.plan.memory_cases import MODELS, SEQ_LEN, cases, config
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.model.architecture import num_parameters, parameter_shapes
from zerolm.plan import memory, muon_memory

COMPONENTS = ("weights", "gradients", "optimizer", "master")


def measured(world_size, directory):
    """Build the engines on `world_size` ranks, through the real launcher."""
    output = directory / "measured.json"
    words = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(world_size)]
    words += ["--master_port", str(free_port()), "--module", "tests.zerolm.plan.memory_worker"]
    process = subprocess.Popen(
        [*words, str(output)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LAUNCH_SECONDS)
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        raise AssertionError("the engines did not finish") from None
    assert process.returncode == 0, printed[-4000:]
    return json.loads(output.read_text())


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 2])
def test_model_states_are_predicted_within_one_percent(world_size, tmp_path):
    found = measured(world_size, tmp_path)
    wrong, shapes = [], {name: parameter_shapes(one) for name, one in MODELS.items()}
    for name, model, ds in cases(world_size):
        states = memory.model_states(shapes[model], Profile.parse(ds), Layout(world_size))
        counted = sum(found[name][component] for component in COMPONENTS)
        predicted = states.device + states.host - states.secondary
        print(f"{world_size} rank(s), {name}: {counted} counted, {predicted / counted - 1:+.2%}")
        if abs(predicted / counted - 1) > 0.01:
            wrong.append((name, found[name], predicted))
        assert states.secondary == pytest.approx(found[name]["secondary"], rel=0.05), name
        for component in ("optimizer", "master"):
            each = getattr(states, component) + getattr(states, f"host_{component}")
            assert each == pytest.approx(found[name][component], rel=0.01), (name, component)
    assert not wrong and len(found) == len(list(cases(world_size)))


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_states_equal_those_of_the_zero_paper(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 devices."""
    shapes = {"weights": (7_500_000_000 // 64, 64)}
    ds = {"zero_optimization": {"stage": stage}, "fp16": {"enabled": True}}
    states = memory.model_states(shapes, Profile.parse(ds), Layout(64))
    assert states.device / 1e9 == pytest.approx(gigabytes, rel=0.01) and states.host == 0


def test_hpz_keeps_a_second_copy_of_the_weights_that_the_micro_batch_makes_room_for():
    shapes = {"weights": (1000, 640)}
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    ds = {"zero_optimization": zero, "bf16": {"enabled": True}}
    profile = Profile.parse(ds)
    states = memory.model_states(shapes, profile, Layout(64))
    assert states.secondary == 2 * 640_000 / 8
    assert memory.model_states(shapes, profile, Layout(4)).secondary == 2 * 640_000 / 4
    plain = Profile.parse({**ds, "zero_optimization": {"stage": 3}})
    assert states.device - memory.model_states(shapes, plain, Layout(64)).device == states.secondary
    zero |= {f"offload_{each}": {"device": "cpu"} for each in ("optimizer", "param")}
    moved = memory.model_states(shapes, Profile.parse(ds), Layout(64))
    assert moved.secondary == 0 and moved.host_weights > 2 * 640_000 / 8
    sizes = [
        memory.fitting_micro_batch(
            64,
            SEQ_LEN,
            config=MODELS["llama"],
            shapes=shapes,
            profile=one,
            layout=Layout(64),
            memory_bytes=4_560_000,
            checkpointing=False,
        )
        for one in (plain, profile)
    ]
    assert sizes == [2, 1]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_moving_average_adds_four_bytes_per_value_where_the_moments_are(stage, offload):
    shapes = parameter_shapes(MODELS["llama"])
    shard = num_parameters(shapes) / 2
    profile = Profile.parse(config(stage, offload, "bf16+fp32", 2, 2))
    without, states = (
        memory.model_states(shapes, profile, Layout(2), kept_bytes=kept) for kept in (0, 4)
    )
    added = states.device - without.device, states.host - without.host
    expected = (4 * shard, 0) if offload == "none" else (0, 4 * shard)
    assert added == pytest.approx(expected, rel=0.01)
    assert states.optimizer + states.host_optimizer == pytest.approx(12 * shard, rel=0.01)
    sizes = [memory.checkpoint_bytes(shapes, profile, kept_bytes=kept) for kept in (0, 4)]
    assert sizes[1] - sizes[0] == 4 * num_parameters(shapes)


def test_weights_on_the_host_leave_the_device_without_the_optimizer_too():
    shapes = parameter_shapes(MODELS["llama"])
    plain = memory.model_states(
        shapes, Profile.parse(config(3, "none", "bf16+fp32", 2, 2)), Layout(2)
    )
    ds = config(3, "none", "bf16+fp32", 2, 2)
    ds["zero_optimization"]["offload_param"] = {"device": "cpu"}
    moved = memory.model_states(shapes, Profile.parse(ds), Layout(2))
    assert moved.host == moved.host_weights == plain.device - moved.device > 0
    assert (moved.optimizer, moved.master) == (plain.optimizer, plain.master)


def test_offload_leaves_only_the_weights_on_the_device():
    shapes = parameter_shapes(MODELS["llama"])
    total = num_parameters(shapes)
    offloaded = Profile.parse(config(2, "optimizer", "bf16+fp32", 2, 2))
    kept = memory.model_states(shapes, offloaded, Layout(2))
    assert kept.device == 2 * total and kept.host > 6 * total
    offloaded = Profile.parse(config(3, "both", "bf16+fp32", 2, 2))
    gone = memory.model_states(shapes, offloaded, Layout(2))
    assert gone.device < 0.01 * total


def test_muon_at_zero2_keeps_at_least_one_full_matrix_per_rank():
    shapes = {f"layers.{number}.proj": (1000, 1000) for number in range(8)}
    for world_size, matrices in ((1, 8), (2, 4), (3, 4), (8, 1), (512, 2)):
        held = muon_memory.max_matrix_values(shapes, Profile.parse({}), world_size)
        assert held == matrices * 1_000_000, world_size


def test_buffers_are_never_larger_than_the_model():
    shapes = {"weights": (1000, 10)}
    ds = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}}
    assert memory.buffer_bytes(shapes, Profile.parse(ds)) == (20_000, 0)
    stage_3 = Profile.parse({**ds, "zero_optimization": {"stage": 3}})
    assert memory.buffer_bytes(shapes, stage_3) == (20_000, 20_000)
