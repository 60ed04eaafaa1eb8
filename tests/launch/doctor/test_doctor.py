"""The doctor's findings: from made-up facts that are changed one at a time, and from this host.

Real hosts are tested in tests/cluster/test_doctor.py.
"""

import argparse
import copy
import json
import socket
import subprocess
import sys

import pytest
import torch
from torch.utils import cpp_extension

from launch.doctor import collector, doctor
from launch.doctor.checks import outliers, run_checks
from launch.doctor.findings import ALL, NOTE, OK, RED, Finding, table
from launch.doctor.requirements import Requirements
from tests.launching import LLAMA, ROOT, environment, run_module, write_json, write_shards
from zerolm.common.errors import ConfigError
from zerolm.parts.parse import parse_settings

FACTS = {
    "problems": [],
    "versions": {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8",
                 "transformers": "5.23.0", "zerolm": "0.1.0"},
    "commit": "1234", "code": {"pretrain.py": "a", "zerolm/model/loss.py": "b"},
    "configs": {"ds.json": "c"},
    "data": {"problems": [], "sources": {"shards/web": {
        "fingerprint": "f", "shards": {"shard-00000.bin": "d", "shard-00001.bin": "e"},
        "bytes": 64 << 20, "seconds": 0.1}}},
    "devices": {"kind": "cuda", "count": 8, "ranks": 8, "busy": []},
    "clock": [0.0, 0.001],
    "disk": {"problem": None, "free": 1 << 40, "checkpoints": 4},
    "shared_memory": [64 << 30, 64 << 30],
    "port": None,
    "operators": {"built": ["fused_adam"], "missing": []},
}  # fmt: skip
REQUIRED = Requirements(
    {f"node{n}": 8 for n in range(1, 4)}, 10 << 30, lambda device_kind: ["fused_adam"], deep=False
)


def findings_after_change(host: str, path: str, value: object) -> list[Finding]:
    """Return the findings that are not OK after one fact of one of three hosts is changed."""
    facts = {name: copy.deepcopy(FACTS) for name in REQUIRED.slots}
    *parents, last = path.split("/")
    target = facts[host]
    for key in parents:
        target = target[key.replace("|", "/")]
    target[last.replace("|", "/")] = value
    return [finding for finding in run_checks(facts, REQUIRED) if finding.state != OK]


def test_equal_hosts_have_one_green_line_for_each_check():
    found = run_checks(dict.fromkeys(REQUIRED.slots, FACTS), REQUIRED)
    assert {finding.state for finding in found} == {OK}
    assert len({finding.check for finding in found}) == len(found) == 11
    assert {finding.host for finding in found} == {ALL, "node1"}  # the port is the first host's


# {fault: (changed fact, its value, check, part of the line, part of its fix)}
FAULTS = {
    "package": ("versions/torch", "2.12.0", "versions", "torch 2.12.0, the others have 2.13.0",
                "install torch 2.13.0"),
    "python": ("versions/python", "3.12.1", "versions", "python 3.12.1", "use 3.11.7"),
    "code": ("code/zerolm|model|loss.py", "x", "code", "zerolm/model/loss.py differ", "copy them"),
    "config": ("configs/ds.json", "x", "configs", "ds.json differs", "copy it"),
    "absent config": ("configs/ds.json", None, "configs", "ds.json is not there", "copy it"),
    "different manifest": ("data/sources/shards|web/fingerprint", "x", "data",
                           "its manifest differs", "verify"),
    "different bytes": ("data/sources/shards|web/shards/shard-00001.bin", "x", "data",
                    "shards/web: shard-00001.bin: contents differ", "data verify shards/web"),
    "slow storage": ("data/sources/shards|web/seconds", 64.0, "storage", "1 MiB/s", "local disk"),
    "different device": ("devices/kind", "cpu", "devices", "cpu, the others have cuda", "driver"),
    "missing device": ("devices/count", 7, "devices", "7 device(s), but the hostfile sets slots=8",
                       "slots=7"),
    "busy device": ("devices/busy", ["device 3: 9000 of 81559 MiB are in use"], "devices",
                    "device 3: 9000", "nvidia-smi"),
    "late clock": ("clock", [-30.0, 0.1], "clock", "-30.0 s off the others", "chrony"),
    "full disk": ("disk/free", 1 << 30, "disk", "1 GiB free, 4 checkpoint(s) need 40 GiB", "free"),
    "small shared memory": ("shared_memory", [64 << 20, 64 << 20], "/dev/shm",
                            "64 MiB free, 8 rank(s) need about 1 GiB", "--shm-size"),
    "no compiler": ("operators", {"built": [], "missing": ["a C++ compiler"]}, "operators",
                    "fused_adam: not built, and building needs a C++ compiler", "install"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_host_that_differs_is_named_with_the_fact_and_the_fix(name):
    path, value, check, fact, fix = FAULTS[name]
    for host in ("node2", "node1"):  # the first host is not taken as the reference
        red = [line for line in findings_after_change(host, path, value) if line.state == RED]
        if name == "different device":  # a GPU's operators are not a CPU's
            red = [line for line in red if line.check == check]
        (line,) = red
        assert (line.check, line.host) == (check, host)
        assert fact in line.fact and fix in line.fix, line


def test_a_clock_within_the_uncertainty_of_a_slow_connection_is_ok():
    assert not findings_after_change("node2", "clock", [-30.0, 29.0])


def test_the_port_is_checked_on_the_first_host_only():
    assert not findings_after_change("node2", "port", "port 29500: in use. End that.")
    (line,) = findings_after_change("node1", "port", "port 29500: in use. End that.")
    assert (line.fact, line.fix) == ("port 29500: in use", "end that")


def test_an_operator_that_can_be_built_is_a_note():
    (line,) = findings_after_change("node3", "operators", {"built": [], "missing": []})
    assert line.state == NOTE and "takes some minutes longer" in line.fact


def test_a_problem_of_a_shared_disk_is_one_line_for_all_hosts():
    facts = {name: copy.deepcopy(FACTS) for name in REQUIRED.slots}
    for fact in facts.values():
        fact["data"]["problems"] = ["shards/web: no manifest.json"]
    (line,) = [line for line in run_checks(facts, REQUIRED) if line.state == RED]
    assert line.host == "node1, node2, node3"


class OnThisHost:
    """A session with this host that answers at once; `asked` has the last question of each kind."""

    asked: dict[str, dict] = {}  # noqa: RUF012

    def __init__(self, host, ssh_port, environment): ...
    def hang_up(self): ...
    def close(self, deadline): ...
    def clock_offset(self, seconds):
        return [0.0, 0.0]

    def ask(self, limit, question, **details):
        self.asked[question] = details
        times = {"all_reduce": [(1 << 24, 0.1)], "all_gather": [(1 << 24, 0.1)]}
        result = {"correct": True, "pairs": [], **times}
        return [result] if question == "network" else FACTS | {"addresses": [], "free_port": 1}


def findings_of_this_host(monkeypatch, command: list[str]) -> list[Finding]:
    monkeypatch.setattr(doctor, "Session", OnThisHost)
    monkeypatch.setattr(doctor, "DEFAULT_HOSTFILE", "/nowhere")
    parser = argparse.ArgumentParser()
    doctor.add_flags(parser)
    return doctor.Doctor(parser.parse_args([]), command).findings()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 8),
        (["--num_gpus", "2"], 2),
        (["--include", "localhost:0,3,5"], 3),
        (["--exclude", "localhost:0,3,5"], 5),
        (["-e", "localhost:7"], 7),
    ],
)
def test_this_host_is_tested_with_the_ranks_that_deepspeed_would_start(
    words, expected, monkeypatch
):
    found = findings_of_this_host(monkeypatch, ["deepspeed", *words, "pretrain.py"])
    assert OnThisHost.asked.pop("network")["hosts"] == [expected], found


@pytest.mark.parametrize(
    ("visible", "words", "expected"), [("4,5", [], 2), ("4,5", ["-e", "localhost:0"], 7)]
)
def test_devices_of_the_environment_count_unless_flags_choose_others(
    visible, words, expected, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = findings_of_this_host(monkeypatch, ["deepspeed", *words, "pretrain.py"])
    assert OnThisHost.asked.pop("network")["hosts"] == [expected], found


def test_a_device_of_the_environment_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8")
    found = findings_of_this_host(monkeypatch, ["deepspeed", "pretrain.py"])
    assert any("CUDA_VISIBLE_DEVICES has device 8, but there are 8" in each.fact for each in found)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--include=node1@node3:0,2", {"node1": 4, "node3": 2}),
        ("--exclude=node1@node3:0,2", {"node2": 4, "node3": 2}),
    ],
)
def test_of_a_hostfile_the_hosts_and_devices_are_checked_that_deepspeed_would_use(
    flag, expected, tmp_path
):
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"node{number} slots=4\n" for number in (1, 2, 3)))
    parser = argparse.ArgumentParser()
    doctor.add_flags(parser)
    arguments = parser.parse_args(["--hostfile", str(hosts)])
    found = doctor.Doctor(arguments, ["deepspeed", flag, "pretrain.py"])
    assert found.slots == expected and [host.name for host in found.hosts] == list(expected)
    with pytest.raises(ConfigError, match="node9: not among the hosts node1, node2, node3"):
        doctor.Doctor(arguments, ["deepspeed", "--exclude", "node9", "pretrain.py"])
    with pytest.raises(ConfigError, match="leaves no device"):
        doctor.Doctor(arguments, ["deepspeed", "-e", "node1@node2@node3", "pretrain.py"])


def test_a_host_whose_preflight_would_refuse_the_run_is_not_ready(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    settings, _ = parse_settings(["--compile", "--deepspeed_config", "ds_configs/zeropp.json"])
    monkeypatch.setattr(collector.machine, "compile_problem", lambda kind: f"none on {kind}")
    compiling, *quantizer = collector.build_problems(settings, "cuda")
    assert "--compile: true, but none on cuda" in compiling
    assert len(quantizer) == 2 and all("ninja" in line or "nvcc" in line for line in quantizer)
    absent = [str(tmp_path / name) for name in ("model.json", "zero.json")]
    flags = ["--model_config", absent[0], "--deepspeed_config", absent[1]]
    found = collector.build_problems(parse_settings(flags)[0], "cpu")
    assert [line.split(":")[0] for line in found] == absent


def test_the_majority_is_right_and_the_first_host_if_there_is_none():
    assert outliers({"a": 1, "b": 2, "c": 2}) == (2, ["a"])
    assert outliers({"a": 1, "b": 2}) == (1, ["b"])


def test_the_table_has_aligned_columns_and_colors_red_lines_only():
    found = [Finding("disk", "node1", RED, "full", "free some"), Finding("data", ALL, OK, "same")]
    red, green = table(found, color=True).splitlines()
    assert red == "\033[31mdisk  node1  RED  full.  Fix: free some.\033[0m"
    assert green == "data  all    ok   same"


@pytest.mark.soak  # always: tests/cluster/test_doctor.py
def test_this_host_has_no_problem_except_a_port_in_use(tmp_path):
    corpus = write_shards(tmp_path / "counting", 40)
    model = write_json(tmp_path / "model.json", LLAMA)
    run_dir = tmp_path / "runs" / "first"
    command: list[object] = ["doctor", "--"]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        command += [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
        command += [ROOT / "pretrain.py", "--model_config"]
        command += [model, "--data", corpus, "--run_dir", run_dir, "--deepspeed_config"]
        command += [ROOT / "ds_configs" / "zero2.json"]
        done = run_module("launch", *command)
    assert done.returncode == 2, done.stdout + done.stderr
    red = [line for line in done.stdout.splitlines() if " RED " in line]
    assert len(red) == 1 and f"port {port}: in use by process" in red[0], done.stdout
    assert "all-reduce" in done.stdout and "correct" in done.stdout
    assert not run_dir.parent.exists()


def test_hosts_that_do_not_answer_are_named_in_one_line_after_the_timeout(tmp_path):
    """With an `ssh` that hangs, as when hosts go down during a connection."""
    ssh = tmp_path / "ssh"
    count = tmp_path / "count"  # of those that another one has joined: none if each is waited for
    wait = f"until [ $(wc -l <{count}0) -gt 1 ]; do sleep 0.1; done"
    ssh.write_text(f"#!/bin/sh\necho >>{count}0\n{wait}\necho >>{count}1\nexec sleep 600\n")
    ssh.chmod(0o755)
    names = [f"nowhere{number}" for number in range(12)]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    done = subprocess.run(
        [sys.executable, "-m", "launch", "doctor", "--hostfile", tmp_path / "hosts",
         "--timeout", "1s"],
        cwd=ROOT, env=environment(PATH=f"{tmp_path}:/usr/bin:/bin"), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"reachable  {', '.join(names)}  RED  no answer in 1 s" in done.stdout
    assert "1 problem(s) to fix" in done.stdout
    assert (tmp_path / "count1").exists(), "each host was waited for in turn"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("exit code 255: root@a: Permission denied (publickey).", "ssh-copy-id -p 2222 HOST;"),
        ("exit code 255: Host key verification failed.", "ssh-keygen -R '[HOST]:2222' and "
         "ssh-keyscan -p 2222 HOST >> ~/.ssh/known_hosts;"),
        ("exit code 255: ssh: Could not resolve hostname a: Name or service", "/etc/hosts"),
        ("exit code 255: connect to host a port 22: Connection refused", "start its ssh server"),
        ("exit code 255: connect to host a port 22: No route to host", "start it, and open its"),
        ("no answer in 120 s (facts)", "find out what it is waiting for"),
        ("exit code 127: sh: /x/python: not found", "bash launch/setup.sh on HOST"),
    ],
)  # fmt: skip
def test_what_ssh_says_has_a_fix_of_its_own(said, expected):
    fix = doctor._unreachable_fix(said, "2222")
    assert expected in fix
    assert ("try: ssh -p 2222 -o BatchMode=yes HOST true" in fix) == ("setup.sh" not in fix)


def test_a_secret_that_ssh_would_show_is_named_without_its_value(tmp_path, monkeypatch) -> None:
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nWANDB_API_KEY=secret-value\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = findings_of_this_host(monkeypatch, [])
    (line,) = [line for line in found if line.check == "environment"]
    assert f"{tmp_path / '.deepspeed_env'}: WANDB_API_KEY: would be visible on" in line.fact
    assert line.state == RED and "secret-value" not in str(found)


def test_answers_are_marked_to_tell_them_from_other_output(tmp_path):
    """A login shell may print a banner before the collector's lines."""
    command = [sys.executable, "-m", "launch", "doctor", "--collect"]
    done = subprocess.run(
        command, cwd=ROOT, input='{"ask": "clock"}\n{"ask": "nothing"}\n', env=environment(),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    clock, error = (line.partition("@zerolm ")[2] for line in done.stdout.splitlines())
    assert json.loads(clock)["answer"] > 1.7e9 and "KeyError" in json.loads(error)["error"]
