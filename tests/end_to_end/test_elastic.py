"""A run resumes on another world size, ZeRO stage or offload, with the same result.

The reference is an uninterrupted run on the topology of the first phase.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.end_to_end.recipe import BATCH, STEP_TOKENS, recipe
from tests.end_to_end.run_digest import newest_checkpoint
from tests.launching import LLAMA, events, rows, run_ranks, write_json
from tests.ledger import read_sequences
from zerolm.checkpoint.checksums import checksum_file
from zerolm.checkpoint.manifest import manifest_digest
from zerolm.common.errors import ConfigError
from zerolm.preflight import check

STEPS = 16
SYNCHRONOUS = ["--no-async_checkpoint"]  # each is published before the next step starts
CHANGES = (4, 8, 12)  # steps after which the topology changes
# Relative tolerance of a loss. Sums over ranks are in another order: float32 rounds them by 1e-7,
# and now and then a bf16 weight is rounded to its neighbour.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-4}


def profile(path: Path, stage: int, precision: str, offload: str = "none") -> Path:
    zero: dict = {"stage": stage}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
    return write_json(
        path,
        {
            "zero_optimization": zero,
            "bf16": {"enabled": precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "gradient_clipping": 1.0,
        },
    )


def run_flags(model, corpus, run_dir, json_file, *more: object) -> list[object]:
    arguments = recipe(model, corpus, run_dir, json_file, STEPS, micro=2)
    return [*arguments, "--wandb", "off", "--checkpoint_keep", 9, *SYNCHRONOUS, *more]


def run(base: Path, name: str, ranks: int, arguments, *, fault: str = ""):
    """Run a phase with a ledger of its own, until `fault` if there is one."""
    ledger = base / f"ledger-{name}"
    ledger.mkdir()
    more = {"FAULT": fault} if fault else {}
    return run_ranks(ranks, *arguments, ZEROLM_LEDGER=str(ledger), **more)


def trained_sequences(base: Path, first: int, last: int, name: str) -> list[list[int]]:
    """Return the sequences of each step of a phase."""
    steps = read_sequences(base / f"ledger-{name}")
    return [steps[step] for step in range(first, last + 1)]


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory) -> Path:
    """A Llama with tied embeddings, and a vocabulary size that no world size here divides."""
    config = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 515}
    return write_json(tmp_path_factory.mktemp("tied") / "llama.json", config)


# (ranks, stage, offload) of each phase; all but the last are killed two steps after a save.
CHAINS = {
    "fp32": [(1, 2, "none"), (2, 3, "cpu")],
    "fp32-up-and-down": [(2, 2, "none"), (4, 3, "cpu"), (1, 2, "none")],
    "bf16": [(2, 2, "none"), (4, 3, "none"), (1, 2, "none"), (2, 3, "cpu")],
}


@pytest.fixture(
    scope="module",
    params=[
        "fp32", pytest.param("fp32-up-and-down", marks=pytest.mark.soak),
        pytest.param("bf16", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def chain(request, tmp_path_factory, llama, tied_llama, corpus):
    """Return (directory of a run over several topologies and of its reference, precision, them)."""
    precision = request.param.partition("-")[0]
    base = tmp_path_factory.mktemp(f"chain-{request.param}")
    model = tied_llama if precision == "fp32" else llama
    phases = CHAINS[request.param]
    ranks, stage, offload = phases[0]
    flags = run_flags(
        model, corpus, base / "reference",
        profile(base / "reference.json", stage, precision, offload), "--checkpoint_interval", STEPS,
    )  # fmt: skip
    done = run(base, "reference", ranks, flags)
    assert done.returncode == 0, done.stdout[-4000:]
    for number, (ranks, stage, offload) in enumerate(phases):
        json_file = profile(base / f"{number}.json", stage, precision, offload)
        arguments = run_flags(
            model, corpus, base / "run", json_file, "--checkpoint_interval", 4,
            "--micro_batch_size", 2 if ranks < 4 else 1,
        )  # fmt: skip
        fault = f"step.begin:0:{CHANGES[number] + 3}:kill" if number < len(phases) - 1 else ""
        ended = run(base, str(number), ranks, arguments, fault=fault)
        assert (ended.returncode == 0) == (not fault), ended.stdout[-4000:]
        (base / f"log-{number}").write_text(ended.stdout)
    return base, precision, phases


def test_each_sequence_is_trained_on_exactly_once(chain) -> None:
    base, _, phases = chain
    edges = [0, *CHANGES[: len(phases) - 1], STEPS]
    steps: list[list[int]] = []
    for number in range(len(edges) - 1):
        steps += trained_sequences(base, edges[number] + 1, edges[number + 1], str(number))
    assert sorted(id for step in steps for id in step) == list(range(STEPS * BATCH))
    assert steps == trained_sequences(base, 1, STEPS, "reference")


def test_losses_equal_those_of_an_uninterrupted_run(chain) -> None:
    base, precision, _ = chain
    ours, reference = rows(base / "run", "train/loss"), rows(base / "reference", "train/loss")
    assert list(ours) == list(reference) == list(range(1, STEPS + 1))
    until = CHANGES[0] + 1  # the first step after a resume has the weights of the checkpoint
    early = {step: loss for step, loss in ours.items() if step < until}
    assert early == {step: loss for step, loss in reference.items() if step < until}
    for step, loss in ours.items():
        assert loss == pytest.approx(reference[step], rel=TOLERANCE[precision]), step
    rates = (rows(base / name, "train/learning_rate") for name in ("run", "reference"))
    assert next(rates) == next(rates)


def test_every_change_is_logged_and_the_probe_agrees(chain) -> None:
    base, _, phases = chain
    resumes = events(base / "run", "resume")
    assert [event["step"] for event in resumes] == list(CHANGES[: len(phases) - 1])
    for number, event in enumerate(resumes, start=1):
        before, after = phases[number - 1], phases[number]
        log = (base / f"log-{number}").read_text()
        assert f"world size {before[0]} -> {after[0]}" in event["resharded"]
        assert f"ZeRO stage {before[1]} -> {after[1]}" in event["resharded"] or (
            before[1] == after[1]
        )
        assert "its states will be resharded: world size" in log
        assert "probe loss: " in log and "the saved one" in log


def test_deepspeeds_own_tool_reads_the_last_checkpoint(chain) -> None:
    """Its master weights are close to those of the uninterrupted run."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    base, _, _ = chain
    ours, reference = (
        get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
        for path in (newest_checkpoint(base / "run"), newest_checkpoint(base / "reference"))
    )
    assert set(ours) == set(reference)
    for name, weight in reference.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-3)


class Malicious:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_changed_checkpoint_is_refused_and_runs_no_code(
    chain, tmp_path, llama, tied_llama, corpus
) -> None:
    """Weights that are wrong after loading, and a malicious pickle with a forged hash."""
    base, precision, _ = chain
    model = tied_llama if precision == "fp32" else llama
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    last = newest_checkpoint(base / "run")
    shutil.copytree(base / "run", run_dir)
    for path in (run_dir / "checkpoints").glob("step-*"):
        if path.name != "step-00000012":
            shutil.rmtree(path)
    assert last.name == "step-00000016"
    only = run_dir / "checkpoints" / "step-00000012"
    arguments = run_flags(model, corpus, run_dir, profile(tmp_path / "ds.json", 2, precision))

    wrong = run_ranks(1, *arguments, FAULT="resume.probe:0:*:x10")
    assert wrong.returncode == 2, wrong.stdout[-3000:]
    assert "probe.loss" in wrong.stdout and "on rank 0 after loading" in wrong.stdout

    victim = next(only.glob("*optim_states.pt"))
    torch.save(Malicious(mark), victim)
    manifest = json.loads((only / "MANIFEST.json").read_text())
    for entry in manifest["files"]:
        if entry["file"] == victim.name:
            entry["size_bytes"] = victim.stat().st_size
            entry["xxh3_128"] = checksum_file(victim).digest
    write_json(only / "MANIFEST.json", {**manifest, "digest": manifest_digest(manifest)})
    forged = run_ranks(1, *arguments)
    assert forged.returncode == 2, forged.stdout[-3000:]
    assert f"{victim}: is damaged, or contains objects" in forged.stdout
    assert "posix.mkdir" in forged.stdout and "Traceback" not in forged.stdout
    assert not mark.exists()


def test_a_run_with_changed_settings_resumes_only_if_they_are_accepted(
    chain, tmp_path, llama, tied_llama, corpus
):
    base, precision, _ = chain
    model = tied_llama if precision == "fp32" else llama
    run_dir = tmp_path / "run"
    shutil.copytree(base / "run", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000016")
    json_file = profile(tmp_path / "ds.json", 2, precision)
    changed = run_flags(model, corpus, run_dir, json_file, "--seed", 12, "--seq_len", 16)
    with pytest.raises(ConfigError) as refused:
        check.check([str(flag) for flag in changed], {})
    for line in ("settings.seed: 11 -> 12", "settings.seq_len: 32 -> 16", "--accept_changes"):
        assert line in str(refused.value)
    assert events(run_dir, "done"), "nothing was written"

    ledger = tmp_path / "ledger"
    ledger.mkdir()
    accepted = run_ranks(1, *changed, "--accept_changes", ZEROLM_LEDGER=str(ledger))
    assert accepted.returncode == 0, accepted.stdout[-3000:]
    (event,) = events(run_dir, "changed")
    assert event["changes"] == {"settings.seed": [11, 12], "settings.seq_len": [32, 16]}
    sequences = sorted(id for step in read_sequences(ledger).values() for id in step)
    position = 12 * BATCH * 32 // 16  # the same number of tokens
    assert sequences == list(range(position, STEPS * STEP_TOKENS // 16))
    assert "accept_changes" not in json.loads((run_dir / "run.json").read_text())["settings"]


@pytest.mark.soak
@pytest.mark.parametrize("stage", [2, 3])
def test_options_that_were_changed_hold_with_and_without_resharding(
    tmp_path, llama, corpus, stage
) -> None:
    """DeepSpeed loads those of the checkpoint, if the topology is the same."""
    config, other = (
        profile(tmp_path / f"zero{each}.json", each, "fp32") for each in (stage, 5 - stage)
    )
    more = ["--checkpoint_interval", 4]
    changes = ["--weight_decay", 0.7, "--beta1", 0.8, "--beta2", 0.9, "--accept_changes"]
    first = run_flags(llama, corpus, tmp_path / "same", config, *more)
    stopped = run(tmp_path, "first", 1, first, fault="step.begin:0:7:kill")
    assert stopped.returncode != 0, stopped.stdout[-4000:]
    shutil.copytree(tmp_path / "same", tmp_path / "resharded")
    losses = []
    for name, json_file in (("same", config), ("resharded", other)):
        flags = run_flags(llama, corpus, tmp_path / name, json_file, *more, *changes)
        done = run(tmp_path, name, 1, flags)
        assert done.returncode == 0, done.stdout[-4000:]
        (path,) = newest_checkpoint(tmp_path / name).glob("*_optim_states.pt")
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]  # our own file
        state = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        groups = [(each["weight_decay"], *each["betas"]) for each in state["param_groups"]]
        assert groups == [(0.7, 0.8, 0.9), (0.0, 0.8, 0.9)]
        losses.append(rows(tmp_path / name, "train/loss"))
    same, resharded = losses
    assert len(same) == STEPS
    assert same == pytest.approx(resharded, rel=TOLERANCE["fp32"])
