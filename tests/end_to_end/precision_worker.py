"""A rank of pretrain.py on a CPU of another kind: its name and time of bf16 products are given.

    precision_worker.py EXPECTED_CODE RATIO_OF_RANK_0,RATIO_OF_RANK_1 FLAGS...

The output has both streams, with the last lines of rank 0.
"""

import os
import sys

import pretrain
from zerolm.distributed import device


def main(code: str, ratios: str, *flags: str) -> None:
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank)
    ratio = ratios.split(",")[rank]
    device.bf16_ratio = lambda where: float(ratio)
    device.cpu_name = lambda: f"CPU of ratio {ratio}"
    sys.stderr = sys.stdout
    found = pretrain.main(list(flags))
    assert found == int(code), f"exit code {found}"


main(*sys.argv[1:])
