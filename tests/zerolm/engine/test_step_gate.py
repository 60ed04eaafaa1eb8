"""A refused step changes no bit, and gradients may be scaled by parameter, in any precision."""

from pathlib import Path

import pytest

from tests.ds_config_checks import check_in_ranks
from zerolm.engine.step_gate import SCALE_AT_MINIMUM

BATCH = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
OFFLOADED_ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def configs() -> dict[str, dict]:
    found = {}
    for stage in (1, 2, 3):
        zero = {"stage": stage}
        for precision in ("fp32", "bf16"):
            extra = {"bf16": {"enabled": True}} if precision == "bf16" else {}
            common = {**BATCH, **extra, "gradient_clipping": 0.5}
            found[f"zero{stage}-{precision}"] = {
                **common,
                "optimizer": ADAM,
                "zero_optimization": zero,
            }
        if stage > 1:
            offload = {**zero, "offload_optimizer": {"device": "cpu"}}
            found[f"zero{stage}-offload"] = {
                **common,
                "optimizer": OFFLOADED_ADAM,
                "zero_optimization": offload,
            }
    found["zero1-bf16-float32-gradients"] = {
        **found["zero1-bf16"],
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    for stage in (2, 3):
        found[f"zero{stage}-offload-float32-gradients"] = {
            **found[f"zero{stage}-offload"],
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    cpu, plain = {"offload_optimizer": {"device": "cpu"}}, {"torch_adam": True}
    for name, zero, params in (
        ("zero2", {}, plain), ("zero3", {}, plain), ("zero2-offload", cpu, {}),
    ):  # fmt: skip
        found[f"{name}-muon"] = {
            **BATCH,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Muon", "params": {"lr": 1e-3, **params}},
            "zero_optimization": {"stage": int(name[4]), "reduce_scatter": False, **zero},
        }
    return found


# One of each stage, optimizer and precision, with and without offload.
SOME = {
    "zero1-bf16-float32-gradients", "zero2-offload", "zero3-offload-float32-gradients",
    "zero3-muon",
}  # fmt: skip


@pytest.mark.parametrize(
    "soak", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "others"]
)
def test_a_refused_step_changes_no_bit_and_gradients_are_scaled_by_parameter(tmp_path, soak):
    chosen = {name: config for name, config in configs().items() if soak != (name in SOME)}
    assert soak or chosen.keys() == SOME
    for config in chosen.values():
        config["communication_data_type"] = "fp32"
    worker = Path(__file__).with_name("step_gate_worker.py")
    assert check_in_ranks(worker, tmp_path, chosen) == {name: [] for name in chosen}


def test_deepspeed_says_that_its_loss_scale_cannot_be_lowered():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        1.0, scale_window=1, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
    )
    with pytest.raises(Exception, match=SCALE_AT_MINIMUM):
        scaler.update_scale(overflow=True)
