"""The `tracker` of a flag is a `Tracker` class, and needs no other registration."""

import pytest

from zerolm.cli import mirror
from zerolm.common.command_line import Parser
from zerolm.config.settings import FLAGS, TRACKERS, Settings
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

    settings = Settings(tensorboard=True)
    assert Wanting.problems("tensorboard", settings, {}) == []
    monkeypatch.setattr(tracker.importlib.util, "find_spec", lambda name: None)
    (problem,) = Wanting.problems("tensorboard", settings, {})
    assert "tensorboard: true, needs the package tensorboard" in problem
    assert "bash launch/setup.sh tensorboard" in problem
