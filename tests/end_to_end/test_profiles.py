"""The shipped profiles and two typical DeepSpeed configs of users give the same curve."""

import json

import numpy as np
import pytest

from tests import ROOT, tracked
from tests.end_to_end.recipe import PEAK, recipe
from tests.launching import rows, run_ranks, write_json
from zerolm.engine.operators import has_asynchronous_io

# Always: zero2.json in test_precision.py and test_readme.py, offload in test_elastic.py.
pytestmark = pytest.mark.soak
STEPS = 12
# Need GPU kernels, libaio, and another curve (Muon: test_optimizers.py).
NOT_HERE = {"zeropp.json", "zero3_nvme.json", "zero1_muon.json"}
SHIPPED = sorted({path.name for path in tracked("ds_configs/*.json")} - NOT_HERE)
ZERO = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
USERS = {
    "user_zero3.json": {
        "zero_optimization": {
            **ZERO,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
    },
    "user_scheduler.json": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": PEAK, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": PEAK, "warmup_max_lr": PEAK, "warmup_num_steps": 2},
        },
    },
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory, llama, corpus) -> np.ndarray:
    """The curve of the simplest profile: ZeRO-1 in fp32, on one rank."""
    base = tmp_path_factory.mktemp("expected")
    plain = write_json(
        base / "ds.json",
        {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "bf16": {"enabled": False}},
    )
    return curve(base / "run", llama, corpus, plain, num_ranks=1)


def curve(run_dir, llama, corpus, json_file, num_ranks=2) -> np.ndarray:
    flags = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    flags += ["--schedule", "constant", "--wandb", "off"]
    if json_file.name != "user_scheduler.json":  # its own scheduler sets the warmup
        flags += ["--warmup_tokens", 0]
    done = run_ranks(num_ranks, *flags, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    record = json.loads((run_dir / "run.json").read_text())
    assert record["ds_config"]["gradient_clipping"] == 1.0
    return np.array(list(rows(run_dir, "train/loss").values()))


def test_a_second_partition_in_each_host_gives_the_same_curve(
    tmp_path, llama, corpus, expected
) -> None:
    """hpZ, the part of zeropp.json that needs no GPU kernels."""
    config = json.loads((ROOT / "ds_configs" / "zeropp.json").read_text())
    zero = config["zero_optimization"]
    del zero["zero_quantized_weights"], zero["zero_quantized_gradients"]
    zero["zero_hpz_partition_size"] = 2
    losses = curve(tmp_path / "run", llama, corpus, write_json(tmp_path / "hpz.json", config))
    np.testing.assert_allclose(losses, expected, rtol=5e-3)


@pytest.mark.skipif(not has_asynchronous_io(), reason="needs libaio's headers")
def test_offload_to_a_disk_gives_the_curve_of_offload_to_the_host(tmp_path, llama, corpus) -> None:
    found = {}
    for name, more in (
        ("zero3_offload", []),
        ("zero3_nvme", ["--nvme_path", tmp_path / "disk"]),
    ):
        json_file = ROOT / "ds_configs" / f"{name}.json"
        arguments = recipe(llama, corpus, tmp_path / name, json_file, steps=3, micro=2)
        done = run_ranks(2, *arguments, *more, "--wandb", "off", timeout=500)
        assert done.returncode == 0, done.stdout[-4000:]
        found[name] = list(rows(tmp_path / name, "train/loss").values())
    assert found["zero3_nvme"] == found["zero3_offload"]


@pytest.mark.parametrize("name", [*SHIPPED, *USERS])
def test_every_profile_gives_the_same_curve(tmp_path, llama, corpus, expected, name) -> None:
    json_file = ROOT / "ds_configs" / name
    if name in USERS:
        json_file = write_json(tmp_path / name, USERS[name])
    losses = curve(tmp_path / "run", llama, corpus, json_file)
    assert len(losses) == STEPS and expected[0] - expected[-1] > 0.05
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
