"""Pipeline stages give the curve, metrics, weights and files of a whole model.

The reference is plain PyTorch in one process, or ZeRO-1 without stages for what that does not have:
separate documents, the average of the weights, validation.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.end_to_end import (
    plain_optimizers,
    plain_pytorch,
    run_digest,
    runs_in_one_process,
    test_optimizers,
)
from tests.end_to_end.killed_runs import stopped_and_resumed
from tests.end_to_end.recipe import PEAK, STEP_TOKENS, WARMUP_TOKENS, recipe
from tests.end_to_end.recipe import profile as profile_of
from tests.end_to_end.test_expert_parallel import metrics
from tests.end_to_end.whole_exports import require_whole
from tests.launching import LLAMA, events, rows, run_ranks, write_json
from zerolm.__main__ import main

STEPS = 10
DEEP = {**LLAMA, "num_hidden_layers": 4}
TIED = {**DEEP, "tie_word_embeddings": True}
UNEVEN = {**DEEP, "num_hidden_layers": 5}
MODELS = {"untied": DEEP, "tied": TIED, "uneven": UNEVEN}
LIMITS = {
    False: {"train/loss": 1e-7, "train/grad_norm": 1e-5, "train/param_norm": 1e-6},
    True: {"train/loss": 5e-3, "train/grad_norm": 5e-2, "train/param_norm": 1e-3},
}


def flags(base: Path, corpus: Path, run: str, model: dict, stage: int, stages: int, *more,
          bf16: bool = False, **keys: Any) -> list[object]:  # fmt: skip
    """Return pretrain.py's flags for a run in `base / run`; 1 stage is the whole model.

    Args:
        keys: further ones of DeepSpeed's JSON.
    """
    name = f"{model['num_hidden_layers']}-{model['tie_word_embeddings']}"
    config = write_json(base / f"{name}.json", model)
    file = profile_of(base / f"{run}.json", stage, bf16)
    if stages > 1:
        keys["pipeline"] = {"stages": stages}
    write_json(file, {**json.loads(file.read_text()), **keys})
    found = recipe(config, corpus, base / run, file, STEPS, 1)
    return [
        *found, "--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off", *more
    ]  # fmt: skip


@pytest.fixture(scope="session")
def reference(corpus):
    known: dict[str, list[plain_pytorch.Step]] = {}

    def curve(name: str, bf16: bool = False):
        if (key := f"{name} {bf16}") not in known:
            known[key] = plain_pytorch.train(MODELS[name], corpus, steps=STEPS, bf16=bf16)
        return known[key]

    return curve


def differences(run_dir: Path, curve: list[plain_pytorch.Step]) -> dict[str, float]:
    """Return the largest relative difference of each metric from plain PyTorch."""
    expected = {
        "train/loss": [step.loss for step in curve],
        "train/grad_norm": [step.grad_norm for step in curve],
        "train/param_norm": [step.param_norms[""] for step in curve],
        "train/update_ratio": [step.update_ratios[""] for step in curve],
    }
    expected |= {
        f"train/{what}/{block}": [getattr(step, of)[block] for step in curve]
        for what, of in (("param_norm", "param_norms"), ("update_ratio", "update_ratios"))
        for block in curve[0].param_norms
        if block
    }
    found = {}
    for key, values in expected.items():
        ours = np.array([*rows(run_dir, key).values()])
        assert len(ours) == STEPS, key
        found[key] = float(np.abs(ours / np.array(values) - 1).max())
    return found


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [
        (2, 2),
        pytest.param(4, 2, marks=pytest.mark.soak),
        pytest.param(4, 4, marks=pytest.mark.soak),
    ],
    ids=["2x1", "2x2", "4x1"],
)
def test_a_run_equals_plain_pytorch(tmp_path, corpus, reference, ranks, stages) -> None:
    """Losses, norms of gradients, weights and updates; untied and tied, at ZeRO-1 and 2."""
    cases = [
        ("untied", 1, False), ("untied", 2, False), ("tied", 1, False), ("uneven", 1, False),
        ("untied", 1, True), ("untied", 2, True), ("tied", 1, True),
    ]  # fmt: skip
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{name}-{stage}-{bf16}", MODELS[name], stage, stages, bf16=bf16
            )
        }
        for name, stage, bf16 in cases
    ]
    printed = runs_in_one_process.launch(jobs, tmp_path, ranks)
    assert f"{ranks // stages} data parallel x {stages} stages" in printed
    for name, stage, bf16 in cases:
        curve = reference(name, bf16)
        found = differences(tmp_path / f"{name}-{stage}-{bf16}", curve)
        print(f"{name} ZeRO-{stage} {'bf16' if bf16 else 'fp32'}:", found)
        assert {key: each for key, each in found.items() if each > LIMITS[bf16].get(key, 1)} == {}


@pytest.mark.soak
def test_compiled_blocks_of_stages_equal_plain_pytorch(tmp_path, corpus, reference) -> None:
    """As close as a compiled whole model's."""
    cases = [
        ("untied", 1, False, ("--gradient_checkpointing", "full")), ("tied", 1, False, ()),
        ("uneven", 2, False, ()), ("untied", 2, True, ()),
    ]  # fmt: skip
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{name}-{stage}-{bf16}-of-{stages}", MODELS[name], stage, stages,
                "--compile", *more, bf16=bf16,
            )
        }
        for stages in (1, 2)  # once an engine had stages, DeepSpeed builds no other
        for name, stage, bf16, more in cases
    ]  # fmt: skip
    printed = runs_in_one_process.launch(jobs, tmp_path)
    assert "compile: 2 blocks (LlamaDecoderLayer) on the first stage" in printed
    assert "graph breaks" not in printed
    for name, stage, bf16, _ in cases:
        whole, divided = (
            differences(tmp_path / f"{name}-{stage}-{bf16}-of-{stages}", reference(name, bf16))
            for stages in (1, 2)
        )
        print(f"{name} ZeRO-{stage} {'bf16' if bf16 else 'fp32'}:", whole, divided)
        most = {key: max(limit, whole[key]) for key, limit in LIMITS[bf16].items()}
        assert {key: e for key, e in divided.items() if e > most.get(key, 1)} == {}


def test_initial_weights_are_those_of_a_whole_model(tmp_path, corpus) -> None:
    """The fingerprint is of all bits; a stage allocates and computes only what it has."""
    prints = []
    for stages in (1, 2):
        arguments = flags(tmp_path, corpus, f"of-{stages}", TIED, 1, stages)
        printed = runs_in_one_process.launch([{"flags": arguments, "until": 1}], tmp_path)
        prints += set(re.findall(r"(\d+ parameters .*fingerprint [0-9a-f]+)", printed))
    assert len(prints) == 2 and prints[0] == prints[1]


class Case(NamedTuple):
    """What is trained in stages and as a whole model.

    Attributes:
        keys: of DeepSpeed's JSON.
        reference: arguments of `plain_pytorch.train`; None if that has no reference for it.
    """

    model: str
    stage: int
    bf16: bool = False
    more: tuple[object, ...] = ()
    keys: Mapping[str, Any] = MappingProxyType({})
    reference: dict[str, Any] | None = None


AGC = {"more": ("--agc", 0.01), "reference": {"agc": 0.01}}
QK_CLIP = {"more": ("--qk_clip", 0.02), "reference": {"qk_clip": 0.02}}
MUON: dict[str, Any] = {
    "keys": {
        "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02}}, "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
    },
    "reference": {"optimizer_of": plain_optimizers.muon(0.02 / PEAK), "clipping": 0.0},
}  # fmt: skip
OWN: dict[str, Any] = {
    "keys": {"optimizer": test_optimizers.OWN, "zero_allow_untested_optimizer": True},
    "reference": {"optimizer_of": plain_optimizers.rmsprop(0.6)},
}
NADAM = {"keys": {"optimizer": {"type": "NAdam"}, "zero_allow_untested_optimizer": True}}
COMPLETEP = {
    "more": ("--parametrization", "completep", "--base_hidden_size", 48, "--base_layers", 1)
}
CASES = {
    "agc": Case("tied", 1, **AGC),
    "agc-zero2": Case("uneven", 2, **AGC),
    "agc-bf16": Case("tied", 1, True, **AGC),
    "qk_clip": Case("uneven", 1, **QK_CLIP),
    "muon": Case("tied", 1, **MUON),
    "muon-zero2": Case("uneven", 2, **MUON),
    "own": Case("tied", 1, **OWN),
    "own-zero2": Case("untied", 2, **OWN),
    "nadam": Case("tied", 1, **NADAM),
    "completep": Case("untied", 1, **COMPLETEP),
    "completep-zero2": Case("uneven", 2, **COMPLETEP),
    "completep-bf16": Case("untied", 1, True, **COMPLETEP),
}


SHORT = ("agc", "muon")


@pytest.mark.parametrize(
    ("ranks", "divisions", "name"),
    [
        *((2, (2,), name) for name in SHORT),
        *(pytest.param(4, (2, 4), name, marks=pytest.mark.soak) for name in CASES),
    ],
)
def test_optimizers_and_clipping_equal_plain_pytorch_and_a_whole_model(
    tmp_path, corpus, ranks, divisions, name
) -> None:
    """With four stages, those in the middle lack the parameter groups of embeddings and head. Runs
    that are stopped and resumed have the same bits.
    """
    model, stage, bf16, more, keys, reference = CASES[name]
    jobs = []
    for stages in (1, *divisions):  # once an engine had stages, DeepSpeed builds no other
        job = {
            "flags": flags(
                tmp_path, corpus, f"of-{stages}", MODELS[model], stage, stages, *more,
                bf16=bf16, **keys,
            ),
            "exact": name.startswith("muon"),
        }  # fmt: skip
        jobs.append(job)
    run = ("--run_dir", tmp_path / "resumed")
    jobs += stopped_and_resumed({**job, "flags": [*job["flags"], *run]}, STEPS // 2)
    runs_in_one_process.launch(jobs, tmp_path, ranks)
    acts = {"agc": "train/agc_clipped", "qk_clip": "train/clipped_heads"}
    if (key := acts.get(name.partition("-")[0])) is not None:
        assert max(rows(tmp_path / "of-1", key).values()) > 0
    wrong = []
    for stages in divisions:
        apart = largest_differences(*(metrics(tmp_path / f"of-{each}") for each in (1, stages)))
        if reference is not None:
            curve = plain_pytorch.train(MODELS[model], corpus, steps=STEPS, bf16=bf16, **reference)
            losses = np.array([*rows(tmp_path / f"of-{stages}", "train/loss").values()])
            expected = np.array([step.loss for step in curve])
            apart["plain PyTorch's loss"] = float(np.abs(losses / expected - 1).max())
        shown = {
            key: f"{each:.0e}" for key, each in apart.items() if each and "/layers." not in key
        }
        print(f"{name}, {ranks} ranks, {stages} stages:", shown)
        limits = (5e-3, 5e-2) if bf16 else (1e-6, 1e-4)
        wrong += [
            f"{key} {each:.1e}" for key, each in apart.items() if each > limits["loss" not in key]
        ]
    assert not wrong, "\n".join(wrong)
    one, other = tmp_path / f"of-{divisions[-1]}", tmp_path / "resumed"
    assert rows(one, "train/loss") == rows(other, "train/loss")
    files = (run_digest.tensors(run_digest.newest_checkpoint(each)) for each in (one, other))
    assert next(files) == next(files)


def largest_differences(whole: dict, divided: dict) -> dict[str, float]:
    """Return the largest relative difference of each metric over all steps."""
    divided = {key: each for key, each in divided.items() if not key[1].startswith("stages/")}
    assert whole.keys() == divided.keys() and len(whole) > 12
    found: dict[str, float] = {}
    for (step, key), each in whole.items():
        difference = abs(divided[step, key] - each) / max(abs(each), 1e-9)
        found[key] = max(found.get(key, 0.0), difference)
    return found


FEATURES = (
    "--ema_tokens", 4 * STEP_TOKENS, "--document_mask", "--z_loss", 0.01, "--eval_interval", 5,
    "--eval_tokens", 512, "--loss_by_position",
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "stage", "more"),
    [
        ("untied", 2, (*FEATURES, "--gradient_checkpointing", "full")),
        ("tied", 1, (*FEATURES, "--gradient_checkpointing", "selective")),
        ("untied", 1, ("--loss_chunk_tokens", 7, "--z_loss", 0.01)),
    ],
    ids=["untied", "tied", "chunks"],
)
def test_all_metrics_with_features_are_those_of_a_whole_model(
    tmp_path, corpus, held_out, name, stage, more
) -> None:
    """All but times, sizes and the noise scale, which no rank can measure alone."""
    more = (*more, "--val_data", held_out)
    for stages in (1, 2):
        arguments = flags(tmp_path, corpus, f"of-{stages}", MODELS[name], stage, stages, *more)
        runs_in_one_process.launch([{"flags": arguments}], tmp_path, 4)
    whole, divided = (metrics(tmp_path / f"of-{stages}") for stages in (1, 2))
    divided = {key: each for key, each in divided.items() if not key[1].startswith("stages/")}
    assert whole.keys() == divided.keys() and len(whole) > 12
    wrong = {
        key: (each, divided[key])
        for key, each in whole.items()
        if not np.allclose(each, divided[key], rtol=1e-6 if "loss" in key[1] else 1e-4)
    }
    assert not wrong, wrong


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, False), (1, True)])
def test_a_refused_step_leaves_every_stage_as_it_was(tmp_path, corpus, stage, bf16) -> None:
    """A step whose loss is not finite, one whose gradient is not, and one with a high loss."""
    fault = "step.backward:{0}:10:nan,step.backward:{0}:14:inf,step.backward:{0}:20:x10"
    found, skipped = {}, {}
    for stages in (1, 2):  # the last rank computes losses
        arguments = flags(
            tmp_path, corpus, f"of-{stages}", DEEP, stage, stages, "--spike_window", 16,
            "--cooldown_after", 0, "--total_tokens", 24 * STEP_TOKENS, bf16=bf16,
        )  # fmt: skip
        runs_in_one_process.launch(
            [{"flags": arguments}], tmp_path, stages, FAULT=fault.format(stages - 1)
        )
        found[stages] = metrics(tmp_path / f"of-{stages}")
        skipped[stages] = events(tmp_path / f"of-{stages}", "step_skipped")
    assert [each["step"] for each in skipped[1]] == [10, 14, 20]
    assert [each["step"] for each in skipped[2]] == [10, 14, 20]
    limit = 5e-3 if bf16 else 1e-6
    for key in found[1]:
        if key[1] in ("train/loss", "train/param_norm"):
            assert found[2][key] == pytest.approx(found[1][key], rel=limit, nan_ok=True), key


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "stage", "bf16"),
    [("tied", 1, True), ("untied", 2, False), ("tied", 1, False)],
    ids=["zero1-bf16-tied", "zero2", "zero1-tied"],
)
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path, corpus, name, stage, bf16) -> None:
    found = {}
    for run, fault in (("uninterrupted", {}), ("killed", {"FAULT": "step.begin:1:9:kill"})):
        (tmp_path / run).mkdir()
        arguments = flags(
            tmp_path / run, corpus, "run", MODELS[name], stage, 2, "--checkpoint_interval", 3,
            bf16=bf16,
        )  # fmt: skip
        done = run_ranks(4, *arguments, **fault)
        if fault:
            assert done.returncode != 0
            done = run_ranks(4, *arguments)
            assert "resume:" in done.stdout, done.stdout[-3000:]
            assert "bit-identical to the saved one" in done.stdout
        assert done.returncode == 0, done.stdout[-4000:]
        found[run] = run_digest.digest(tmp_path / run / "run")
    assert run_digest.differences(found["killed"], found["uninterrupted"]) == []


@pytest.mark.soak
def test_a_killed_run_resumes_from_the_copies_in_memory(tmp_path, corpus) -> None:
    found = {}
    for run, fault in (("uninterrupted", {}), ("killed", {"FAULT": "step.begin:3:8:kill"})):
        (tmp_path / run).mkdir()
        arguments = flags(
            tmp_path / run, corpus, "run", TIED, 1, 2, "--checkpoint_interval", 100,
            "--memory_checkpoint_interval", 3, bf16=True,
        )  # fmt: skip
        done = run_ranks(4, *arguments, **fault)
        if fault:
            assert done.returncode != 0
            done = run_ranks(4, *arguments)
            [resume] = events(tmp_path / run / "run", "resume")
            assert resume["step"] == 6 and "resume: /dev/shm/" in done.stdout, done.stdout[-3000:]
        assert done.returncode == 0, done.stdout[-4000:]
        found[run] = run_digest.digest(tmp_path / run / "run")
    assert run_digest.differences(found["killed"], found["uninterrupted"]) == []


@pytest.mark.soak
def test_a_rollback_and_a_branch_are_those_of_a_whole_model(tmp_path, corpus) -> None:
    found, rolled_back = {}, {}
    for stages in (1, 2):  # the last rank computes losses
        spike = ",".join(f"step.backward:{stages - 1}:{step}:x10" for step in (30, 31, 32))
        arguments = flags(
            tmp_path, corpus, f"trunk-{stages}", DEEP, 1, stages, "--spike_window", 16,
            "--rollback_after", 3, "--rollback_margin", 2, "--cooldown_after", 2,
            "--checkpoint_interval", 10, "--checkpoint_keep", 9, "--schedule", "wsd",
            "--decay_tokens", 4 * STEP_TOKENS, "--total_tokens", 40 * STEP_TOKENS,
        )  # fmt: skip
        done = run_ranks(stages, *arguments, FAULT=spike, FAULT_ONCE=str(tmp_path))
        assert done.returncode == 0, done.stdout[-4000:]
        trunk, branch = tmp_path / f"trunk-{stages}", tmp_path / f"branch-{stages}"
        rolled_back[stages] = [
            (each["to_step"], each["skipped_window"]) for each in events(trunk, "rollback")
        ]
        done = run_ranks(
            stages, "--branch", f"{trunk}@10", "--total_tokens", 16 * STEP_TOKENS, "--run_dir",
            branch,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        found[stages] = {**rows(trunk, "train/loss")}, {**rows(branch, "train/loss")}
    assert rolled_back[1] == rolled_back[2] and len(rolled_back[1]) == 1
    for whole, divided in zip(found[1], found[2], strict=True):
        assert whole.keys() == divided.keys()
        assert [*divided.values()] == pytest.approx([*whole.values()], rel=1e-6)
    assert found[1][1][16] != found[1][0][16]


@pytest.mark.soak
@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_starts_from_existing_weights(tmp_path, corpus, bf16) -> None:
    """In bf16 the masters are the source's float32 values, not rounded ones."""
    source = tmp_path / "source"
    plain_pytorch.initial_model(TIED, 3).save_pretrained(source)
    more = ("--init_from", source)
    for stages in (1, 2):
        arguments = flags(tmp_path, corpus, f"of-{stages}", TIED, 1, stages, *more, bf16=bf16)
        printed = runs_in_one_process.launch([{"flags": arguments}], tmp_path, 4)
        assert "all as in the source, finite" in printed
    whole, divided = (metrics(tmp_path / f"of-{stages}") for stages in (1, 2))
    for key, each in whole.items():
        if key[1] in ("train/loss", "train/param_norm"):
            assert divided[key] == pytest.approx(each, rel=5e-3 if bf16 else 1e-6), key


@pytest.mark.soak
@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_starts_with_the_optimizer_states_of_another(tmp_path, corpus, bf16) -> None:
    """Of a whole model or of one in stages."""
    more = ("--total_tokens", 4 * STEP_TOKENS)
    cases = [(of, stages) for of in (1, 2) for stages in (1, 2)]
    for stages in (1, 2):
        arguments = flags(tmp_path, corpus, f"source-{stages}", TIED, 1, stages, *more, bf16=bf16)
        runs_in_one_process.launch([{"flags": arguments}], tmp_path)
    for stages in (1, 2):
        jobs = []
        for of in (1, 2):
            states = ("--init_from", f"{tmp_path / f'source-{of}'}@4", "--init_optimizer")
            run = f"{of}-to-{stages}"
            arguments = flags(tmp_path, corpus, run, TIED, 1, stages, *more, *states, bf16=bf16)
            jobs.append({"flags": arguments})
        runs_in_one_process.launch(jobs, tmp_path)
    found = [metrics(tmp_path / f"{of}-to-{stages}") for of, stages in cases]
    for key, each in found[0].items():
        if key[1] in ("train/loss", "train/param_norm", "train/update_ratio"):
            values = [one[key] for one in found[1:]]
            assert values == pytest.approx([each] * 3, rel=5e-3 if bf16 else 1e-6), key


@pytest.mark.soak
@pytest.mark.parametrize("rank", [1, 3])
def test_the_stage_that_hangs_is_blamed_and_not_those_that_wait(tmp_path, corpus, rank) -> None:
    """Stages take part in different numbers of transfers, which are no collectives."""
    arguments = flags(tmp_path, corpus, "run", DEEP, 1, 4, "--hang_timeout", "8s")
    done = run_ranks(4, *arguments, FAULT=f"step.backward:{rank}:5:hang")
    assert done.returncode != 0
    [hang] = events(tmp_path / "run", "hang")
    assert [each["rank"] for each in hang["ranks"]] == [rank], hang
    assert "faults.py" in hang["ranks"][0]["doing"], hang
    assert f", stage {rank + 1} of 4) has made no progress" in done.stdout


@pytest.mark.soak
def test_the_stage_of_a_killed_rank_is_named(tmp_path, corpus) -> None:
    """The ranks of a stage are neighbours: of two replicas, rank 2 is the second stage's first."""
    arguments = flags(tmp_path, corpus, "run", DEEP, 1, 2)
    done = run_ranks(4, *arguments, FAULT="step.backward:2:5:kill")
    assert done.returncode != 0
    [lost] = events(tmp_path / "run", "rank_lost")
    assert [(each["rank"], each["stage"]) for each in lost["ranks"]] == [(2, "2 of 2")], lost
    assert re.search(r", stage 2 of 2\) (ended: SIGKILL|has vanished)", done.stdout)


def test_the_watchdog_knows_the_function_in_which_a_stage_waits():
    from zerolm.distributed import pipeline
    from zerolm.watchdog import liveness

    assert hasattr(pipeline, liveness.TRANSFER)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_run_resumes_on_any_topology_and_its_exports_are_whole(
    tmp_path, corpus, reference, name
) -> None:
    """2 x 2, then ZeRO-3 on four ranks, 4 x 1, 1 rank, 2 x 1; exports have the engine's logits."""
    parts = [(4, 1, 2, 2), (4, 3, 1, 4), (4, 1, 4, 6), (1, 1, 1, 8), (2, 1, 2, STEPS)]
    for number, (ranks, stage, stages, until) in enumerate(parts):
        arguments = flags(tmp_path, corpus, "run", MODELS[name], stage, stages)
        printed = runs_in_one_process.launch(
            [{"flags": arguments, "until": until}], tmp_path, ranks
        )
        assert ("its states will be resharded" in printed) == (number > 0)
        out = tmp_path / f"model-{number}"
        assert main(["export", str(tmp_path / "run"), str(out), "--precision", "fp32"]) == 0
    curve = reference(name)
    found = differences(tmp_path / "run", curve)
    print(found)
    assert found["train/loss"] < 1e-6
    require_whole(tmp_path / "run", out, curve)
