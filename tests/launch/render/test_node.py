"""`python -m launch node` as a scheduler starts it: two nodes are one run."""

import signal
import subprocess
import sys
import time

import pytest

from launch.render.node import node_rank
from tests.launching import (
    LLAMA,
    ROOT,
    environment,
    free_port,
    kill_session,
    write_json,
    write_shards,
)
from zerolm.common.errors import EXIT_DONE, EXIT_STOPPED, ConfigError

SECONDS = 240


def start_nodes(port: int, flags: list[str]) -> list[subprocess.Popen]:
    """Start two nodes on this machine, one as Slurm does and one as SkyPilot does."""
    command = [sys.executable, "-m", "launch", "node", "--nodes", "2", "--devices_per_node", "1"]
    command += [
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(port),
        "--",
        "pretrain.py",
        *flags,
    ]
    return [
        subprocess.Popen(
            command, cwd=ROOT, env=environment(**{variable: str(rank)}), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for rank, variable in enumerate(("SLURM_NODEID", "SKYPILOT_NODE_RANK"))
    ]  # fmt: skip


def wait_for(nodes: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    try:
        outputs = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    finally:
        for node in nodes:
            kill_session(node.pid)
    return [node.returncode for node in nodes], outputs


@pytest.mark.soak
def test_two_nodes_are_one_run_and_a_signal_to_one_saves_on_both(tmp_path):
    corpus = write_shards(tmp_path / "counting")
    run_dir = tmp_path / "run"
    flags = ["--data", str(corpus), "--model_config", str(write_json(tmp_path / "m.json", LLAMA))]
    flags += ["--deepspeed_config", str(ROOT / "ds_configs/zero2.json"), "--run_dir", str(run_dir)]
    flags += ["--seq_len", "32", "--batch_tokens", "256", "--total_tokens", "20480"]
    flags += ["--log_interval", "1", "--wandb", "off"]
    nodes = start_nodes(free_port(), flags)
    deadline = time.monotonic() + SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and nodes[0].poll() is None, wait_for(nodes)
        time.sleep(0.2)
    nodes[1].send_signal(signal.SIGTERM)  # as when the scheduler preempts one node
    codes, outputs = wait_for(nodes)
    assert codes == [EXIT_STOPPED, EXIT_STOPPED], outputs
    assert "SIGTERM: asking the ranks to save and stop" in outputs[1]
    assert "devices               2 x cpu" in outputs[0]

    codes, outputs = wait_for(start_nodes(free_port(), flags))
    assert codes == [EXIT_DONE, EXIT_DONE], outputs
    assert "resume:" in outputs[0] and "done: 80 steps" in outputs[0]


def test_the_rank_of_a_node_comes_from_its_scheduler():
    assert node_rank(None, 4, {"SLURM_NODEID": "3"}) == 3
    assert node_rank(None, 4, {"JOB_COMPLETION_INDEX": "2"}) == 2
    assert node_rank(1, 4, {"SLURM_NODEID": "3"}) == 1
    with pytest.raises(ConfigError, match="SLURM_NODEID: 4 must be a number below --nodes 4"):
        node_rank(None, 4, {"SLURM_NODEID": "4"})
    with pytest.raises(ConfigError, match="--node_rank is missing"):
        node_rank(None, 4, {})
