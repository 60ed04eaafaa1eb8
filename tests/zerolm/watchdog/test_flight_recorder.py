"""What torch's flight recorder says about real collectives of two processes.

It is on by default, with 2,000 records, in the releases of torch that are supported.
"""

import json
import os
import pickle
import subprocess
import sys

from tests.launching import ROOT, environment
from zerolm.watchdog import flight_recorder

RANKS = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from zerolm.common.run_files import RunFiles
from zerolm.watchdog import flight_recorder

folder, rank = Path(sys.argv[1]), 0 if os.fork() else 1
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
alone = [dist.new_group([0]), dist.new_group([1])]
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(3, 4))
dist.barrier()
dist.all_reduce(torch.ones(5), group=pair)
if rank == 0:
    waiting = [dist.broadcast(torch.ones(7), 0, async_op=True)]
    waiting += [dist.all_gather([torch.empty(2)] * 2, torch.ones(2), async_op=True)]
    time.sleep(0.5)
    found = [*flight_recorder.collectives(), *flight_recorder.collectives(with_calls=True)]
    files = RunFiles(folder)
    files.ranks.mkdir()
    for name in ("earlier-0", "now-1"): (files.ranks / f"flight-recorder-{name}").touch()
    flight_recorder.keep(files, "now", 0, remove_others=True)
    start = time.process_time()
    for _ in range(1000): flight_recorder.collectives()
    found.append((time.process_time() - start) / 1000)
    (folder / "found.tmp").write_text(json.dumps(found))
    (folder / "found.tmp").rename(folder / "found")
while not (folder / "found").exists(): time.sleep(0.05)
os._exit(0)
"""


def test_entered_and_finished_collectives_of_each_group_are_known(tmp_path) -> None:
    subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)], cwd=ROOT, timeout=60, check=True,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
    )  # fmt: skip
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
    assert any(frame["filename"] == "<string>" for frame in trace["entries"][0]["frames"])


def test_torch_is_told_where_to_write_unless_the_user_has(tmp_path, monkeypatch) -> None:
    for name in flight_recorder.FILE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    flight_recorder.write_to(tmp_path / "flight-recorder-")
    assert os.environ.pop("TORCH_FR_DUMP_TEMP_FILE") == str(tmp_path / "flight-recorder-")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/elsewhere/rank-")
    flight_recorder.write_to(tmp_path / "flight-recorder-")
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


def test_calls_of_nccl_are_described_like_those_of_gloo() -> None:
    """An entry as torch 2.13 documents it; NCCL itself needs a GPU."""
    entry = {"profiling_name": "nccl:_all_gather_base", "input_sizes": [[3, 4]],
             "input_dtypes": ["BFloat16"]}  # fmt: skip
    assert flight_recorder.describe(entry) == "_all_gather_base of 12 BFloat16"
    uneven = entry | {"profiling_name": "nccl:all_to_all"}
    assert flight_recorder.describe(uneven) == "all_to_all", "ranks may send different sizes"
    assert flight_recorder.describe(entry | {"profiling_name": "nccl:gather"}) == "gather"
    coalesced = {"profiling_name": "nccl:coalesced", "input_sizes": [], "input_dtypes": []}
    assert flight_recorder.describe(coalesced) == "coalesced"
