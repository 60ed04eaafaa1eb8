"""A fake launch for the tests of the supervisor, which copy it to `pretrain.py` and start it.

Its nth start does what the nth word of the variable `PLAN` says; further starts repeat the last.
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


def log_event(name: str, **values: object) -> None:
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": name, "time": "", "step": 7, **values}) + "\n")


def publish_checkpoint(step: int) -> None:
    directory = run_dir / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "MANIFEST.json").write_text("{}")


number = len(starts.read_text().split()) if starts.exists() else 0
plan = os.environ["PLAN"].split()
action = plan[min(number, len(plan) - 1)]
with open(starts, "a") as file:
    file.write(f"{os.environ['ZEROLM_SUPERVISOR']}\n")
print(f"start {number}: {action} {' '.join(sys.argv[1:])}", flush=True)
if action == "done":
    log_event("done")
elif action == "odd":  # lines that no run writes
    with open(run_dir / "events.jsonl", "a") as file:
        file.write('[1]\n"event"\n{"event": "rank_lost"}\n')
    sys.exit(1)
elif action == "silent":  # as `deepspeed` does when its node launcher is killed
    pass
elif action == "stopped":
    log_event("stopped", reason="--stop_after")
    sys.exit(1)  # as the launcher does after a SIGTERM
elif action == "gave_up":
    log_event("gave_up", reason="a NaN")
    sys.exit(76)
elif action == "refuse":
    print("pretrain.py: refused, nothing was written.\ndata: gone")
    sys.exit(2)
elif action == "changed":
    print("pretrain.py: refused, nothing was written.")
    print("run.json: settings.seed: 1 -> 2 (--seed). Give the old value to resume the run.")
    sys.exit(2)
elif action == "edit":  # crash, after the first config file has been cut and the second deleted
    paths = [Path(sys.argv[sys.argv.index(flag) + 1]) for flag in ("--settings", "--model_config")]
    os.truncate(paths[0], 5)
    paths[1].unlink()
    sys.exit(1)
elif action == "crash":
    rank = {"rank": 3, "host": "node7", "pid": 9, "step": 7, "phase": "step",
            "sequences": [48, 8], "reason": "ended: SIGKILL", "stacks": None}  # fmt: skip
    log_event("rank_lost", ended="SIGKILL", ranks=[rank])
    print("RuntimeError: out of something")
    sys.exit(1)
elif action == "early":  # before its first step
    sys.exit(1)
elif action == "slow":
    log_event("slow_host", host="node1", slow=True, ratio=1.5, seconds=200.0)
    sys.exit(1)
elif action == "corrupt":
    place = {"rank": 0, "host": "node1.cluster", "device": "cpu"}
    log_event("corrupted", reason="step 7: a bit flipped", places=[place])
    sys.exit(77)
elif action == "sigbus":  # as the launcher does after a rank has died of it
    print("[ERROR] [launch.py:341:sigkill_handler] Process 9 exits with return code = -7")
    sys.exit(249)
elif action == "advance":  # a crash, but after a newer checkpoint
    publish_checkpoint(10 * (number + 1))
    sys.exit(1)
elif action in ("orphan", "sleep"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if action == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    sys.exit(1)
