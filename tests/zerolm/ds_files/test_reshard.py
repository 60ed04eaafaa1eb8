"""A resharded engine has the state of the saved one, bit by bit, for any two topologies."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.launching import run_workers
from zerolm.ds_files.zero_files import Weights

WORKER = Path(__file__).with_name("reshard_worker.py")
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
CPU_ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 1e-2}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def config(stage: int, bf16: bool, optimizer=ADAMW, **more) -> dict:
    zero = {key: more.pop(key) for key in list(more) if key in ("sub_group_size", *OFFLOAD)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **zero},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "steps_per_print": 10**9,
        **more,
    }


BF16 = {
    "zero1": config(1, True),
    "zero2": config(2, True),
    "zero2-offload": config(2, True, CPU_ADAM, **OFFLOAD),
    "zero3": config(3, True),
    "zero3-subgroups": config(3, True, sub_group_size=200),
    "zero3-offload": config(3, True, CPU_ADAM, **OFFLOAD),
}
FP32 = {
    "zero2-fp32": config(2, False),
    "zero3-fp32": config(3, False),
    "zero2-fp32-scheduler": config(2, False, scheduler=WARMUP),
    "zero3-fp32-scheduler": config(3, False, scheduler=WARMUP),
}
OTHERS = {
    "zero2-adagrad": config(2, False, ADAGRAD),
    "zero1-adagrad": config(1, False, ADAGRAD),
}
PROFILES = BF16 | FP32 | OTHERS
ALL = [
    (old, new)
    for family in (
        list(BF16),
        ["zero2-fp32", "zero3-fp32"],
        ["zero2-fp32-scheduler", "zero3-fp32-scheduler"],
        list(OTHERS),
    )
    for old in family
    for new in family
]
# Each profile is resharded from another one and to another one.
SOME = [
    ("zero1", "zero3"),
    ("zero3", "zero1"),
    ("zero2", "zero3-subgroups"),
    ("zero3-subgroups", "zero2"),
    ("zero2-offload", "zero3-offload"),
    ("zero3-offload", "zero2"),
    ("zero2", "zero2-offload"),
    ("zero3-fp32", "zero2-fp32"),
    ("zero2-fp32-scheduler", "zero3-fp32-scheduler"),
    ("zero2-adagrad", "zero1-adagrad"),
]
SOURCE_RANKS = 2


def run(world_size: int, jobs: list[dict], directory: Path) -> None:
    """Run jobs one after another in one launch of gloo ranks."""
    path = directory / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_workers(world_size, WORKER, path, DS_ACCELERATOR="cpu")


def tied(name: str) -> bool:
    return PROFILES[name]["zero_optimization"]["stage"] == 2  # half of the checkpoints


def save(names: Iterable[str], base: Path) -> Path:
    """Write a checkpoint of two ranks and its state for each profile."""
    jobs = [
        {
            "do": "save",
            "config": PROFILES[name],
            "tied": tied(name),
            "checkpoint": str(base / name),
            "state": str(base / f"{name}.state"),
        }
        for name in names
    ]
    run(SOURCE_RANKS, jobs, base)
    return base


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(PROFILES, tmp_path_factory.mktemp("saved"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((3, SOME), id="three ranks", marks=pytest.mark.soak),
        pytest.param((1, ALL), id="one rank, all", marks=pytest.mark.soak),
        pytest.param((3, ALL), id="three ranks, all", marks=pytest.mark.soak),
    ],
)
def resharded(request, saved, tmp_path_factory) -> tuple[Path, list[tuple[str, str]]]:
    """Return a directory with states and checkpoints of resharded engines; the profile pairs."""
    base = tmp_path_factory.mktemp("resharded")
    world_size, pairs = request.param
    jobs: list[dict] = []
    for old, new in pairs:
        common = {"config": PROFILES[new], "tied": tied(old)}
        again = str(base / f"{old}-{new}")
        jobs.append(
            {
                "do": "reshard",
                "checkpoint": str(saved / old),
                "world_size": SOURCE_RANKS,
                "stage": PROFILES[old]["zero_optimization"]["stage"],
                "state": f"{again}.state",
                "again": again,
                **common,
            }
        )
        jobs.append({"do": "native", "checkpoint": again, "state": f"{again}.native", **common})
    run(world_size, jobs, base)
    return base, pairs


def read(path: Path | str) -> dict:
    return torch.load(path, weights_only=False)  # written by the worker


def differences(ours: dict, theirs: dict) -> list[str]:
    found = []
    for key in sorted(set(ours) | set(theirs)):
        one, other = ours.get(key), theirs.get(key)
        same = torch.equal(one, other) if torch.is_tensor(one) else one == other
        if not same:
            found.append(f"{key}: {one} is not {other}")
    return found


LATER = {"losses", "next loss", "loss after", "world_size", "stage"}


def held(state: dict) -> dict:
    return {key: value for key, value in state.items() if key not in LATER}


def test_resharded_state_is_bit_identical(saved, resharded) -> None:
    base, pairs = resharded
    for old, new in pairs:
        ours, theirs = read(base / f"{old}-{new}.state"), read(saved / f"{old}.state")
        assert not differences(held(ours), held(theirs)), f"{old} -> {new}"


def test_training_after_resharding_has_the_same_losses(saved, resharded) -> None:
    base, pairs = resharded
    for old, new in pairs:
        ours, theirs = read(base / f"{old}-{new}.state"), read(saved / f"{old}.state")
        rounding = 1e-2 if old in BF16 else 1e-6
        assert ours["next loss"] == pytest.approx(theirs["next loss"], rel=rounding)
        assert ours["loss after"] == pytest.approx(theirs["loss after"], rel=rounding)


def test_checkpoint_saved_after_resharding_loads_without_resharding(resharded) -> None:
    """DeepSpeed loads the same state from it, and its `zero_to_fp32` exports the same masters."""
    base, pairs = resharded
    for old, new in pairs:
        state = read(base / f"{old}-{new}.state")
        native = read(base / f"{old}-{new}.native")
        assert not differences(held(state), held(native)), f"{old} -> {new}"
        name = f"{old}-{new}"
        if PROFILES[new]["zero_optimization"]["stage"] == 1 and new in BF16:
            continue  # zero_to_fp32 does not know the format of DeepSpeed's BF16_Optimizer
        exported = get_fp32_state_dict_from_zero_checkpoint(str(base), tag=name)
        manifest = {"world_size": state["world_size"], "zero_stage": state["stage"]}
        ours = Weights(base / name, manifest)
        frozen = set() if state["stage"] == 1 else ours.frozen  # it leaves them out at stage 1
        assert {*ours.shapes, *ours.tied, *ours.buffers, *frozen} == set(exported)
        for parameter, master in exported.items():
            assert torch.equal(master, ours[parameter]), f"{name}: {parameter}"
            assert torch.equal(master, state.get(f"{parameter}: master", master)), name


def test_a_users_own_optimizer_keeps_dtypes_scalars_and_group_states(tmp_path) -> None:
    """From two ranks to one at stage 2, where every step of the three is counted."""
    own = config(2, False, {"type": "Own"}, zero_allow_untested_optimizer=True)
    common = {"config": own, "tied": False, "checkpoint": str(tmp_path / "saved")}
    run(2, [{"do": "save", "state": str(tmp_path / "before"), **common}], tmp_path)
    more = {"world_size": 2, "stage": 2, "again": str(tmp_path / "again")}
    run(1, [{"do": "reshard", "state": str(tmp_path / "after"), **more, **common}], tmp_path)
    before, after = read(tmp_path / "before"), read(tmp_path / "after")
    assert not differences(held(after), held(before))
    assert after["group states"] == [[3, 3.5], [3, 3.5]] and after["steps"] == {3.0}
    assert after["decays"] == [pytest.approx(0.027)] * 2
    assert after["dtypes"] == {"average": torch.bfloat16, "signs": torch.int32}
    assert after["loss after"] == pytest.approx(before["loss after"], rel=1e-6)


def test_weights_are_computed_from_the_masters_after_each_load(tmp_path) -> None:
    """A rank may load the file of weights that another rank wrote."""
    names, jobs = ("zero1", "zero2", "zero2-fp32"), []
    save(names, tmp_path)
    for name in names:
        path = tmp_path / name / "mp_rank_00_model_states.pt"
        content = torch.load(path, weights_only=False)
        for key in content["module"].keys() - {*content["buffer_names"], "shift"}:
            content["module"][key].zero_()
        torch.save(content, path)
        job = {"do": "load", "config": PROFILES[name], "tied": tied(name)}
        jobs.append(job | {"checkpoint": str(tmp_path / name), "state": str(tmp_path / name / "s")})
    run(2, jobs, tmp_path)
    for name in names:
        before, after = read(tmp_path / f"{name}.state"), read(tmp_path / name / "s")
        assert not differences(held(after), held(before)), name


def test_states_that_cannot_be_resharded_are_refused_before_the_engine_is_modified(
    tmp_path,
) -> None:
    """A state of another shape or dtype, one beside the others, another model, a missing shard."""
    jobs, saved = [], save(["zero3"], tmp_path)
    changes = ("state", "dtype", "beside", "model", "shard")
    for change in changes:
        directory = tmp_path / change
        shutil.copytree(saved / "zero3", directory)
        shard = directory / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        if change in ("state", "dtype", "beside"):
            content = torch.load(shard, weights_only=False)
            base = content["optimizer_state_dict"]["optimizer_state_dict"]
            if change == "state":
                base["state"][0]["exp_avg"] = torch.zeros(3, 5)
            elif change == "dtype":
                base["state"][1]["exp_avg"] = base["state"][1]["exp_avg"].bfloat16()
            else:
                base["ema"] = {0: 0.5}
            torch.save(content, shard)
        elif change == "shard":
            shard.unlink()
        jobs.append(
            {
                "do": "reshard",
                "config": PROFILES["zero2"],
                "tied": change == "model",  # the checkpoint is untied
                "checkpoint": str(directory),
                "world_size": SOURCE_RANKS,
                "stage": 3,
                "state": str(tmp_path / f"{change}.state"),
            }
        )
    run(1, jobs, tmp_path)
    found = {change: read(tmp_path / f"{change}.state") for change in changes}
    assert (
        "state.exp_avg: torch.bfloat16 in one group, torch.float32 in another"
        in found["dtype"]["refused"]
    )
    assert "ema: kept by the optimizer beside its state" in found["beside"]["refused"]
    assert "rank_1_mp_rank_00_optim_states.pt: state.exp_avg: (3, 5)" in found["state"]["refused"]
    assert (
        "model_states.pt: param_shapes: differ from this model: head" in found["model"]["refused"]
    )
    assert "optimizer states for ranks [0], but its manifest lists 2" in found["shard"]["refused"]
    assert all(state["untouched"] for state in found.values())
