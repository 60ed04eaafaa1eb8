"""DeepSpeed's buffers in shared memory."""

import mmap
import os
import subprocess
import sys
import time

from zerolm.engine import shared_memory


def test_buffers_of_killed_ranks_are_removed_unless_they_are_new_or_in_use(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    own = f"{shared_memory.BUFFER}_{os.getuid()}_127.0.0.1_29500"
    names = {
        "stale": f"{own}_0", "mapped": f"{own}_1", "open": f"{own}_2", "new": f"{own}_3",
        "of another user": f"{shared_memory.BUFFER}_{os.getuid() + 1}_127.0.0.1_29500_0",
        "of another program": "psm_12345678",
    }  # fmt: skip
    long_ago = time.time() - shared_memory.STALE_SECONDS - 60
    for what, name in names.items():
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
        if what != "new":
            os.utime(tmp_path / name, (long_ago, long_ago))
    # The time of the last change of a file's status cannot be set, so that limit moves instead.
    monkeypatch.setattr(shared_memory, "STALE_SECONDS", -1)
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
            shared_memory.remove_stale()
        finally:
            process.kill()
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == set(names) - {"stale"}
    shared_memory.remove_stale()
    left = {what for what, name in names.items() if (tmp_path / name).exists()}
    assert left == {"new", "of another user", "of another program"}
