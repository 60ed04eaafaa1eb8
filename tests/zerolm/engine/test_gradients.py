"""`gradients` finds all of the reduced gradient at each stage; a metric reads it as documented."""

from pathlib import Path

import pytest

from tests.ds_config_checks import check_in_ranks
from tests.zerolm.engine.test_step_gate import configs

TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2}
CHOSEN = (
    "zero1-fp32", "zero1-bf16-float32-gradients", "zero2-bf16", "zero2-offload", "zero3-fp32",
    "zero3-offload",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    chosen = {name: configs()[name] for name in CHOSEN}
    for config in chosen.values():
        config["communication_data_type"] = "fp32"
        config["optimizer"]["params"]["torch_adam"] = True  # nothing is compiled
        config["zero_force_ds_cpu_optimizer"] = False
    worker = Path(__file__).with_name("gradients_worker.py")
    return check_in_ranks(worker, tmp_path_factory.mktemp("gradients"), chosen)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_parts_of_all_ranks_are_the_gradient_of_plain_torch(found, name) -> None:
    """Without padding: a value that is no gradient would be counted as a zero."""
    one = found[name]
    assert one["sizes"] == one["expected sizes"]
    assert one["error"] < TOLERANCES["fp32" if "fp32" in name else "bf16"]


@pytest.mark.parametrize("name", CHOSEN)
def test_the_documented_metric_counts_the_elements_that_are_zero(found, name) -> None:
    one = found[name]
    assert one["zeros"] == pytest.approx(one["expected zeros"], abs=0.01)
    assert one["expected zeros"] >= 17 * 9  # rows of words that do not occur
