"""What DeepSpeed asserts while it builds an engine is refused before; its neighbours are not."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_workers, write_json
from tests.zerolm.ds_config.ds_cases import found, resolved, zero
from zerolm.ds_config.construction import ASSERTIONS
from zerolm.ds_config.optimizers import beta_problems
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.scheduler import course, course_problems, description
from zerolm.parts.settings import RunSettings

Json = dict[str, Any]
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}


def scheduler(kind: str, **params: Any) -> Json:
    return {**zero(1), "scheduler": {"type": kind, "params": params}}


def autocast(*modules: str, **more: Any) -> Json:
    block = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": [*modules]}
    block |= more
    return {**zero(1), "torch_autocast": block}


def offload(ratio: float, **params: Any) -> Json:
    profile = zero(3, offload_optimizer={"device": "cpu", "ratio": ratio})
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, **params}}
    return {**profile, "zero_force_ds_cpu_optimizer": False, "optimizer": optimizer}


# {key of an assertion: (JSONs that DeepSpeed refuses, neighbours that it accepts)}
CASES: dict[str, tuple[list[Json], list[Json]]] = {
    "prescale_gradients": (
        [{**zero(2), "prescale_gradients": True}, {**zero(3), "prescale_gradients": True}],
        [{**zero(1), "prescale_gradients": True},
         {**zero(3, reduce_scatter=False), "prescale_gradients": True}],
    ),
    "gradient_predivide_factor": (
        [{**zero(2), "gradient_predivide_factor": 2}, {**zero(3), "gradient_predivide_factor": 2}],
        [{**zero(2), "gradient_predivide_factor": 1.0},
         {**zero(2, reduce_scatter=False), "gradient_predivide_factor": 2}],
    ),
    "zero_optimization.legacy_stage1": (
        [zero(1, legacy_stage1=True)], [zero(1, legacy_stage1=False)],
    ),
    "zero_optimization.offload_optimizer.ratio": (
        [offload(0.5, torch_adam=True)], [offload(1.0, torch_adam=True)],
    ),
    "torch_autocast.lower_precision_safe_modules": (
        [autocast("nosuch"), autocast("torch.nn.NoSuch"),
         autocast(lower_precision_safe_modules=None),
         autocast(lower_precision_safe_modules=None, enabled=False)],
        [autocast("torch.nn.Linear"), autocast("nosuch", enabled=False)],
    ),
    "scheduler.params.cycle_min_lr": (
        [scheduler("OneCycle", cycle_max_lr=1e-3), scheduler("OneCycle", **CYCLE | {
            "cycle_min_lr": [1e-4, 1e-4, 1e-4]})],
        [scheduler("OneCycle", **CYCLE)],
    ),
    "scheduler.params.cycle_max_lr": (
        [scheduler("OneCycle", cycle_min_lr=1e-3)], [scheduler("OneCycle", **CYCLE)],
    ),
    "scheduler.params.cycle_first_step_size": (
        [scheduler("OneCycle", **CYCLE, cycle_first_step_size=0)],
        [scheduler("OneCycle", **CYCLE, cycle_first_step_size=10)],
    ),
    "scheduler.params.cycle_second_step_size": (
        [scheduler("OneCycle", **CYCLE, cycle_second_step_size=-1)],
        [scheduler("OneCycle", **CYCLE, cycle_second_step_size=5),
         scheduler("OneCycle", **CYCLE, cycle_second_step_size=None)],
    ),
    "scheduler.params.lr_range_test_step_size": (
        [scheduler("LRRangeTest", lr_range_test_step_size=0)],
        [scheduler("LRRangeTest", lr_range_test_step_size=10)],
    ),
    "scheduler.params.warmup_max_lr": (  # not in the table: of all numbers of schedulers
        [scheduler("WarmupLR", warmup_max_lr="x", warmup_num_steps=5),
         scheduler("WarmupLR", warmup_max_lr=[1e-3, 1e-3, 1e-3], warmup_num_steps=5)],
        [scheduler("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=5)],
    ),
    "scheduler.params.total_num_steps": (
        [scheduler("WarmupDecayLR", total_num_steps="x", warmup_num_steps=2)],
        [scheduler("WarmupDecayLR", total_num_steps=10, warmup_num_steps=2)],
    ),
    "steps_per_print": (
        [{**zero(1), "steps_per_print": 0}],
        [{**zero(1), "steps_per_print": float("inf")}, {**zero(1), "steps_per_print": 1e30}],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, list[Any]]:
    """{name: [error, rates]} of an engine of each JSON."""
    base = {"train_micro_batch_size_per_gpu": 1}
    # torch's, so that no operator of DeepSpeed has to be built.
    base["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    configs = {
        f"{key} {kind} {number}": base | config
        for key, cases in CASES.items()
        for kind, each in zip(("refused", "accepted"), cases, strict=True)
        for number, config in enumerate(each)
    }
    configs |= {name: base | config for name, config in SCHEDULED.items()}
    directory = tmp_path_factory.mktemp("built")
    found = directory / "found.json"
    worker = Path(__file__).with_name("construction_worker.py")
    run_workers(1, worker, write_json(directory / "configs.json", configs), found)
    results: dict[str, list[Any]] = json.loads(found.read_text())
    return results


def test_every_assertion_has_a_case():
    assert {assertion.key for assertion in ASSERTIONS} <= {*CASES}


def test_a_wrong_value_is_named_once():
    (problem,) = found({**zero(2), "gradient_predivide_factor": "2"})
    assert problem.startswith("ds.json: gradient_predivide_factor: ")


@pytest.mark.parametrize("shape", ["exponential", None, ["log"]])
def test_a_warmup_that_deepspeed_does_not_have_is_refused(shape):
    (problem,) = found(scheduler("WarmupLR", warmup_type=shape))
    assert problem.startswith("ds.json: scheduler.params.warmup_type: ")
    assert found(scheduler("WarmupLR", warmup_type="linear")) == []


@pytest.mark.parametrize("key", CASES)
def test_what_deepspeed_asserts_is_refused_and_its_neighbours_are_not(built, key):
    for number, config in enumerate(CASES[key][0]):
        assert built[f"{key} refused {number}"][0], f"DeepSpeed builds an engine of {config}"
        (problem,) = found(config, world_size=1)
        assert problem.startswith(f"ds.json: {key}: ")
    for number, config in enumerate(CASES[key][1]):
        assert built[f"{key} accepted {number}"][0] == "", config
        assert found(config, world_size=1) == []


@pytest.mark.parametrize("value", [float("inf"), 1e30, 10**40])
def test_an_interval_that_no_run_reaches_is_never(value):
    assert resolved({**zero(1), "steps_per_print": value})["steps_per_print"] is None


def test_infinity_in_a_file_is_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": Infinity, "zero_optimization": {"stage": 1}}')
    profile = Profile.read(path)
    assert profile.problems == [] and profile.json["steps_per_print"] is None


def cycle(**params: Any) -> Json:
    return scheduler("OneCycle", **CYCLE | params)


def cosine(**params: Any) -> Json:
    params |= {"total_num_steps": 8, "warmup_num_steps": 2}
    return scheduler("WarmupCosineLR", **params)


RANGE = {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2}
# JSONs in which each parameter of a scheduler counts in the first steps.
SCHEDULED = {
    "WarmupLR": scheduler("WarmupLR", warmup_min_lr=1e-5, warmup_max_lr=1e-3, warmup_num_steps=3),
    "linear": scheduler("WarmupLR", warmup_max_lr=1e-3, warmup_num_steps=3, warmup_type="linear"),
    "WarmupDecayLR": scheduler("WarmupDecayLR", total_num_steps=6, warmup_num_steps=2),
    "WarmupCosineLR": cosine(warmup_min_ratio=0.1, cos_min_ratio=0.2),
    "OneCycle": cycle(cycle_first_step_size=2, cycle_min_mom=0.7, cycle_max_mom=0.95),
    "decay": cycle(
        cycle_first_step_size=1, decay_step_size=1, decay_lr_rate=1, decay_mom_rate=0.01
    ),
    "stairs": cycle(cycle_first_step_size=3, cycle_first_stair_count=2),
    "later": cycle(cycle_first_step_size=4, last_batch_iteration=1),
    "LRRangeTest": scheduler("LRRangeTest", **RANGE, lr_range_test_step_rate=5),
    "staircase": scheduler("LRRangeTest", **RANGE, lr_range_test_staircase=True),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_rates_and_betas_are_those_of_the_engine(built, name):
    error, rates, betas = built[name]
    found = course(SCHEDULED[name]["scheduler"], 1e-3, 4)
    assert error == "" and found.rates == pytest.approx(rates)
    if name in ("OneCycle", "decay", "stairs", "later"):
        assert [list(pair) for pair in found.betas] == betas


def described(config: Json, rate: float, steps: int) -> str:
    settings = RunSettings(learning_rate=rate, min_learning_rate=0.0, beta1=0.9, beta2=0.95)
    sizes = {"warmup_steps": 5, "total_steps": steps}
    profile = Profile.parse(resolved(config, settings, **sizes), "ds.json")
    return description(profile, rate, steps)


def test_the_line_of_a_schedule_is_of_all_steps():
    text = described(scheduler("WarmupDecayLR", total_num_steps=100), 2e-3, 100)
    last = 2e-3 * (100 - 98) / (100 - 5)  # two steps before the end of its decay
    assert text.startswith(f"WarmupDecayLR of the ds config, peak 0.002, last {last:g};")
    assert text.endswith("; 0 in steps 1 to 2, which change no weight")
    text = described(scheduler("WarmupCosineLR", warmup_type="linear"), 1e-3, 100)
    assert "; it never reaches 0.001; 0 in steps 1 to 2," in text
    text = described(cycle(cycle_first_step_size=50, cycle_min_lr=0.0, cycle_first_stair_count=2,
                           cycle_momentum=False), 1e-3, 99)  # fmt: skip
    assert text.startswith(
        "OneCycle of the ds config, peak 0.001, last 0; 0 in steps 1 to 25, 77 to 99,"
    )
    assert "beta" not in text


def test_betas_that_onecycle_sets_are_printed_and_theirs_alone():
    config = cycle(cycle_first_step_size=50)
    assert "; cycle_momentum sets beta1 from 0.8 to 0.898 and beta2 to 0.99" in described(
        config, 1, 99
    )
    assert "betas" not in resolved(config)["optimizer"]["params"]
    auto = {"type": "AdamW", "params": {"betas": "auto"}}
    assert "betas" not in resolved({**config, "optimizer": auto})["optimizer"]["params"]
    own = {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}
    (problem,) = found({**config, "optimizer": own})
    assert problem.startswith("ds.json: optimizer.params.betas: [0.9, 0.95], but OneCycle sets")
    config = cycle(cycle_momentum=False)
    assert found({**config, "optimizer": own}) == []
    flag = RunSettings(beta1=0.9, explicit=frozenset({"beta1"}))
    assert beta_problems(Profile.parse(config), flag) == []
    (problem,) = beta_problems(Profile.parse(cycle()), flag)
    assert "--beta1: 0.9, but OneCycle sets the betas in each step" in problem


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (cycle(cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.1), "beta1 to 1.08"),
        (scheduler("LRRangeTest", **RANGE, lr_range_test_step_rate=-1), "rate -5e-05 in step 4"),
        (cycle(cycle_min_lr=0, cycle_max_lr=0), "rate 0 in every step"),
    ],
)
def test_a_scheduler_with_which_nothing_can_train_is_refused(config, why):
    (problem,) = course_problems(Profile.parse(config, "ds.json"), 1e-3, 10)
    assert problem.startswith("ds.json: scheduler.params: ") and why in problem
