"""Start the ranks of one host as DeepSpeed's node launcher does, without the launcher.

    python tests/start_ranks.py NUM_RANKS PORT pretrain.py [flags ...]

For tests of what is learned: `deepspeed` adds two processes, whose imports take a third of a short
run. Exits with the code of the first rank that failed. The other ranks end by themselves when their
process group breaks, or are killed.
"""

import os
import subprocess
import sys
import time

SIBLING_SECONDS = 10.0  # time for the other ranks to end by themselves after one has failed


def main(num_ranks: int, port: str, command: list[str]) -> int:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    shared |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": str(num_ranks)}
    ranks = []
    for rank in range(num_ranks):
        argv = [sys.executable, "-u", command[0], f"--local_rank={rank}", *command[1:]]
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(argv, env={**os.environ, **variables}))
    failed, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks):
        codes = [rank.returncode for rank in ranks if rank.returncode]
        if codes and not failed:
            failed, deadline = codes[0], time.monotonic() + SIBLING_SECONDS
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)
    return (failed or next((rank.returncode for rank in ranks if rank.returncode), 0)) % 256


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
