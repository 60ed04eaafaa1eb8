"""Stands in for a launch in the tests of the supervisor: copied to a `pretrain.py`, started as one.

What it does at its nth start is the nth word of `PLAN`; the last one is for all further starts.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

run_dir = Path(sys.argv[sys.argv.index("--run_dir") + 1])
starts = run_dir / "starts"


def event(name: str, **what: object) -> None:
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": name, "time": "", "step": 7, **what}) + "\n")


def checkpoint(step: int) -> None:
    directory = run_dir / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "MANIFEST.json").write_text("{}")


number = len(starts.read_text().split()) if starts.exists() else 0
plan = os.environ["PLAN"].split()
act = plan[min(number, len(plan) - 1)]
with open(starts, "a") as file:
    file.write(f"{os.environ['ZEROLM_SUPERVISOR']}\n")
print(f"start {number}: {act} {' '.join(sys.argv[1:])}", flush=True)
if act == "done":
    event("done")
elif act == "silent":  # what `deepspeed` does when its node launcher is killed
    pass
elif act == "stopped":
    event("stopped", reason="--stop_after")
    sys.exit(1)  # what the launcher makes of it after a SIGTERM
elif act == "gave_up":
    event("gave_up", reason="a NaN")
    sys.exit(76)
elif act == "refuse":
    print("pretrain.py: refused, nothing was written.")
    sys.exit(2)
elif act == "crash":
    rank = {"rank": 3, "host": "node7", "pid": 9, "step": 7, "phase": "step",
            "sequences": [48, 8], "reason": "ended: SIGKILL", "stacks": None}  # fmt: skip
    event("rank_lost", ended="SIGKILL", ranks=[rank])
    print("RuntimeError: out of something")
    sys.exit(1)
elif act == "advance":  # a crash, but after a newer checkpoint
    checkpoint(10 * (number + 1))
    sys.exit(1)
elif act in ("orphan", "sleep"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if act == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    sys.exit(1)
