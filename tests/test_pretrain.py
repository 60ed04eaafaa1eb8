"""The order of calls in pretrain.py, for events that a real launch cannot time exactly."""

from types import SimpleNamespace

import pretrain


def test_a_run_asked_to_stop_in_its_last_step_is_still_evaluated(monkeypatch) -> None:
    calls: list[str] = []

    class Run:
        """A run of one step, during which a stop is requested."""

        def __init__(self, *_) -> None:
            self.finished = self.stopping = False
            self.settings = SimpleNamespace(log_interval=1, checkpoint_interval=1)
            self.uploads = self.html_report = SimpleNamespace(tick=lambda: None)

        def step(self, batches) -> None:
            self.finished = self.stopping = True

        anomaly_response = None
        journal = SimpleNamespace(log_startup=lambda *_: None)
        progress = SimpleNamespace(step=1)

        def due(self, interval) -> bool:
            return True

        def __getattr__(self, name):
            return lambda *_: calls.append(name)

    monkeypatch.setattr(pretrain, "Run", Run)
    monkeypatch.setattr(pretrain.resume, "start", lambda run: False)
    monkeypatch.setattr(pretrain.ending, "end", lambda run: calls.append("end"))
    monkeypatch.setattr("zerolm.train.engine_building.build_engine", lambda *_: None)
    monkeypatch.setattr(pretrain.features, "build", lambda plan: [])
    device = SimpleNamespace(type="none")
    monkeypatch.setattr(pretrain.process_group, "init", lambda: (0, 1, device))
    monkeypatch.setattr(pretrain.collectives, "broadcast_object", lambda value: value)
    monkeypatch.setattr(pretrain.collectives, "gather_objects", lambda value: [value])
    profile = SimpleNamespace(name="ds.json", precision="fp32")
    plan = SimpleNamespace(
        summary=lambda: "", fingerprint=lambda: "", ds=profile, device_name="a CPU"
    )
    pretrain.train(plan, None, SimpleNamespace(connect=lambda world_size: None, runner=None))
    assert calls == ["batches", "report", "save_if_due", "evaluate_if_due", "end"]
