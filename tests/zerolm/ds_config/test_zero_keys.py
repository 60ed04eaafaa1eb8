"""Every key of the ZeRO block that DeepSpeed accepts keeps the curve, or is refused."""

from pathlib import Path

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from tests.ds_config_checks import check_in_ranks
from tests.zerolm.ds_config.ds_cases import found, zero
from tests.zerolm.ds_config.zero_keys import known, of_model, trials
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.schema import inner_model

WORKER = Path(__file__).with_name("zero_keys_worker.py")
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
}


def test_every_key_that_deepspeed_accepts_is_known():
    keys = set(of_model(DeepSpeedZeroConfig, inner_model))
    assert keys == known()


@pytest.mark.parametrize("name", trials())
def test_a_key_that_keeps_the_curve_is_not_refused(name):
    assert found({"zero_optimization": trials()[name]}) == []


@pytest.mark.soak
def test_the_keys_keep_the_curve_also_of_a_resumed_run(tmp_path):
    """The worker measures the largest relative differences of losses and weights from torch's."""
    configs = {}
    for name, block in trials().items():
        # torch's on the device, so that no operator of DeepSpeed has to be built
        params = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        params["torch_adam"] = not name.endswith("host")
        optimizer = {"type": "AdamW", "params": params}
        configs[name] = {**BASE, "optimizer": optimizer, "zero_optimization": block}
    measured = check_in_ranks(WORKER, tmp_path, configs)
    assert measured.keys() == configs.keys()
    wrong = {
        name: differences
        for name, differences in measured.items()
        if isinstance(differences, str) or max(differences) >= 1e-6
    }
    assert not wrong


@pytest.mark.parametrize("ratio", [0, 0.3, "0.3"])
@pytest.mark.parametrize("stage", [2, 3])
def test_partial_offload_is_refused_by_its_name(stage, ratio):
    (problem,) = found(zero(stage, offload_optimizer={"device": "cpu", "ratio": ratio}))
    assert problem.startswith("ds.json: zero_optimization.offload_optimizer.ratio: 0")
    assert found(zero(stage, offload_optimizer={"device": "cpu", "ratio": 1})) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "key", ["elastic_checkpoint", "pipeline_loading_checkpoint", "round_robin_gradients"]
)
def test_a_key_with_which_states_cannot_be_read_is_refused(stage, key):
    (problem,) = found(zero(stage, **{key: True}))
    assert problem.startswith(f"ds.json: zero_optimization.{key}: true is not supported: ")


def test_an_old_key_beside_the_new_one_is_refused():
    (problem,) = found(zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}))
    assert "Cannot provide deprecated parameter 'cpu_offload'" in problem


def test_both_names_of_a_key_count():
    profile = Profile.parse(zero(3, prefetch_bucket_size=7, max_live_parameters=9))
    assert (profile.buckets.prefetch, profile.buckets.max_live) == (7, 9)
    assert profile.json["zero_optimization"]["stage3_prefetch_bucket_size"] == 7
