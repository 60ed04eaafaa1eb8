"""What the doctor concludes from facts, which are changed one at a time; and that this host's real
facts are green. Two real hosts are in tests/end_to_end/test_doctor_two_hosts.py."""

import copy
import json
import socket
import subprocess
import sys

import pytest

from launch.findings import ALL, NOTE, OK, RED, Finding, Run, compare, odd_ones, table
from tests.launching import LLAMA, ROOT, environment, write_json, write_shards

FACTS = {
    "problems": [],
    "versions": {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8",
                 "transformers": "5.23.0", "zerolm": "0.1.0"},
    "commit": "1234", "code": {"pretrain.py": "a", "zerolm/loss.py": "b"},
    "configs": {"ds.json": "c"},
    "data": {"problems": [], "sources": {"shards/web": {
        "fingerprint": "f", "shards": {"shard-00000.bin": "d", "shard-00001.bin": "e"},
        "bytes": 64 << 20, "seconds": 0.1}}},
    "devices": {"kind": "cuda", "count": 8, "busy": []},
    "clock": [0.0, 0.001],
    "disk": {"problem": None, "free": 1 << 40, "checkpoints": 4},
    "shared_memory": [64 << 30, 64 << 30],
    "port": None, "locks": [[], []],
    "operators": {"built": ["fused_adam"], "missing": []},
}  # fmt: skip
RUN = Run({f"node{n}": 8 for n in range(1, 4)}, 10 << 30, lambda kind: ["fused_adam"], False)


def judged(host: str, place: str, value: object) -> list[Finding]:
    """Return what is found when one fact of one host of three is another."""
    facts = {name: copy.deepcopy(FACTS) for name in RUN.slots}
    *parents, last = place.split("/")
    target = facts[host]
    for key in parents:
        target = target[key.replace("|", "/")]
    target[last.replace("|", "/")] = value
    return [one for one in compare(facts, RUN) if one.state != OK]


def test_hosts_that_are_alike_have_one_green_line_a_check():
    found = compare(dict.fromkeys(RUN.slots, FACTS), RUN)
    assert {one.state for one in found} == {OK}
    assert len({one.check for one in found}) == len(found) == 12
    assert {one.host for one in found} == {ALL, "node1"}  # the port is the first host's


# What is planted: (fact, its value), and what the line must say: (check, words, words of the fix).
PLANTED = {
    "package": ("versions/torch", "2.12.0", "versions", "torch 2.12.0, the others have 2.13.0",
                "install torch 2.13.0"),
    "python": ("versions/python", "3.12.1", "versions", "python 3.12.1", "use 3.11.7"),
    "code": ("code/zerolm|loss.py", "x", "code", "zerolm/loss.py differ", "copy them"),
    "config": ("configs/ds.json", "x", "configs", "ds.json differs", "copy it"),
    "absent config": ("configs/ds.json", None, "configs", "ds.json is not there", "copy it"),
    "other data": ("data/sources/shards|web/fingerprint", "x", "data", "by its manifest", "verify"),
    "other bytes": ("data/sources/shards|web/shards/shard-00001.bin", "x", "data",
                    "shards/web: shard-00001.bin: other bytes", "data_prep verify shards/web"),
    "slow storage": ("data/sources/shards|web/seconds", 64.0, "storage", "1 MiB/s", "local disk"),
    "other device": ("devices/kind", "cpu", "devices", "cpu, the others have cuda", "driver"),
    "missing device": ("devices/count", 7, "devices", "7 device(s), its slots are 8", "slots=7"),
    "busy device": ("devices/busy", ["device 3: 9000 of 81559 MiB are in use"], "devices",
                    "device 3: 9000", "nvidia-smi"),
    "late clock": ("clock", [-30.0, 0.1], "clock", "-30.0 s off the others", "chrony"),
    "full disk": ("disk/free", 1 << 30, "disk", "1 GiB free, 4 checkpoint(s) need 40 GiB", "free"),
    "small shared memory": ("shared_memory", [64 << 20, 64 << 20], "/dev/shm",
                            "64 MiB free, 8 rank(s) need about 1 GiB", "--shm-size"),
    "stale lock": ("locks", [["ext/fused_adam/lock"], []], "build locks", "ext/fused_adam/lock",
                   "rm ext/fused_adam/lock"),
    "no compiler": ("operators", {"built": [], "missing": ["a C++ compiler"]}, "operators",
                    "fused_adam: not built, and to build it a C++ compiler lacks", "install"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_host_that_differs_is_named_with_what_and_the_fix(name):
    place, value, check, what, fix = PLANTED[name]
    for host in ("node2", "node1"):  # the first one is no better than the others
        red = [one for one in judged(host, place, value) if one.state == RED]
        if name == "other device":  # a GPU's operators are not a CPU's
            red = [one for one in red if one.check == check]
        (line,) = red
        assert (line.check, line.host) == (check, host)
        assert what in line.what and fix in line.fix, line


def test_a_clock_is_not_blamed_for_a_slow_connection():
    assert not judged("node2", "clock", [-30.0, 29.0])


def test_the_port_matters_on_the_first_host_alone():
    assert not judged("node2", "port", "port 29500: in use. End that.")
    (line,) = judged("node1", "port", "port 29500: in use. End that.")
    assert (line.what, line.fix) == ("port 29500: in use", "end that")


def test_an_operator_that_can_be_built_is_a_note():
    (line,) = judged("node3", "operators", {"built": [], "missing": []})
    assert line.state == NOTE and "takes minutes more" in line.what


def test_what_a_shared_disk_shows_on_all_hosts_is_said_once():
    facts = {name: copy.deepcopy(FACTS) for name in RUN.slots}
    for fact in facts.values():
        fact["data"]["problems"] = ["shards/web: no manifest.json"]
    (line,) = [one for one in compare(facts, RUN) if one.state == RED]
    assert line.host == "node1, node2, node3"


def test_most_hosts_are_right_and_the_first_where_two_tie():
    assert odd_ones({"a": 1, "b": 2, "c": 2}) == (2, ["a"])
    assert odd_ones({"a": 1, "b": 2}) == (1, ["b"])


def test_the_table_has_aligned_columns_and_colors_only_what_is_red():
    found = [Finding("disk", "node1", RED, "full", "free some"), Finding("data", ALL, OK, "same")]
    red, green = table(found, color=True).splitlines()
    assert red == "\033[31mdisk  node1  RED  full.  Fix: free some.\033[0m"
    assert green == "data  all    ok   same"


def test_this_host_is_well_and_a_port_in_use_is_red(tmp_path):
    corpus = write_shards(tmp_path / "counting", 40)
    model = write_json(tmp_path / "model.json", LLAMA)
    run_dir = tmp_path / "runs" / "first"
    words = [sys.executable, "-m", "launch", "doctor", "--"]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        words += [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
        words += ["pretrain.py", "--deepspeed_config", "ds_configs/zero2.json", "--model_config"]
        words += [model, "--data", corpus, "--run_dir", run_dir]
        done = subprocess.run(
            words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 2, done.stdout + done.stderr
    red = [line for line in done.stdout.splitlines() if " RED " in line]
    assert len(red) == 1 and f"port {port}: in use by process" in red[0], done.stdout
    assert "all-reduce" in done.stdout and "correct" in done.stdout
    assert not run_dir.parent.exists()


def test_a_host_that_never_answers_is_bounded_and_named(tmp_path):
    """`ssh` that hangs, as one whose host has gone down in the middle does."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 600\n")
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("nowhere slots=1\n")
    done = subprocess.run(
        [sys.executable, "-m", "launch", "doctor", "--hostfile", tmp_path / "hosts",
         "--timeout", "2s"],
        cwd=ROOT, env=environment(PATH=f"{tmp_path}:/usr/bin:/bin"), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nowhere  RED  no answer in 2 s" in done.stdout and "Traceback" not in done.stderr


def test_facts_are_json_that_a_login_shell_may_talk_into(tmp_path):
    """The collector's lines are marked, so a banner before them does no harm."""
    words = [sys.executable, "-m", "launch", "doctor", "--collect"]
    done = subprocess.run(
        words, cwd=ROOT, input='{"ask": "clock"}\n{"ask": "nothing"}\n', env=environment(),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    clock, error = (line.partition("@zerolm ")[2] for line in done.stdout.splitlines())
    assert json.loads(clock)["answer"] > 1.7e9 and "KeyError" in json.loads(error)["error"]
