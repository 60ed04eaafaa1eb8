"""Two hosts: both end when the network is cut, and the restart equals a run on one host."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.end_to_end import run_digest
from tests.end_to_end.killed_runs import wait_for_step
from tests.end_to_end.recipe import profile, recipe
from tests.end_to_end.two_hosts import missing, two_hosts
from tests.launching import run_ranks

STEPS, SAVE = 30, 6
HANG_SECONDS = 20  # --hang_timeout
END_SECONDS = 150

REASON = missing()
# 90 s each, of which 20 are a timeout; test_hosts_agree.py trains on two hosts in every run.
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.soak]


@pytest.fixture
def hosts(tmp_path):
    directory = tmp_path / "hosts"
    directory.mkdir()
    with two_hosts(directory) as both:
        yield both


def run_flags(llama, corpus, run_dir: Path, json_file: Path) -> list[object]:
    arguments = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    more = ["--checkpoint_interval", SAVE, "--hang_timeout", HANG_SECONDS, "--wandb", "off"]
    return [*arguments, *more]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_cut_network_ends_both_hosts_and_the_restart_equals_one_host(
    tmp_path, llama, corpus, hosts, stage
) -> None:
    json_file, log = profile(tmp_path / "ds.json", stage, False), tmp_path / "log"
    one, two = tmp_path / "one", tmp_path / "two"
    ledgers = {run_dir: tmp_path / f"ledger-{run_dir.name}" for run_dir in (one, two)}
    for ledger in ledgers.values():
        ledger.mkdir()
    done = run_ranks(2, *run_flags(llama, corpus, one, json_file), ZEROLM_LEDGER=str(ledgers[one]))
    assert done.returncode == 0, done.stdout[-4000:]

    arguments, variables = (
        run_flags(llama, corpus, two, json_file),
        {"ZEROLM_LEDGER": str(ledgers[two])},
    )
    slow = {**variables, "FAULT": "step.begin:*:*:sleep=0.5"}  # or the run would end before the cut
    process = hosts.start(log, *arguments, **slow)
    try:
        wait_for_step(two, SAVE + 3, seconds=180)
        hosts.set_link("node2", up=False)
        start = time.monotonic()
        while hosts.ranks() or process.poll() is None:
            late = time.monotonic() - start > END_SECONDS
            assert not late, f"{hosts.ranks()} are still running:\n{log.read_text()[-4000:]}"
            time.sleep(0.5)
        print(f"ZeRO-{stage}: all ranks had ended {time.monotonic() - start:.1f} s after the cut")
    finally:
        hosts.end(process)
        hosts.set_link("node2", up=True)
    assert process.returncode != 0, log.read_text()[-4000:]
    lines = [json.loads(line) for line in (two / "events.jsonl").read_text().splitlines()]
    (hang,) = [line for line in lines if line["event"] in ("hang", "rank_lost")]
    # Both ranks wait in a collective, unless the cut came between their calls of it.
    named = {entry["host"] for entry in hang["ranks"]} or set(re.findall(r"node\d", hang["reason"]))
    assert named and named <= {"node1", "node2"}
    assert "done" not in [line["event"] for line in lines]

    code = hosts.run(log, *arguments, **variables)
    assert code == 0 and not hosts.ranks(), log.read_text()[-4000:]
    assert f"resume: {two}" in log.read_text()
    ours, expected = run_digest.digest(two, ledgers[two]), run_digest.digest(one, ledgers[one])
    assert not run_digest.differences(ours, expected)
