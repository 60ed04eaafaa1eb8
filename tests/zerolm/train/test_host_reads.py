"""How often the host waits for the device: a few times a step, never in a micro-batch."""

import json
from pathlib import Path

import pytest

from data_prep.encode.pack import pack
from tests import ROOT
from tests.launching import LLAMA, run_workers, write_json, write_shards
from zerolm.shards.reader import open_source

KINDS = {
    "zero1": (1, []),
    "zero2": (2, []),
    "zero3": (3, []),
    "packed": (2, ["--packing", "best_fit", "--document_mask", "--attn_implementation", "sdpa"]),
}
FLAGS = [
    "--seq_len", 32, "--batch_tokens", 256, "--micro_batch_size", 2, "--total_tokens", 25_600,
    "--learning_rate", 1e-3, "--log_interval", 1000, "--wandb", "off",
]  # fmt: skip
OF_DEEPSPEED = {"zero1": 3, "zero2": 6, "packed": 6}  # 0.19.8, in a step


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, dict[str, float]]:
    directory = tmp_path_factory.mktemp("reads")
    llama = write_json(directory / "llama.json", LLAMA)
    corpus = write_shards(directory / "corpus")
    pack(open_source(corpus), 32)
    jobs = {}
    for name, (stage, more) in KINDS.items():
        ds_json = json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text())
        profile = write_json(directory / f"{stage}.json", ds_json | {"bf16": {"enabled": True}})
        flags = ["--deepspeed_config", profile, "--model_config", llama, "--data", corpus]
        flags += ["--run_dir", directory / name, *FLAGS, *more]
        jobs[name] = list(map(str, flags))
    files = write_json(directory / "jobs.json", jobs), directory / "places.json"
    run_workers(1, Path(__file__).with_name("host_reads_worker.py"), *files)
    return json.loads(files[1].read_text())


@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_ours_waits_for_two_values(places, name):
    """One for losses, flags and counts; one for the gradient norm, which decides on the update."""
    ours = {place: count for place, count in places[name].items() if "zerolm/" in place}
    assert sorted(place.split(":")[0] for place in ours) == [
        "read zerolm/distributed/named_sums.py",
        "read zerolm/engine/step_gate.py",
    ]
    assert set(ours.values()) == {1.0}


@pytest.mark.parametrize("name", OF_DEEPSPEED)
def test_deepspeed_and_transformers_wait_only_at_the_end_of_a_step(places, name):
    others = {place: count for place, count in places[name].items() if "zerolm/" not in place}
    assert sum(others.values()) == OF_DEEPSPEED[name], others
