"""A run goes on with other ranks, another ZeRO stage or another offload, as if nothing had been.

The oracle is a run that was never interrupted, on the topology of the first phase.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from oracle import newest_checkpoint
from recipe import BATCH, STEP_TOKENS, recipe

from tests.launching import LLAMA, rows, run_ranks, write_json
from zerolm import ledger
from zerolm.checkpoint_directory import digest_of

STEPS = 16
PUBLISHED = ["--no-async_checkpoint"]  # each is there before the next step, however slow the disk
HOPS = (4, 8, 12)  # the steps after which the topology changes
# What a loss may differ by from the oracle's, of it. Sums over ranks are in another order: float32
# rounds them by 1e-7, and bf16 weights take each step to a neighbour now and then.
RELATIVE = {"fp32": 1e-6, "bf16": 1e-4}


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


def words(model, corpus, run_dir, json_file, *more: object) -> list[object]:
    arguments = recipe(model, corpus, run_dir, json_file, STEPS, micro=2)
    return [*arguments, "--wandb", "off", "--checkpoint_keep", 9, *PUBLISHED, *more]


def run(base: Path, name: str, ranks: int, arguments, *, fault: str = ""):
    """Run a phase with a ledger of its own; `fault` ends it."""
    seen = base / f"ledger-{name}"
    seen.mkdir()
    more = {"FAULT": fault} if fault else {}
    return run_ranks(ranks, *arguments, ZEROLM_LEDGER=str(seen), **more)


def merged_ledger(base: Path, first: int, last: int, name: str) -> list[list[int]]:
    """Return the sequences of each step of a phase."""
    steps = ledger.read(base / f"ledger-{name}")
    return [steps[step] for step in range(first, last + 1)]


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory) -> Path:
    """With tied embeddings, and a vocabulary that no number of ranks here divides."""
    config = {**LLAMA, "tie_word_embeddings": True, "vocab_size": 515}
    return write_json(tmp_path_factory.mktemp("tied") / "llama.json", config)


# (ranks, stage, offload) of each phase; each but the last is killed two steps behind its save.
CHAIN = [(2, 2, "none"), (4, 3, "none"), (1, 2, "none"), (2, 3, "cpu")]


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.soak)])
def chain(request, tmp_path_factory, llama, tied_llama, corpus):
    """A run over four topologies and its oracle: (base, precision)."""
    precision = request.param
    base = tmp_path_factory.mktemp(f"chain-{precision}")
    model = tied_llama if precision == "fp32" else llama
    ranks, stage, offload = CHAIN[0]
    whole = words(
        model, corpus, base / "whole", profile(base / "whole.json", stage, precision, offload),
        "--checkpoint_interval", STEPS,
    )  # fmt: skip
    done = run(base, "whole", ranks, whole)
    assert done.returncode == 0, done.stdout[-4000:]
    for number, (ranks, stage, offload) in enumerate(CHAIN):
        json_file = profile(base / f"{number}.json", stage, precision, offload)
        arguments = words(
            model, corpus, base / "run", json_file, "--checkpoint_interval", 4,
            "--micro_batch_size", 2 if ranks < 4 else 1,
        )  # fmt: skip
        fault = f"step.begin:0:{HOPS[number] + 3}:kill" if number < len(HOPS) else ""
        ended = run(base, str(number), ranks, arguments, fault=fault)
        assert (ended.returncode == 0) == (not fault), ended.stdout[-4000:]
        (base / f"log-{number}").write_text(ended.stdout)
    return base, precision


def test_each_sequence_is_seen_exactly_once(chain) -> None:
    base, _ = chain
    edges = [0, *HOPS, STEPS]
    steps: list[list[int]] = []
    for number in range(len(edges) - 1):
        steps += merged_ledger(base, edges[number] + 1, edges[number + 1], str(number))
    assert sorted(id for step in steps for id in step) == list(range(STEPS * BATCH))
    assert steps == merged_ledger(base, 1, STEPS, "whole")


def test_losses_are_those_of_the_oracle(chain) -> None:
    base, precision = chain
    ours, oracle = rows(base / "run", "train/loss"), rows(base / "whole", "train/loss")
    assert list(ours) == list(oracle) == list(range(1, STEPS + 1))
    until = HOPS[0] + 1  # the first step after a hop has the weights of the checkpoint
    early = {step: loss for step, loss in ours.items() if step < until}
    assert early == {step: loss for step, loss in oracle.items() if step < until}
    for step, loss in ours.items():
        assert loss == pytest.approx(oracle[step], rel=RELATIVE[precision]), step
    assert rows(base / "run", "train/learning_rate") == rows(base / "whole", "train/learning_rate")


def test_every_hop_is_said_and_the_probe_agrees(chain) -> None:
    base, _ = chain
    resumes = events(base / "run", "resume")
    assert [event["step"] for event in resumes] == list(HOPS)
    for number, event in enumerate(resumes, start=1):
        before, after = CHAIN[number - 1], CHAIN[number]
        log = (base / f"log-{number}").read_text()
        assert f"world size {before[0]} -> {after[0]}" in event["resharded"]
        assert f"ZeRO stage {before[1]} -> {after[1]}" in event["resharded"] or (
            before[1] == after[1]
        )
        assert "its states will be cut anew: world size" in log
        assert "probe loss: " in log and "as when it was saved" in log


def test_the_last_checkpoint_is_an_ordinary_one(chain) -> None:
    """The masters that a third program reads from it are near the oracle's."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    base, _ = chain
    ours, oracle = (
        get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
        for path in (newest_checkpoint(base / "run"), newest_checkpoint(base / "whole"))
    )
    assert set(ours) == set(oracle)
    for name, weight in oracle.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=2e-3)


class Malicious:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_what_is_not_the_checkpoint_is_refused_and_runs_nothing(
    chain, tmp_path, llama, tied_llama, corpus
) -> None:
    """A malicious pickle with a wrong hash; then with the right one; then weights gone wrong."""
    base, precision = chain
    model = tied_llama if precision == "fp32" else llama
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    last = newest_checkpoint(base / "run")
    shutil.copytree(base / "run", run_dir)
    for path in (run_dir / "checkpoints").glob("step-*"):
        if path.name != "step-00000012":
            shutil.rmtree(path)
    assert last.name == "step-00000016"
    only = run_dir / "checkpoints" / "step-00000012"
    arguments = words(model, corpus, run_dir, profile(tmp_path / "ds.json", 2, precision))

    wrong = run_ranks(1, *arguments, FAULT="resume.probe:0:*:x10")
    assert wrong.returncode == 2, wrong.stdout[-3000:]
    assert "probe.loss" in wrong.stdout and "on rank 0 after loading" in wrong.stdout

    victim = next(only.glob("*optim_states.pt"))
    torch.save(Malicious(mark), victim)
    refused = run_ranks(1, *arguments)
    assert refused.returncode == 2, refused.stdout[-3000:]
    assert str(victim) in refused.stdout and "no whole checkpoint is left" in refused.stdout
    assert not mark.exists()

    manifest = json.loads((only / "MANIFEST.json").read_text())
    for entry in manifest["files"]:
        if entry["file"] == victim.name:
            entry["size_bytes"] = victim.stat().st_size
            entry["sha256"] = hashlib.sha256(victim.read_bytes()).hexdigest()
    write_json(only / "MANIFEST.json", {**manifest, "digest": digest_of(manifest)})
    forged = run_ranks(1, *arguments)
    assert forged.returncode == 2, forged.stdout[-3000:]
    assert f"{victim}: holds more than tensors and numbers" in forged.stdout
    assert "posix.mkdir" in forged.stdout and "Traceback" not in forged.stdout
    assert not mark.exists()


def test_changed_settings_go_on_only_when_accepted(chain, tmp_path, llama, tied_llama, corpus):
    base, precision = chain
    model = tied_llama if precision == "fp32" else llama
    run_dir = tmp_path / "run"
    shutil.copytree(base / "run", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000016")
    json_file = profile(tmp_path / "ds.json", 2, precision)
    changed = words(model, corpus, run_dir, json_file, "--seed", 12, "--seq_len", 16)
    refused = run_ranks(1, *changed)
    assert refused.returncode == 2, refused.stdout[-3000:]
    for line in ("settings.seed: 11 -> 12", "settings.seq_len: 32 -> 16"):
        assert line in refused.stdout
    assert "--accept_changes" in refused.stdout
    assert events(run_dir, "done"), "nothing was written"

    seen = tmp_path / "ledger"
    seen.mkdir()
    accepted = run_ranks(1, *changed, "--accept_changes", ZEROLM_LEDGER=str(seen))
    assert accepted.returncode == 0, accepted.stdout[-3000:]
    (event,) = events(run_dir, "changed")
    assert event["changes"] == {"settings.seed": [11, 12], "settings.seq_len": [32, 16]}
    sequences = sorted(id for step in ledger.read(seen).values() for id in step)
    position = 12 * BATCH * 32 // 16  # the same number of tokens
    assert sequences == list(range(position, STEPS * STEP_TOKENS // 16))
    assert "accept_changes" not in json.loads((run_dir / "run.json").read_text())["settings"]
