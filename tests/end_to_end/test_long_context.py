"""A stage of longer sequences, with another rotary base: losses of a plain loop, no text twice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end import plain_pytorch, runs_in_one_process
from tests.end_to_end.recipe import (
    BATCH,
    CLIPPING,
    PEAK,
    SEED,
    SEQ_LEN,
    STEP_TOKENS,
    profile,
    recipe,
)
from tests.launching import LLAMA, rows, run_ranks, write_json, write_shards
from tests.ledger import read_sequences
from zerolm.report.run_order import open_run

pytestmark = pytest.mark.soak
TRUNK_STEPS, STEPS, TIMES = 10, 6, 4
LONG = {**LLAMA, "rope_theta": 8e4, "max_position_embeddings": TIMES * SEQ_LEN}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory, llama, corpus):
    """A run at `SEQ_LEN`; `weights` has its float32 weights after each step."""
    base = tmp_path_factory.mktemp("trunk")
    (base / "weights").mkdir()
    flags = recipe(
        llama, corpus, base / "run", profile(base / "zero2.json", 2, bf16=False), TRUNK_STEPS, 2
    )
    flags += ["--checkpoint_interval", TRUNK_STEPS, "--later_seq_len", TIMES * SEQ_LEN]
    flags += ["--schedule", "constant", "--warmup_tokens", STEP_TOKENS]
    runs_in_one_process.launch([{"flags": flags, "weights": base / "weights"}], base)
    write_json(base / "long.json", LONG)
    return base


def long_model() -> torch.nn.Module:
    settings = {key: value for key, value in LONG.items() if key != "architectures"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)


def test_a_longer_stage_from_weights_equals_plain_pytorch(trunk, corpus, tmp_path) -> None:
    source = trunk / "run"
    flags = recipe(trunk / "long.json", corpus, tmp_path / "run", trunk / "zero2.json", STEPS, 1)
    flags += ["--init_from", source, "--seq_len", TIMES * SEQ_LEN, "--warmup_tokens", STEP_TOKENS]
    output = runs_in_one_process.launch([{"flags": flags}], tmp_path)
    assert "rope_parameters.rope_theta: 80000.0, --init_from" in output
    model = long_model()
    model.load_state_dict(torch.load(trunk / "weights" / f"{TRUNK_STEPS:03d}.pt"))
    model.save_pretrained(tmp_path / "weights")
    curve = plain_pytorch.train(
        LONG, corpus, seq_len=TIMES * SEQ_LEN, batch_sequences=BATCH // TIMES, micro_batch_size=1,
        steps=STEPS, warmup_tokens=STEP_TOKENS, source=tmp_path / "weights",
    )  # fmt: skip
    expected = [step.loss for step in curve]
    np.testing.assert_allclose(list(rows(tmp_path / "run", "train/loss").values()), expected, 1e-6)


def test_a_longer_branch_equals_a_plain_loop_that_goes_on(
    trunk, corpus, held_out, tmp_path
) -> None:
    """The loop trains from the first step of the trunk, with the same AdamW states throughout."""
    flags = ("--branch", f"{trunk / 'run'}@{TRUNK_STEPS}", "--model_config", trunk / "long.json")
    flags += ("--seq_len", TIMES * SEQ_LEN, "--micro_batch_size", 1, "--run_dir", tmp_path / "run")
    flags += ("--total_tokens", (TRUNK_STEPS + STEPS) * STEP_TOKENS)
    flags += ("--val_data", held_out, "--loss_by_position", "--needle_items", 3)
    done = run_ranks(2, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "only sequences that the trunk has not read" in done.stdout
    found = list(rows(tmp_path / "run", "train/loss").values())
    quarters = [f"loss_at_{part}_quarter" for part in ("first", "middle", "last")]
    for key in (*quarters, "needle/acc_at_50", "needle/loss"):
        assert (TRUNK_STEPS + STEPS) in rows(tmp_path / "run", f"eval/{key}"), key

    tokens = plain_pytorch.read_tokens(corpus)
    order = plain_pytorch.Order([(len(tokens) - 1) // (TIMES * SEQ_LEN)], [1.0], SEED)
    model = plain_pytorch.initial_model(LLAMA, SEED)
    masters = {name: each.detach() for name, each in model.named_parameters()}
    optimizer = plain_pytorch.adamw(masters, 0.1)
    expected = []
    for step in range(TRUNK_STEPS + STEPS):
        if step == TRUNK_STEPS:
            longer = long_model()
            longer.load_state_dict(model.state_dict(), assign=True)
            model = longer
        # Long windows in the order of a run of their length, each as four short ones at first.
        numbers = np.arange(BATCH) // TIMES + step * BATCH // TIMES
        first = order(numbers).window * TIMES + np.arange(BATCH) % TIMES
        length = SEQ_LEN if step < TRUNK_STEPS else TIMES * SEQ_LEN
        starts = first[:: length // SEQ_LEN] * SEQ_LEN
        batch = plain_pytorch.Batch([torch.zeros_like(master) for master in masters.values()])
        for chunk in np.split(starts, 4 if step < TRUNK_STEPS else 2):
            text = np.stack([tokens[at : at + length + 1] for at in chunk])
            batch.add(model, LLAMA, text, len(chunk) / len(starts))
        plain_pytorch.clip(list(masters.values()), batch.gradients, CLIPPING)
        for group in optimizer.param_groups:
            group["lr"] = PEAK
        optimizer.step()
        expected.append(float(np.mean(batch.losses)))
    print("largest relative difference:", np.abs(np.array(found) / expected - 1).max())
    np.testing.assert_allclose(found, expected, 1e-6)


def test_a_branch_may_have_another_base_alone(trunk, tmp_path) -> None:
    """Then the loss of the probe is another one than when the checkpoint was saved."""
    config = write_json(tmp_path / "base.json", {**LLAMA, "rope_theta": 8e4})
    flags = ("--branch", trunk / "run", "--model_config", config, "--run_dir", tmp_path / "run")
    done = run_ranks(2, *flags, "--total_tokens", (TRUNK_STEPS + 1) * STEP_TOKENS)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "not compared, because the branch has other positions" in done.stdout


def test_trunk_and_longer_branches_read_nothing_twice(corpus, llama, trunk, tmp_path) -> None:
    """On one and two ranks, killed and resumed: by the sequences that the ranks have recorded."""
    code = write_shards(tmp_path / "code", 120, seed=5)
    profile_path = trunk / "zero2.json"
    steps, total = 24, 44  # 6 short windows of code: one and a half long ones
    flags = recipe(llama, f"{corpus}=31", tmp_path / "short", profile_path, steps, 2)
    flags += ["--data", f"{code}=1", "--later_seq_len", TIMES * SEQ_LEN, "--schedule", "constant"]
    flags += ["--checkpoint_interval", 8, "--checkpoint_keep", 9]
    longer = ["--branch", f"{tmp_path / 'short'}@{steps}", "--model_config", trunk / "long.json"]
    longer += ["--seq_len", TIMES * SEQ_LEN, "--micro_batch_size", 1]
    longer += ["--total_tokens", total * STEP_TOKENS]

    def train(name: str, ranks: int, arguments: list[object], fault: str = "") -> Path:
        (ledger := tmp_path / f"{name}-ledger").mkdir(exist_ok=True)
        more = {"FAULT": fault} if fault else {}
        done = run_ranks(ranks, *arguments, "--run_dir", tmp_path / name, ZEROLM_LEDGER=str(ledger),
                         **more)  # fmt: skip
        assert (done.returncode == 0) is not bool(fault), done.stdout[-4000:]
        return ledger

    def spans(name: str, ledger: Path, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return (source, epoch, start in short windows) of what was read in some steps."""
        run, read = open_run(tmp_path / name), read_sequences(ledger)
        times = run.settings.seq_len // SEQ_LEN
        assert list(read)[-1] == last and set(range(first, last + 1)) <= set(read)
        ids = np.array([number for step in range(first, last + 1) for number in read[step]])
        assert len(ids) == (last - first + 1) * BATCH // times
        placed = zip(*(part.tolist() for part in run.order(ids)), strict=True)
        return [(s, e, w * times + n) for s, w, e in placed for n in range(times)]

    train("short", 2, flags, "step.backward:1:11:kill")
    trunk_spans = spans("short", train("short", 2, flags), 1, steps)
    branches = []
    for name, ranks in (("one", 1), ("two", 2)):
        train(name, ranks, longer, f"step.backward:0:{steps + 5}:kill")
        branches.append(spans(name, train(name, ranks, longer), steps + 1, total))
    assert sorted(branches[0]) == sorted(branches[1])
    together = trunk_spans + branches[0]
    assert len(set(together)) == len(together) == total * BATCH, "nothing twice"
    windows = {(s, e, span // TIMES) for s, e, span in together}
    lost = [
        window
        for window in windows
        if 0
        < sum((*window[:2], window[2] * TIMES + n) in set(together) for n in range(TIMES))
        < TIMES
    ]
    assert all(sum(s == source for s, *_ in lost) <= 1 for source in (0, 1)), lost
