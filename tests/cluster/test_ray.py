"""Data preparation on a Ray cluster of two hosts: the bytes of a local run, also through a failure.

Needs Ray (`bash launch/setup.sh ray`), besides what other tests of hosts need.
"""

import hashlib
import json
import random
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, missing

pytest.importorskip("ray")

SECONDS = 900.0  # Ray starts a process for each task: a minute a phase on two busy cores
PORT = 6379
START = ["--num-cpus", 1, "--object-store-memory", 80_000_000, "--disable-usage-stats"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(reason := missing()), reason=reason or "there is a cluster"),
]


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path / "hosts", 2) as made:
        (made.directory / "text.jsonl").write_text("".join(documents()))
        yield made


def documents(number: int = 600) -> list[str]:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 8))) for _ in range(500)]
    texts = (" ".join(chance.choices(words, k=chance.randint(10, 300))) for _ in range(number))
    return [json.dumps({"text": text}) + "\n" for text in texts]


def write_recipe(cluster: Cluster, name: str) -> Path:
    recipe = {
        "output": name,
        "sources": {"text": {"input": ["text.jsonl"]}},
        "clean": {"filters": [{"filter": "length", "min_words": 20}], "unit_bytes": 100_000},
        "dedup": {},
        "train_tokenizer": {"vocab_size": 600, "split": "llama3"},
        "tokenize": {"val_fraction": 0.02},
        "pack": {"seq_len": 64},
        "executor": {"ray": {"address": f"{cluster.addresses['node1']}:{PORT}"}},
    }
    path = cluster.directory / f"{name}.json"
    path.write_text(json.dumps(recipe))
    return path


def start_ray(cluster: Cluster, name: str) -> None:
    address = cluster.addresses[name]
    where = ["--address", f"{cluster.addresses['node1']}:{PORT}"]
    if name == "node1":
        where = ["--head", "--port", PORT, "--include-dashboard", "false"]
    command = [*RAY, "start", *where, "--node-ip-address", address, *START]
    done = cluster.run(name, *command, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def prepare(cluster: Cluster, recipe: Path, executor: str):
    command = [sys.executable, "-m", "data_prep", "run", recipe, "--executor", executor]
    log = (recipe.with_suffix(".out")).open("a")
    return cluster.start("node1", [*command, "--workers", 2], stdout=log, stderr=log)


def output_of(recipe: Path) -> str:
    return recipe.with_suffix(".out").read_text()[-3000:]


def digests(directory: Path) -> dict[str, str]:
    """Return {name: SHA-256} of the tokenizer, the documents and the shards."""
    kinds = ("*.bin", "*.jsonl*", "tokenizer.json", "*.idx", "*.npy")
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for kind in kinds
        for path in sorted(directory.rglob(kind))
        if not any(part.startswith(".") or part in ("tasks", "logs") for part in path.parts)
    }


def test_two_hosts_and_one_that_fails_give_the_bytes_of_a_local_run(cluster):
    local, ray = (write_recipe(cluster, name) for name in ("local", "ray"))
    assert prepare(cluster, local, "local").wait(timeout=SECONDS) == 0, output_of(local)
    expected = digests(cluster.directory / "local")
    assert any(name.endswith(".bin") for name in expected)

    started = time.monotonic()
    assert prepare(cluster, ray, "ray").wait(timeout=SECONDS) != 0
    assert "10.77.0.10:6379" in output_of(ray) and "Traceback" not in output_of(ray)
    print(f"without a cluster: {time.monotonic() - started:.0f} s: {output_of(ray)[-300:]}")

    for name in cluster.names:
        start_ray(cluster, name)
    started = time.monotonic()
    assert prepare(cluster, ray, "ray").wait(timeout=SECONDS) == 0, output_of(ray)
    print(f"on two hosts: {time.monotonic() - started:.0f} s")
    assert digests(cluster.directory / "ray") == expected

    failing = write_recipe(cluster, "failing")
    run = prepare(cluster, failing, "ray")
    deadline = time.monotonic() + SECONDS
    while len(list((cluster.directory / "failing").rglob("*.jsonl*"))) < 3:
        assert run.poll() is None and time.monotonic() < deadline, output_of(failing)
        time.sleep(0.1)
    cluster.power_off("node2")
    code = run.wait(timeout=SECONDS)
    print(f"with a host that fails: exit code {code}: {output_of(failing)[-300:]}")
    if code:
        cluster.boot("node2")
        start_ray(cluster, "node2")
        assert prepare(cluster, failing, "ray").wait(timeout=SECONDS) == 0, output_of(failing)
    assert digests(cluster.directory / "failing") == expected
