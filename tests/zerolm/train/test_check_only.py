"""`--check` outside a launcher: the same text as a rank's, without what only training imports."""

import subprocess
import sys

import pytest

from tests import ROOT
from tests.zerolm.preflight.preflight_inputs import command
from zerolm.common.remembered import VARIABLE
from zerolm.train import check_only

PROGRAM = """import os, runpy, sys
import zerolm.distributed.process_group as process_group
def end(code):
    print(sorted({"torch", "transformers", "deepspeed", "zerolm.data.loader"} & sys.modules.keys()))
    sys.exit(code)
process_group.exit_process = end
sys.argv = ["pretrain.py", *sys.argv[1:]]
runpy.run_path("pretrain.py", run_name="__main__")
"""
FLAGS = ["--deepspeed_config", "ds_configs/zero2.json", "--run_dir", "runs/none"]
REFUSED = {
    "missing": [*FLAGS, "--check"],
    "unknown flag": [*FLAGS, "--check", "--data", "nowhere", "--modle_config", "x.json"],
    "no config": [*FLAGS, "--check", "--model_config", "nowhere.json", "--seq_len", "0"],
    "line break": [*FLAGS, "--check", "--data", "a\nb"],
}


def checked(words, *more):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, *more],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    *lines, modules = done.stdout.splitlines()
    return (done.returncode, lines, done.stderr), modules


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_refusal_has_the_same_text_as_a_rank_gives(words):
    alone, modules = checked(words)
    in_a_rank, of_training = checked(words, "--check=true")
    assert alone == in_a_rank and alone[0] == 2 and "pretrain.py" not in alone[1]
    assert "zerolm.data.loader" in of_training
    assert "transformers" not in modules and "loader" not in modules


def test_ranks_and_other_forms_of_the_flag_are_left_to_a_rank():
    assert check_only.is_wanted(["--seq_len", "8", "--check"], {})
    assert not check_only.is_wanted(["--seq_len", "8"], {})
    assert not check_only.is_wanted(["--check"], {"RANK": "0", "WORLD_SIZE": "2"})
    for other in ("--no_check", "--no-check", "--check=false"):
        assert not check_only.is_wanted(["--check", other], {})


def test_another_check_of_the_same_run_imports_none_of_the_libraries(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    words = [*command(inputs, "--deepspeed_config fp32.json"), "--check", "--wandb", "off"]
    first, modules = checked(words)
    again, none = checked(words)
    assert first == again and first[0] == 0 and "of the model" in " ".join(first[1])
    assert "torch" in modules and none == "[]"
