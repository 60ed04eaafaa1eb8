"""The timeouts of the process group."""

from tests.launching import run_workers
from zerolm.parts.settings import RunSettings
from zerolm.watchdog import liveness

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
