import os
import signal
import subprocess
import sys

import pytest

from tests.launching import ROOT
from zerolm import stability
from zerolm.errors import EXIT_GAVE_UP, GaveUp

ASK = """
import os, signal, sys, time
from zerolm.stability import StopRequest
stop = StopRequest({after})
assert not stop.asked()
{act}
print(stop.asked(), stop.reason)
"""


def ask(act: str, after: str = "None") -> str:
    script = ASK.format(act=act, after=after)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_asks_for_a_stop(name: str) -> None:
    assert ask(f"os.kill(os.getpid(), signal.{name})") == f"True {name}"


def test_the_time_limit_asks_for_a_stop() -> None:
    assert ask("time.sleep(0.2)", after="0.1") == "True --stop_after"
    assert ask("pass", after="1000") == "False None"


def test_a_second_control_c_ends_at_once() -> None:
    twice = "\n".join(2 * ["os.kill(os.getpid(), signal.SIGINT)"])
    assert ask(twice) == ""


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_gives_up_and_names_the_checkpoint(loss: float) -> None:
    with pytest.raises(GaveUp, match="runs/x/checkpoints/step-00000005") as gave_up:
        stability.refuse_loss(loss, 7, "runs/x/checkpoints/step-00000005")
    assert gave_up.value.exit_code == EXIT_GAVE_UP == 76
    stability.refuse_loss(3.0, 7, None)


def test_gradients_that_spoilt_a_step_and_endless_skips_give_up() -> None:
    with pytest.raises(GaveUp, match="grad_norm is inf"):
        stability.refuse_gradients(float("inf"), True, 0, 7, None)
    with pytest.raises(GaveUp, match="skipped 40 steps in a row"):
        stability.refuse_gradients(float("inf"), False, 40, 7, None)
    stability.refuse_gradients(float("inf"), False, 39, 7, None)
    with pytest.raises(GaveUp, match="norm of the weights is nan"):
        stability.refuse_weights(float("nan"), 7, None)
    assert signal.SIGTERM in stability.STOP_SIGNALS
