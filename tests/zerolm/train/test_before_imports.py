"""A process that forks ranks after its imports prepares the host before them."""

import subprocess
import sys

from tests import ROOT

FORK = """
import os, sys
from zerolm.train.before_imports import become_rank, prepare_host
os.environ.pop("OMP_NUM_THREADS", None)
os.environ.update(LOCAL_SIZE="2", WORLD_SIZE="2")
prepare_host(os.environ)
assert "torch" not in sys.modules
import pretrain
shared = os.environ["OMP_NUM_THREADS"]
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.environ.update(RANK="1", LOCAL_RANK="1")
become_rank(os.environ)
assert os.environ["OMP_NUM_THREADS"] == shared
assert pretrain.process_group.environment_rank() == (1, 1, 2)
"""


def test_a_process_forked_after_the_imports_becomes_a_rank() -> None:
    subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, check=True, timeout=300)
