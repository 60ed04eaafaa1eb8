import subprocess
import sys

import pytest

from tests.launching import ROOT, environment
from zerolm.common.errors import ConfigError
from zerolm.common.faults import Fault, parse_faults

PLACE = """
from zerolm.common.faults import fault_point
print(fault_point('step.end', 7))
print('alive')
"""


def passing(times: int = 1, **variables: str) -> subprocess.CompletedProcess:
    """Pass the place `step.end` of step 7, `times` times, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "\n".join([PLACE] * times)],
        env=environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def test_faults_are_read_and_every_mistake_is_named() -> None:
    assert parse_faults("step.end:1:7:kill,step.begin:*:*:sleep=0.5") == [
        Fault("step.end", 1, 7, "kill"),
        Fault("step.begin", None, None, "sleep=0.5"),
    ]
    with pytest.raises(ConfigError) as refused:
        parse_faults("step.ent:1:7:kill,step.end:1:7:explode,step.end:one:7:kill,step.end:kill")
    assert len(refused.value.problems) == 4
    assert 'Did you mean "step.end"?' in refused.value.problems[0]


def test_a_fault_strikes_its_own_rank_and_step_only() -> None:
    killed = passing(FAULT="step.end:1:7:kill", RANK="1")
    assert killed.returncode == -9 and "rank 1 step 7: kill" in killed.stdout
    for fault, rank in (("step.end:1:7:kill", "0"), ("step.end:1:8:kill", "1"), ("", "1")):
        assert passing(FAULT=fault, RANK=rank).stdout == "None\nalive\n"


def test_a_fault_of_the_place_is_handed_back() -> None:
    assert "nan\nalive" in passing(FAULT="step.end:*:*:nan").stdout


def test_a_full_disk_is_an_error_of_the_system() -> None:
    assert "No space left on device" in passing(FAULT="step.end:0:7:enospc").stderr


def test_a_fault_may_strike_once_over_all_restarts(tmp_path) -> None:
    variables = {"FAULT": "step.end:0:7:kill", "FAULT_ONCE": str(tmp_path)}
    assert passing(**variables).returncode == -9
    assert passing(**variables).stdout == "None\nalive\n"


def test_a_mistake_ends_the_process_before_it_begins() -> None:
    refused = passing(FAULT="here:0:0:kill")
    assert refused.returncode == 2 and "no such point" in refused.stderr
