"""Requests to stop, the check of the weights, and the policy made from settings."""

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.launching import ROOT
from zerolm.checkpoint.manifest import Progress
from zerolm.common.errors import EXIT_GAVE_UP, GaveUp
from zerolm.ds_config.profile import Profile
from zerolm.features.feature import StepResult
from zerolm.optim.spikes import History, Policy, SpikeGuard
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import RunSettings
from zerolm.train import stability

SCRIPT = """
import os, signal, sys, time
from zerolm.train.stability import StopRequest
stop = StopRequest({after})
assert not stop.poll()
{act}
print(stop.poll(), stop.reason)
"""


def run_stop_request(act: str, after: str = "None", exit_code: int = 0) -> str:
    """Return what a process prints that polls a `StopRequest` after doing `act`."""
    script = SCRIPT.format(act=act, after=after)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"])
def test_a_signal_requests_a_stop(name: str) -> None:
    assert run_stop_request(f"os.kill(os.getpid(), signal.{name})") == f"True {name}"


def test_a_closed_terminal_does_not_stop_a_run_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a new process keeps this
    try:
        assert run_stop_request("os.kill(os.getpid(), signal.SIGHUP)") == "False None"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_is_the_reason() -> None:
    """DeepSpeed's launcher answers Ctrl-C with a SIGTERM to its ranks."""
    both = "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM)"
    assert run_stop_request(both) == "True SIGINT"


def test_the_deadline_requests_a_stop() -> None:
    assert run_stop_request("time.sleep(0.2)", after="0.1") == "True --stop_after"
    assert run_stop_request("pass", after="1000") == "False None"


@pytest.mark.parametrize(("save", "stops"), [(0, False), (600, False), (700, True)])
def test_half_as_much_again_as_the_longest_save_is_left_before_the_deadline(save, stops) -> None:
    act = f"stop.record_save({save}); stop.record_save(1)"
    assert run_stop_request(act, after="1000").startswith(str(stops))


def test_as_much_time_as_the_last_step_took_is_left_before_the_deadline() -> None:
    assert run_stop_request("time.sleep(0.6)", after="1") == "True --stop_after"


def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    twice = "\n".join(2 * ["os.kill(os.getpid(), signal.SIGINT)"])
    assert run_stop_request(twice, exit_code=128 + signal.SIGINT) == ""


def test_weights_that_are_not_finite_are_never_saved() -> None:
    with pytest.raises(GaveUp, match=r"weights is nan.*step-00000005") as gave_up:
        stability.require_finite_weights(float("nan"), 7, "runs/x/checkpoints/step-00000005")
    assert gave_up.value.exit_code == EXIT_GAVE_UP == 76
    stability.require_finite_weights(3.0, 7, None)
    stability.require_finite_weights(None, 7, None)


def test_the_spike_policy_follows_the_settings() -> None:
    flags = "--spike_threshold 8 --spike_window 64 --no-skip_spikes --cooldown_after 0"
    settings, problems = parse_settings([*flags.split(), "--rollback_after", "9", "--max_skips=0"])
    assert not problems
    policy = stability.spike_guard(settings, Profile.parse({"bf16": {"enabled": True}})).policy
    assert (policy.threshold, policy.window, policy.skip) == (8.0, 64, False)
    assert (policy.cooldown_after, policy.rollback_after, policy.max_skips) == (0, 9, 0)
    assert policy.watch_norm and not policy.overflows_are_normal
    policy = stability.spike_guard(
        RunSettings(), Profile.parse({"optimizer": {"type": "Muon"}, "fp16": {"enabled": True}})
    ).policy
    assert policy == replace(Policy(), watch_norm=False, overflows_are_normal=True)


def test_an_anomaly_names_the_sequence_numbers_of_its_batch() -> None:
    progress = Progress(step=10, position=80, skipped_windows=[[0, 16]])
    result = StepResult(9.5, {"losses": [9.5], "tokens": [256.0]}, grad_norm=math.inf)
    guard = SpikeGuard(Policy(), History())
    guard.check_loss(math.nan)
    assert stability.anomaly_fields(guard, progress, result, 8) == {
        "sequences": (72 + 16, 80 + 16), "loss": "9.5", "grad_norm": "inf",
        "reason": "train/loss is nan",
    }  # fmt: skip
    fields = stability.anomaly_fields(SpikeGuard(Policy(), History()), progress, result, 8)
    assert fields["reason"] == "fp16: the gradients overflowed at this loss scale"
