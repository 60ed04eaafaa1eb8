"""The curve does not depend on ranks, micro-batch, loader workers or gradient checkpointing."""

import json

import numpy as np
import pytest

from tests.end_to_end.recipe import STEP_TOKENS, profile, recipe
from tests.launching import rows, run_ranks, write_shards

STEPS = 12


@pytest.fixture(scope="module")
def second_corpus(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("second") / "other", 100, seed=2)


def train(run_dir, num_ranks, micro, *flags):
    done = run_ranks(num_ranks, *flags, "--micro_batch_size", micro, "--run_dir", run_dir)
    assert done.returncode == 0, done.stdout[-4000:]
    metrics = ("train/loss", "train/grad_norm", "train/batch_tokens", "data/other/loss")
    return {name: rows(run_dir, name) for name in metrics}


def test_mixture_ramp_and_document_mask_do_not_depend_on_the_topology(
    tmp_path, llama, corpus, second_corpus
) -> None:
    """Rows differ in their number of targets here, so a mean of means would differ."""
    base = recipe(llama, f"{corpus}=0.7", "replaced", "replaced", STEPS, micro=1)
    flags = ["--data", f"{second_corpus}=0.3", "--document_mask", "--wandb", "off"]
    flags += ["--batch_ramp_start", STEP_TOKENS // 2, "--batch_ramp_tokens", 4 * STEP_TOKENS]
    two, three = profile(tmp_path / "2.json", 2, False), profile(tmp_path / "3.json", 3, False)
    one_rank = train(tmp_path / "a", 1, 4, *base, *flags, "--deepspeed_config", two)
    two_ranks = train(
        tmp_path / "b", 2, 1, *base, *flags, "--deepspeed_config", three,
        "--num_workers", 2, "--gradient_checkpointing",
    )  # fmt: skip
    tokens = list(one_rank["train/batch_tokens"].values())
    assert tokens[0] == STEP_TOKENS // 2 and tokens[-1] == STEP_TOKENS
    assert 0 < len(one_rank["data/other/loss"]) <= len(tokens)
    for name, values in one_rank.items():
        assert list(values) == list(two_ranks[name])
        np.testing.assert_allclose(
            list(two_ranks[name].values()), list(values.values()), rtol=1e-5, err_msg=name
        )
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    assert record["world_size"] == 2
