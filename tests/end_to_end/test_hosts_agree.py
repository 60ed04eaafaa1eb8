"""A run on two hosts through pdsh has the curve of one host; more hosts than there are, no run."""

import sys
import time

import pytest
from recipe import profile, recipe
from two_hosts import missing, two_hosts

from tests.launching import ROOT, free_port, launch, rows

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
STEPS = 8
REFUSED_WITHIN_SECONDS = 180


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_two_hosts_have_the_losses_of_one(tmp_path, llama, corpus, stage) -> None:
    json_file = profile(tmp_path / "ds.json", stage, bf16=False)
    one, two = tmp_path / "one", tmp_path / "two"
    done = launch(2, *recipe(llama, corpus, one, json_file, STEPS, micro=2), "--wandb", "off")
    assert done.returncode == 0, done.stdout[-4000:]
    directory = tmp_path / "hosts"
    directory.mkdir()
    with two_hosts(directory) as hosts:
        words = recipe(llama, corpus, two, json_file, STEPS, micro=2)
        code = hosts.run(tmp_path / "log", *words, "--wandb", "off")
        assert code == 0 and not hosts.ranks(), (tmp_path / "log").read_text()[-4000:]
    for key in ("train/loss", "train/grad_norm"):
        ours, theirs = rows(two, key), rows(one, key)
        assert ours == theirs and sorted(ours) == list(range(1, STEPS + 1))
    said = (tmp_path / "log").read_text()
    assert "node1" in said and "node2" in said and f"done: {STEPS} steps" in said


def test_more_hosts_than_the_file_has_are_refused_and_nothing_is_left(
    tmp_path, llama, corpus
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    directory = tmp_path / "hosts"
    directory.mkdir()
    with two_hosts(directory) as hosts:
        words = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh_check"]
        words += ["--hostfile", str(directory / "hostfile"), "--num_nodes", "4"]
        words += ["--master_addr", "node1", "--master_port", str(free_port())]
        json_file = profile(tmp_path / "ds.json", 2, bf16=False)
        flags = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
        began = time.monotonic()
        words = hosts.on_node1([*words, str(ROOT / "pretrain.py"), *map(str, flags)])
        process = hosts.start_command(log, words)
        try:
            code = process.wait(REFUSED_WITHIN_SECONDS)
            print(f"refused after {time.monotonic() - began:.0f} s with exit code {code}")
            assert not hosts.ranks()
        finally:
            hosts.end(process)
    said = log.read_text()
    assert code == 2, said
    assert "4 nodes were asked for, but the hostfile gives 2" in said
    assert not run_dir.exists()
