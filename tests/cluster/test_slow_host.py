"""A host that is slower than the others is named, and a restart leaves it out."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, missing
from tests.launching import LLAMA, events, write_json, write_shards
from zerolm.common.process_tree import NODE_LAUNCHER

SECONDS, PERIOD = 420.0, 0.06  # of the test; of a stop and of a run of the slow rank
PYTHON = ".venv/bin/python"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(reason := missing()), reason=reason or "there is a cluster")
def test_a_slow_host_is_named_and_left_out_at_the_next_restart(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slow") / "hosts", 3) as cluster:
        run_dir, inputs = cluster.directory / "run", cluster.directory / "inputs"
        inputs.mkdir()
        write_shards(inputs / "data")
        zero = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}
        flags = [
            "--deepspeed_config", write_json(inputs / "ds.json", zero),
            "--model_config", write_json(inputs / "model.json", LLAMA), "--data", inputs / "data",
            "--seq_len", 32, "--batch_tokens", 256, "--precision", "fp32", "--wandb", "off",
            "--checkpoint_interval", 50, "--total_tokens", 10**8, "--run_dir", run_dir,
        ]  # fmt: skip
        train = ["train", "--hostfile", cluster.hostfile(), "--num_nodes", 2, *flags]
        command = ["supervise", "--leave_out_slow_hosts", "--", "zerolm", *train]
        log = cluster.directory / "out"
        with log.open("w") as output:
            supervisor = cluster.start(
                "node1", [PYTHON, "-m", "zerolm", *map(str, command)],
                {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output,
            )  # fmt: skip

        def wait(condition, what):
            deadline = time.monotonic() + SECONDS
            while not (found := condition()):
                assert supervisor.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, f"{what}: {log.read_text()[-3000:]}"
                time.sleep(0.2)
            return found

        def logged(kind):
            return (run_dir / "events.jsonl").exists() and events(run_dir, kind)

        wait(lambda: logged("checkpoint"), "a checkpoint")
        (rank,) = (
            pid for pid in cluster.pids("node2", "--run_dir", str(run_dir))
            if NODE_LAUNCHER not in Path(f"/proc/{pid}/cmdline").read_text()
        )  # fmt: skip
        is_over = threading.Event()
        slowing = threading.Thread(target=slow_down, args=(rank, is_over))
        slowing.start()
        try:
            (event,) = wait(lambda: logged("slow_host"), "the slow host")
        finally:
            is_over.set()
            slowing.join()
        assert (event["host"], event["slow"]) == ("node2", True) and event["ratio"] > 1.1
        os.kill(rank, signal.SIGKILL)
        wait(lambda: logged("resume"), "a restart")
        assert (run_dir / "hosts").read_text().split() == ["node1", "slots=1", "node3", "slots=1"]
        assert "node2 is left out: it was slower than the others" in log.read_text()
        status = cluster.run("node1", PYTHON, "-m", "zerolm", "status", run_dir)
        print(status.stdout)
        assert "node2" in status.stdout
        os.kill(supervisor_pid(cluster), signal.SIGTERM)
        assert supervisor.wait(timeout=60) == 75


def supervisor_pid(cluster: Cluster) -> int:
    return min(cluster.pids("node1", "supervise"))


def slow_down(pid: int, is_over: threading.Event) -> None:
    """Stop a process half of the time."""
    while not is_over.wait(PERIOD):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PERIOD)
        os.kill(pid, signal.SIGCONT)
