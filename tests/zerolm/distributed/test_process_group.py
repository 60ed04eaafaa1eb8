"""The process group: its timeouts, and DeepSpeed's buffers in shared memory."""

import mmap
import os
import subprocess
import sys
import time

from tests.launching import run_workers
from zerolm.distributed import process_group
from zerolm.parts.settings import RunSettings
from zerolm.watchdog import liveness


def test_buffers_of_killed_ranks_are_removed_unless_they_are_new_or_in_use(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(process_group, "SHARED_MEMORY", tmp_path)
    own = f"{process_group.BUFFER}_{os.getuid()}_127.0.0.1_29500"
    names = {
        "stale": f"{own}_0", "mapped": f"{own}_1", "open": f"{own}_2", "new": f"{own}_3",
        "of another user": f"{process_group.BUFFER}_{os.getuid() + 1}_127.0.0.1_29500_0",
        "of another program": "psm_12345678",
    }  # fmt: skip
    long_ago = time.time() - process_group.STALE_BUFFER_SECONDS - 60
    for what, name in names.items():
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
        if what != "new":
            os.utime(tmp_path / name, (long_ago, long_ago))
    # The time of the last change of a file's status cannot be set, so that limit moves instead.
    monkeypatch.setattr(process_group, "STALE_BUFFER_SECONDS", -1)
    os.utime(tmp_path / names["new"], (time.time() + 60, time.time() + 60))
    holder = (
        "import mmap, sys, time\n"
        "mapped = open(sys.argv[1], 'r+b'); map = mmap.mmap(mapped.fileno(), 0); mapped.close()\n"
        "kept = open(sys.argv[2]); print('ready', flush=True); time.sleep(600)"
    )
    paths = [str(tmp_path / names[what]) for what in ("mapped", "open")]
    process = subprocess.Popen(
        [sys.executable, "-c", holder, *paths], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process_group.remove_stale_buffers()
        finally:
            process.kill()
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == set(names) - {"stale"}
    process_group.remove_stale_buffers()
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == {"new", "of another user", "of another program"}


GROUPS = """
import deepspeed.comm, torch, warnings
from zerolm.distributed import process_group
warnings.simplefilter("error", UserWarning)
process_group.init()
groups = [None, deepspeed.comm.new_group([0]), torch.distributed.new_group([0], backend="gloo")]
for group in groups:
    group = group or torch.distributed.group.WORLD
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
print(torch.distributed.distributed_c10d._get_default_timeout("nccl").total_seconds())
process_group.exit_process(0)
"""


def test_no_group_times_out_before_the_watchdog(tmp_path):
    script = tmp_path / "groups.py"
    script.write_text(GROUPS)
    output = run_workers(1, script, timeout=120)
    limits = [float(line) for line in output.splitlines()[-4:]]
    longest = RunSettings().hang_timeout * liveness.START_FACTOR
    assert len(limits) == 4 and min(limits) >= 2 * longest, output
