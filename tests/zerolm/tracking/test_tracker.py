"""The `tracker` of a flag is a `Tracker` class, and needs no other registration."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.zerolm.tracking.tracked_runs import unused_run
from zerolm.cli import mirror
from zerolm.common.command_line import Parser
from zerolm.config.settings import TRACKERS
from zerolm.parts.settings import FLAGS, RunSettings
from zerolm.tracking import tracker
from zerolm.tracking.tracker import Tracker, tracker_class


@pytest.mark.parametrize("name", TRACKERS)
def test_the_flag_of_a_tracker_names_its_class(name) -> None:
    assert issubclass(tracker_class(name), Tracker) and FLAGS[name]["group"] == "trackers"
    parser = Parser("zerolm mirror", "")
    mirror.add_flags(parser)
    assert parser.parse(["run", name, "--of_process", "1"]).name == name


def test_a_missing_package_is_reported_before_the_run(monkeypatch) -> None:
    class Wanting(Tracker):
        package = "tensorboard"

    settings = RunSettings(tensorboard=True)
    assert Wanting.problems("tensorboard", settings, {}) == []
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    (problem,) = Wanting.problems("tensorboard", settings, {})
    assert "tensorboard: true needs the package tensorboard" in problem
    assert "bash launch/setup.sh tensorboard" in problem


OFFLINE = """
import sys
from pathlib import Path
from zerolm.tracking.wandb import WandbTracker
tracker = WandbTracker(Path(sys.argv[1]))
tracker.open()
row = {"step": 1, "tokens": 10, "train/loss": 2.0}
if tracker.lacks(row):
    tracker.log(row)
tracker.finish(0)
print(tracker.where)
"""


def test_offline_w_and_b_connects_to_nothing(tmp_path, monkeypatch) -> None:
    """Its service obeys the variables for proxies; without a variable it sends telemetry."""
    run_dir = unused_run(tmp_path / "run", monkeypatch)
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def serve() -> None:
            while True:
                try:
                    connection = proxy.accept()[0]
                except OSError:  # closed
                    return
                with connection:
                    asked.append(connection.recv(200))

        threading.Thread(target=serve, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        environment = {
            **os.environ, "HTTPS_PROXY": address, "HTTP_PROXY": address, "HOME": str(tmp_path),
        }  # fmt: skip
        environment.pop("WANDB_ERROR_REPORTING", None)
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE, run_dir], env=environment, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        proxy.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 0 and "offline in" in done.stdout, done.stderr
    assert asked == []
