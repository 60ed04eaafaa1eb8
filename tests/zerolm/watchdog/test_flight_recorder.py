"""What torch's flight recorder says about real collectives of two processes.

It is on by default, with 2,000 records, in the releases of torch that are supported.
"""

import json
import os
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace

from tests.launching import run_workers
from zerolm.watchdog import flight_recorder

RANKS = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from zerolm.run_dir.files import RunFiles
from zerolm.watchdog import flight_recorder

folder, rank = Path(sys.argv[1]), 0 if os.fork() else 1
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
alone = [dist.new_group([0]), dist.new_group([1])]
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(3, 4))
dist.barrier()
dist.all_reduce(torch.ones(5), group=pair)
files = RunFiles(folder)
files.ranks.mkdir(exist_ok=True)
if rank == 0:
    waiting = [dist.broadcast(torch.ones(7), 0, async_op=True)]
    waiting += [dist.all_gather([torch.empty(2)] * 2, torch.ones(2), async_op=True)]
    time.sleep(0.5)
    found = [*flight_recorder.collectives(), *flight_recorder.collectives(with_calls=True)]
    (files.ranks / "flight-recorder-earlier-0").touch()
    flight_recorder.keep(files, "now", 0, remove_others=True)
    start = time.process_time()
    for _ in range(1000): flight_recorder.collectives()
    found.append((time.process_time() - start) / 1000)
    (folder / "found.tmp").write_text(json.dumps(found))
    (folder / "found.tmp").rename(folder / "found")
else:
    flight_recorder.keep(files, "now", 1, remove_others=False)
while not (folder / "found").exists(): time.sleep(0.05)
os._exit(0)
"""


def test_entered_and_finished_collectives_of_each_group_are_known(tmp_path, caplog) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    run_workers(1, script, tmp_path, timeout=60)
    counts, no_calls, known, calls, seconds = json.loads((tmp_path / "found").read_text())
    assert {name: group["entered"] for name, group in counts.items()} == {"0/0": 4, "3/0": 1}
    assert all(group["finished"] is None for group in counts.values()) and no_calls == []
    assert known == {
        "0/0": {"entered": 4, "finished": 2, "started": None},
        "3/0": {"entered": 1, "finished": 1, "started": None},
    }
    assert calls == [
        ["0/0", 1, "all_reduce of 12 Float"], ["0/0", 2, "barrier"],
        ["3/0", 1, "all_reduce of 5 Float"],
        ["0/0", 3, "broadcast of 7 Float"], ["0/0", 4, "all_gather of 2 Float"],
    ]  # fmt: skip
    assert seconds < 0.0005, "a heartbeat every 2 s takes under 0.1% of the time, 2 ms"
    kept = sorted((tmp_path / "ranks").iterdir())
    assert [path.name for path in kept] == ["flight-recorder-now-0", "flight-recorder-now-1"]
    trace = pickle.loads(kept[0].read_bytes())
    names = [entry["profiling_name"] for entry in trace["entries"]]
    assert names[0] == "gloo:all_reduce" and len(names) == 5
    assert any(frame["filename"] == str(script) for frame in trace["entries"][0]["frames"])
    with caplog.at_level("INFO"):
        fr_trace.main(["--prefix", "flight-recorder-now-", str(tmp_path / "ranks")])
    assert "Not all ranks joining collective" in caplog.text and "broadcast" in caplog.text


def test_torch_is_told_where_to_write_unless_the_user_has(tmp_path, monkeypatch) -> None:
    for name in flight_recorder.FILE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    flight_recorder.write_to(tmp_path / "flight-recorder-")
    assert os.environ.pop("TORCH_FR_DUMP_TEMP_FILE") == str(tmp_path / "flight-recorder-")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/elsewhere/rank-")
    flight_recorder.write_to(tmp_path / "flight-recorder-")
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


def nccl(number: int, kind: str, state: str, started: int = 0, **more: object) -> dict:
    """Return an entry as torch 2.11 and 2.13 document it; NCCL itself needs a GPU."""
    return {
        "process_group": ["0", "default_pg"], "is_p2p": False, "collective_seq_id": number,
        "profiling_name": f"nccl:{kind}", "input_sizes": [[3, 4]], "input_dtypes": ["BFloat16"],
        "state": state, "retired": state == "completed", "time_discovered_started_ns": started,
        "time_created_ns": number, **more,
    }  # fmt: skip


@pytest.mark.parametrize("timing", [0, 1])
def test_calls_of_nccl_are_read_like_those_of_gloo(monkeypatch, timing) -> None:
    entries = [
        nccl(7, "_all_gather_base", "completed", timing),
        nccl(0, "send 0->1", "completed", is_p2p=True),
        nccl(8, "_reduce_scatter_base", "completed", timing),
        nccl(8, "coalesced", "completed", timing, input_sizes=[], input_dtypes=[]),
        nccl(9, "all_reduce", "started" if timing else "scheduled", timing),
        nccl(10, "all_to_all", "scheduled"),
    ]
    group = Mock(group_name="0")
    group._get_sequence_number_for_group.return_value = 10
    monkeypatch.setattr(flight_recorder, "_members", lambda: {group: [0, 1, 2, 3]})
    monkeypatch.setattr(flight_recorder, "_entries", lambda: entries)
    groups, calls = flight_recorder.collectives(with_calls=True)
    assert groups == {"0/0": {"entered": 10, "finished": 8, "started": 9 if timing else None}}
    assert calls == [
        ("0/0", 7, "_all_gather_base of 12 BFloat16"),
        ("0/0", 8, "_reduce_scatter_base of 12 BFloat16, coalesced"),
        ("0/0", 9, "all_reduce of 12 BFloat16"),
        ("0/0", 10, "all_to_all"),  # ranks may send different sizes
    ]


def test_the_watchdogs_thread_asks_the_device_of_its_rank(monkeypatch) -> None:
    used = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    flight_recorder.collectives(with_calls=True)
    assert used and set(used) == {3}
