"""A run on a slow file server that shows files late and loses them, with a clock that jumps."""

import pytest

from tests.end_to_end import run_digest
from tests.end_to_end.recipe import profile, recipe
from tests.faulty_files import FaultyFiles
from tests.launching import run_ranks
from tests.supervised import Supervised

STEPS, SAVE = 24, 6


@pytest.mark.soak
def test_a_run_on_a_bad_file_server_equals_one_on_a_good_disk(tmp_path, llama, corpus) -> None:
    ds_json = profile(tmp_path / "ds.json", 2, bf16=True)

    def flags(name: str) -> list[object]:
        own = recipe(llama, corpus, tmp_path / name, ds_json, STEPS, micro=2)
        return [*own, "--checkpoint_interval", SAVE, "--wandb", "off", "--hang_timeout", "1m"]

    done = run_ranks(2, *flags("good"))
    assert done.returncode == 0, done.stdout[-4000:]
    faults = FaultyFiles(tmp_path, tmp_path / "bad")
    faults.set(late_ms=3000, delay_ms=20)
    slow = {"FAULT": "step.begin:*:*:sleep=0.3"}
    run_dir = tmp_path / "bad"
    with Supervised(run_dir, flags("bad"), **faults.variables, **slow) as run:
        run.wait_for_step(2)
        faults.set(delay_ms=20, estale=0.01, clock=3 * 3600)
        run.wait_for_step(SAVE + 2)
        (run_dir / "metrics.jsonl").unlink()
        faults.set(readonly=1, clock=-5 * 3600)
        run.wait_for("not reported", lambda: "Read-only file system" in run.output(), 120)
        faults.set(full=1)
        run.wait_for("no failed save", lambda: "No space left on device" in run.output(), 120)
        faults.set(delay_ms=50)
        assert run.wait(300) == 0, run.output()[-6000:]
    digests = [run_digest.digest(tmp_path / name) for name in ("bad", "good")]
    assert run_digest.differences(*digests) == []
