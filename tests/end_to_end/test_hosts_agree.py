"""A run on two hosts through pdsh has the losses of one host; too few hosts are refused."""

import sys
import time

import pytest

from tests.end_to_end.recipe import profile, recipe
from tests.end_to_end.two_hosts import missing, two_hosts
from tests.launching import ROOT, free_port, rows, run_ranks

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
STEPS = 8
REFUSED_WITHIN_SECONDS = 180


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_two_hosts_have_the_losses_of_one(tmp_path, llama, corpus, stage) -> None:
    json_file = profile(tmp_path / "ds.json", stage, bf16=False)
    one, two = tmp_path / "one", tmp_path / "two"
    done = run_ranks(2, *recipe(llama, corpus, one, json_file, STEPS, micro=2), "--wandb", "off")
    assert done.returncode == 0, done.stdout[-4000:]
    directory = tmp_path / "hosts"
    directory.mkdir()
    with two_hosts(directory) as hosts:
        flags = recipe(llama, corpus, two, json_file, STEPS, micro=2)
        code = hosts.run(tmp_path / "log", *flags, "--wandb", "off")
        assert code == 0 and not hosts.ranks(), (tmp_path / "log").read_text()[-4000:]
    for key in ("train/loss", "train/grad_norm"):
        ours, theirs = rows(two, key), rows(one, key)
        assert ours == theirs and sorted(ours) == list(range(1, STEPS + 1))
    output = (tmp_path / "log").read_text()
    assert "node1" in output and "node2" in output and f"done: {STEPS} steps" in output


@pytest.mark.soak
def test_more_nodes_than_the_hostfile_has_are_refused_without_a_trace(
    tmp_path, llama, corpus
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    directory = tmp_path / "hosts"
    directory.mkdir()
    with two_hosts(directory) as hosts:
        argv = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh_check"]
        argv += ["--hostfile", str(directory / "hostfile"), "--num_nodes", "4"]
        argv += ["--master_addr", "node1", "--master_port", str(free_port())]
        json_file = profile(tmp_path / "ds.json", 2, bf16=False)
        flags = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
        start = time.monotonic()
        argv = hosts.on_node1([*argv, str(ROOT / "pretrain.py"), *map(str, flags)])
        process = hosts.start_command(log, argv)
        try:
            code = process.wait(REFUSED_WITHIN_SECONDS)
            print(f"refused after {time.monotonic() - start:.0f} s with exit code {code}")
            assert not hosts.ranks()
        finally:
            hosts.end(process)
    output = log.read_text()
    assert code == 2, output
    assert "--num_nodes: 4, but the hostfile has 2 node(s)" in output
    assert not run_dir.exists()
