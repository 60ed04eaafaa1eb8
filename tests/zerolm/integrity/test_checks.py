"""Flipped bits are found on two ranks, and named; replays change no bit of a run."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.end_to_end.recipe import profile, recipe
from tests.launching import LLAMA, run_workers, write_json, write_shards
from zerolm.common.errors import CorruptionError
from zerolm.integrity import checks
from zerolm.integrity.passes import Pass

WORKER = Path(__file__).with_name("integrity_worker.py")
CHECKED = ["--corruption_checks", "--replay_interval", 3]
WITHOUT: list[str] = []


def run_jobs(
    directory: Path,
    profiles: dict[str, Path],
    jobs: list[tuple],
    ranks: int = 2,
    dropout: float = 0.1,
) -> list[dict]:
    """Run jobs (profile, flags, flip, fault); return what the worker reports of each."""
    model = write_json(directory / "model.json", {**LLAMA, "attention_dropout": dropout})
    corpus = write_shards(directory / "corpus", num_documents=60)
    written = []
    for number, (name, more, flip, fault) in enumerate(jobs):
        run_dir = directory / f"run-{number}"
        flags = recipe(model, corpus, run_dir, profiles[name], 100, 2)
        flags += ["--wandb", "off", "--log_interval", 100, *more]
        written.append({"flags": [str(each) for each in flags], "flip": flip, "fault": fault})
    report = directory / "report.json"
    path = write_json(directory / "jobs.json", written)
    run_workers(ranks, WORKER, path, report, timeout=600)
    return json.loads(report.read_text())


def names(found: dict) -> list[str]:
    return [event["event"] for event in found["events"]]


@pytest.mark.parametrize(
    ("stage", "bf16", "places"),
    [
        (2, False, ("exp_avg_sq", "batch")),
        pytest.param(2, True, ("weights", "master weights", "exp_avg"), marks=pytest.mark.soak),
        pytest.param(
            3, True, ("weights", "master weights", "exp_avg", "batch"), marks=pytest.mark.soak
        ),
    ],
    ids=["zero2-fp32", "zero2-bf16", "zero3-bf16"],
)
def test_a_flipped_bit_is_found_named_and_never_learned_from(tmp_path, stage, bf16, places) -> None:
    profiles = {"zero": profile(tmp_path / "zero.json", stage, bf16)}
    jobs = [("zero", WITHOUT, None, ""), ("zero", CHECKED, None, "")]
    jobs += [("zero", CHECKED, (place, 1, 4), "") for place in places]
    # In the first pass of the first step, which is computed twice: on rank 1, then in its sum.
    jobs += [("zero", CHECKED, ("activation", 1, 1), "")]
    jobs += [("zero", CHECKED, None, "step.backward:1:1:flip")]
    plain, checked, *flipped, activation, gradient = run_jobs(tmp_path, profiles, jobs)

    assert checked["final"] == plain["final"] and "replayed" in names(checked)
    assert not {"corrupted", "corrupt_step", "nondeterministic"} & {*names(checked)}
    for place, found in zip(places, flipped, strict=True):
        message, guilty, code = found["error"]
        assert [each["rank"] for each in guilty] == [1] and code == 77
        assert message.startswith("step 4: ")
        assert ("token ids" if place == "batch" else f"{place}, in model.") in message
    for found in (activation, gradient):
        assert found["error"] is None and found["final"] == plain["final"]
        (event,) = (each for each in found["events"] if each["event"] == "corrupt_step")
        assert [each["rank"] for each in event["places"]] == [1] and event["step"] == 1
    assert len(event["parameters"]) == 1


@pytest.mark.parametrize(
    ("ranks", "stage", "bf16"),
    [(2, 1, False), pytest.param(4, 1, True, marks=pytest.mark.soak)],
    ids=["2x1", "2x2"],
)
def test_the_pipeline_stage_that_computes_wrongly_is_named(tmp_path, ranks, stage, bf16) -> None:
    """Others get wrong states or gradients from it. Copies of weights are those of a stage."""
    zero = json.loads(profile(tmp_path / "zero.json", stage, bf16).read_text())
    profiles = {"stages": write_json(tmp_path / "ds.json", {**zero, "pipeline": {"stages": 2}})}
    last = ranks - 1
    jobs = [("stages", WITHOUT, None, ""), ("stages", CHECKED, None, "")]
    faulty = [("activation", 0), ("activation", last), ("gradient", 0), ("gradient", last)]
    jobs += [("stages", CHECKED, (place, rank, 1), "") for place, rank in faulty]
    jobs += [("stages", CHECKED, ("exp_avg", last, 4), "")]
    jobs += [("stages", CHECKED, ("copy", last, 4), "")] * (ranks > 2)
    plain, checked, *found = run_jobs(tmp_path, profiles, jobs, ranks, dropout=0.0)
    assert checked["final"] == plain["final"] and "replayed" in names(checked)
    assert not {"corrupted", "corrupt_step", "nondeterministic"} & {*names(checked)}
    for (_, rank), each in zip(faulty, found, strict=False):
        assert each["error"] is None and each["final"] == plain["final"]
        (event,) = (event for event in each["events"] if event["event"] == "corrupt_step")
        assert [place["rank"] for place in event["places"]] == [rank]
    message, guilty, _ = found[4]["error"]
    assert [each["rank"] for each in guilty] == [last] and "exp_avg, in model." in message
    if ranks > 2:  # the two copies of a stage
        message, guilty, _ = found[5]["error"]
        assert [each["rank"] for each in guilty] == [2, 3] and "different copies" in message


@pytest.mark.soak
def test_replays_change_no_bit_at_any_stage_precision_and_offload(tmp_path) -> None:
    profiles = {
        f"zero{stage}-{'bf16' if bf16 else 'fp32'}": profile(
            tmp_path / f"{stage}{bf16}.json", stage, bf16
        )
        for stage in (1, 2, 3)
        for bf16 in (False, True)
    }
    for stage in (1, 2, 3):
        offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        config = {"zero_optimization": offload, "bf16": {"enabled": True}}
        profiles[f"zero{stage}-offload"] = write_json(tmp_path / f"offload{stage}.json", config)
    often = ["--corruption_checks", "--replay_interval", 1]
    jobs = [(name, more, None, "") for name in profiles for more in (WITHOUT, often)]
    found = run_jobs(tmp_path, profiles, jobs)
    for name, plain, checked in zip(profiles, found[::2], found[1::2], strict=True):
        assert checked["final"] == plain["final"], name
        assert names(checked).count("replayed") == 5, name


@pytest.mark.parametrize("apart", [0.5, math.nan])
def test_kernels_without_a_fixed_order_do_not_end_a_run_at_its_first_replay(apart, monkeypatch):
    """The norm of a key's bias is noise; and no norm is known to be until a pass is repeated."""
    monkeypatch.setattr(checks, "gather_objects", lambda value: [value])
    integrity = object.__new__(checks.Checks)
    integrity._engine = SimpleNamespace(global_rank=0, device=torch.device("cpu"))
    integrity._discard, integrity._corrections = lambda: None, 0
    result = SimpleNamespace(micro_losses=None)

    def tolerance_after(norms, started):
        passes = iter([Pass([], [n], [], [], [n], each) for n, each in enumerate(norms)])
        integrity._started, integrity._tolerance = started, 0.0
        integrity._recorder = SimpleNamespace(
            begin=lambda: None, end=lambda: None, result=lambda losses: next(passes)
        )
        integrity._replay(1, checks.SPOT, result, lambda: result)
        return integrity._tolerance

    noise = [[1.0, 1e-9], [1.0, 3e-9], [1.0, 2e-9]]
    assert tolerance_after(noise, True) == pytest.approx(10 * 2e-6)
    broken = [[1.0], [1.0 + apart], [1.0 + 2 * apart]]
    with pytest.raises(CorruptionError, match="three results"):
        tolerance_after(broken, True)
    with pytest.raises(CorruptionError) if math.isnan(apart) else nullcontext():
        assert tolerance_after(broken, False) == 10 * checks.NONDETERMINISM
