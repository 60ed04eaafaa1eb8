"""Start the ranks of one host as DeepSpeed's node launcher does, without its two processes.

    python tests/ranks.py NUM_RANKS PORT pretrain.py [its words ...]

For tests whose subject is what is learned: `deepspeed` is two more processes, each of which imports
as much as a rank does, a third of a short run. Ends with the code of the first rank that failed,
and the others with it: by themselves, as their group breaks, or killed.
"""

import os
import subprocess
import sys
import time

SIBLING_SECONDS = 10.0  # to end by itself, once a rank has failed


def main(num_ranks: int, port: str, words: list[str]) -> int:
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    same |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": str(num_ranks)}
    ranks = []
    for rank in range(num_ranks):
        line = [sys.executable, "-u", words[0], f"--local_rank={rank}", *words[1:]]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(line, env={**os.environ, **same, **own}))
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
