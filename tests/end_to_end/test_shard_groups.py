"""Runs whose states are sharded inside groups of ranks: the usual curve, and every resume."""

import json

import pytest
import torch

from tests.end_to_end.recipe import STEP_TOKENS, recipe
from tests.end_to_end.run_digest import differences, digest, newest_checkpoint
from tests.launching import events, rows, run_ranks, write_json
from zerolm.checkpoint import memory
from zerolm.checkpoint.directory import read
from zerolm.ds_files.zero_files import Weights

pytestmark = pytest.mark.soak  # always: tests/zerolm/engine/test_shard_groups.py

STEPS, SAVE = 16, 4
PROFILE = {
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "gradient_clipping": 0.5,
}


def flags(base, name, llama, corpus, *more):
    json_file = write_json(base / "ds.json", PROFILE)
    usual = recipe(llama, corpus, base / name, json_file, STEPS, micro=1)
    return [*usual, "--wandb", "off", "--checkpoint_interval", SAVE, "--checkpoint_keep", 9,
            "--no-async_checkpoint", *more]  # fmt: skip


def optimizer_files(checkpoint) -> list[str]:
    return sorted(path.name for path in checkpoint.glob("*optim_states.pt"))


def test_a_run_resumes_on_any_number_of_groups_and_without(tmp_path, llama, corpus):
    reference = run_ranks(4, *flags(tmp_path, "reference", llama, corpus))
    assert reference.returncode == 0, reference.stdout[-4000:]
    # (ranks, size of groups, what is resharded)
    phases = [
        (4, 2, None), (4, None, ["shards 2 -> 4"]), (2, None, ["world size 4 -> 2"]), (4, 2, []),
    ]  # fmt: skip
    for number, (ranks, size, resharded) in enumerate(phases):
        more = [] if size is None else ["--shard_within", size]
        last = number == len(phases) - 1
        fault = {} if last else {"FAULT": f"step.begin:0:{SAVE * (number + 1) + 3}:kill"}
        ended = run_ranks(ranks, *flags(tmp_path, "run", llama, corpus, *more), **fault)
        assert (ended.returncode == 0) == last, ended.stdout[-4000:]
        if number:
            event = events(tmp_path / "run", "resume")[-1]
            assert event["step"] == SAVE * number and event["resharded"] == resharded
        newest = newest_checkpoint(tmp_path / "run")
        assert len(optimizer_files(newest)) == (size or ranks), "states are written once"
        manifest = json.loads((newest / "MANIFEST.json").read_text())
        assert (manifest["world_size"], manifest.get("shards")) == (ranks, size)
    ours, expected = (rows(tmp_path / name, "train/loss") for name in ("run", "reference"))
    assert list(ours) == list(expected) == list(range(1, STEPS + 1))
    for step, loss in ours.items():
        assert loss == pytest.approx(expected[step], rel=1e-4), step
    for key in ("train/grad_norm", "train/update_ratio", "train/param_norm"):
        first = (rows(tmp_path / name, key)[1] for name in ("run", "reference"))
        assert next(first) == pytest.approx(next(first), rel=1e-4), key


def test_a_killed_run_resumes_from_memory_where_groups_share_a_host(tmp_path, llama, corpus):
    more, copies = ["--shard_within", 2, "--checkpoint_interval", 100], memory.user_directory()
    whole = run_ranks(4, *flags(tmp_path, "whole", llama, corpus, *more))
    assert whole.returncode == 0, whole.stdout[-4000:]
    more += ["--memory_checkpoint_interval", 3]
    before = set(copies.glob("*"))
    fault = {"FAULT": "step.begin:2:9:kill"}
    killed = run_ranks(4, *flags(tmp_path, "killed", llama, corpus, *more), **fault)
    assert killed.returncode != 0, killed.stdout[-4000:]
    [directory] = set(copies.glob("*")) - before
    assert len(optimizer_files(directory / "step-00000006")) == 2, "those of the first group"
    resumed = run_ranks(4, *flags(tmp_path, "killed", llama, corpus, *more))
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    [event] = events(tmp_path / "killed", "resume")
    assert event["step"] == 6 and not event["resharded"]
    assert differences(digest(tmp_path / "killed"), digest(tmp_path / "whole")) == []


def test_a_killed_run_in_groups_equals_an_uninterrupted_one(tmp_path, llama, corpus):
    more = ["--shard_within", 2, "--corruption_checks", "--replay_interval", 5]
    more += ["--ema_tokens", 10 * STEP_TOKENS]
    whole = run_ranks(4, *flags(tmp_path, "whole", llama, corpus, *more))
    assert whole.returncode == 0, whole.stdout[-4000:]
    fault = {"FAULT": "step.begin:3:11:kill"}
    killed = run_ranks(4, *flags(tmp_path, "killed", llama, corpus, *more), **fault)
    assert killed.returncode != 0, killed.stdout[-4000:]
    resumed = run_ranks(4, *flags(tmp_path, "killed", llama, corpus, *more))
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    [event] = events(tmp_path / "killed", "resume")
    assert event["step"] == 2 * SAVE and not event["resharded"]
    for name in ("whole", "killed"):
        assert events(tmp_path / name, "replayed") and not events(tmp_path / name, "corrupt_step")
    for key in ("train/loss", "train/grad_norm", "train/update_ratio"):
        assert rows(tmp_path / "killed", key) == rows(tmp_path / "whole", key), key
    assert differences(digest(tmp_path / "killed"), digest(tmp_path / "whole")) == []

    newest = newest_checkpoint(tmp_path / "killed")
    masters = Weights(newest, read(newest).manifest)
    module = torch.load(newest / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    for name in masters.shapes:
        assert torch.equal(masters[name].bfloat16(), module[name]), name
