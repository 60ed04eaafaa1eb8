"""The GPU benchmark: its cases, its table, cases that fail, and a run with tiny models on a CPU."""

import contextlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import carry, checks, table
from benchmarks.gpu.cases import OURS, PLAIN, TRAINER, cases, command, parse_options
from benchmarks.gpu.run_case import failure_reason, idle_share
from tests import ROOT
from zerolm.ds_config.profile import Profile
from zerolm.parts.parse import parse_settings


def test_every_case_is_a_valid_command(tmp_path):
    arguments = Namespace(
        toy=False, accumulation=2, log_interval=2, port=1, deepspeed_config="ds_configs/zero2.json"
    )
    titles = [case.title for case in cases((2048, 8192))]
    assert len(set(titles)) == len(titles)
    exact = "1.3B, 2048: pretrain.py --compile zero_optimization.stage=1"
    assert titles[:2] == [f"{exact} --profile 3:3", exact]
    for case in cases((2048, 8192)):
        argv = command(case, 4, 2, arguments, tmp_path)
        config = json.loads(Path(argv[argv.index("--model_config") + 1]).read_text())
        assert config["max_position_embeddings"] >= case.seq_len
        if case.contender == OURS:
            settings, problems = parse_settings(argv[argv.index("pretrain.py") + 1 :])
            assert problems == [] and settings.batch_tokens == 2 * 4 * case.seq_len
            profile = json.loads(Path(settings.deepspeed_config).read_text())
            assert profile["bf16"]["enabled"] or not settings.fp8
            assert Profile.parse(profile).problems == []
            if "profile=" not in case.words:
                torch_adam = profile["optimizer"]["params"]["torch_adam"]
                assert torch_adam == ("fused_adam" not in case.words)


def test_the_table_has_ratios_goals_and_the_reason_of_a_missing_figure():
    one, _, other, third = cases((2048, 8192))[1:5]
    found = [
        table.Figures(
            one,
            8,
            60_000.0,
            0.61,
            50 << 30,
            40.0,
            75.0,
            0.0004,
            4.5,
            1.5,
            61_000.0,
            48 << 30,
            3,
            2,
            "sdpa",
            "1980 MHz",
        ),
        table.Figures(other, 8, 40_000.0, 0.41, 60 << 30, 20.0, 50.0),
        table.Figures(
            third, 8, outcome=failure_reason(["torch.OutOfMemoryError: out of memory"], 9)
        ),
    ]
    shown = table.table(found, Namespace(toy=False))
    row = "| 60,000 | 61,000 | 61.0% | 50.0 | 48.0 | 40 | 75 | 0.40 | 4.50, 1.50 | sdpa | 3, 2 "
    assert row + "| 1.00 | 1980 MHz |" in shown
    assert "| 40,000 | - | 41.0% | 60.0 | - | 20 | 50 | - | - | - | 0, 0 | 0.67 | - |" in shown
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("| ")}) == 1
    assert "| out of memory |" in shown
    toy = table.table(found, Namespace(toy=True))
    assert "tiny for 1.3B" in toy and "goal" not in toy
    assert "MFU 0.610" in shown and "1.50 times as fast as Trainer" in shown
    assert failure_reason(["step=1"], 9) == "no figure in 9 s"
    output = ["ValueError: wrong\n", "[launch.py] exits with return code = 1\n", ""]
    assert failure_reason(output, 9) == "ended: ValueError: wrong"
    refused = ["pretrain.py: refused, nothing was written.\n", "a.json: key: 1, why. Fix.\n", ""]
    assert failure_reason(refused, 9) == "refused: a.json: key: 1, why. Fix."
    assert failure_reason(["[rank0]: torch.Error: odd\n", "bye\n", ""], 9) == (
        "ended: [rank0]: torch.Error: odd"
    )


def test_a_second_call_measures_only_what_has_no_figure_yet(tmp_path):
    one, other = cases((2048, 8192))[:2]
    found = [table.Figures(one, 8, 60_000.0), table.Figures(other, 8, outcome="not run")]
    table.write(found, Namespace(toy=False, output=tmp_path / "of this gpu"))
    assert table.read(tmp_path / "of this gpu") == {one: found[0]}
    assert table.read(tmp_path / "nothing") == {} and table.read(None) == {}


def test_the_idle_share_counts_overlapping_kernels_once():
    spans = [(0, 4, "kernel"), (1, 2, "gpu_memcpy"), (6, 2, "kernel"), (0, 99, "cpu_op")]
    events = [{"ts": at, "dur": length, "cat": kind} for at, length, kind in spans]
    assert idle_share([*events, {"ph": "M"}]) == 2 / 8 and idle_share([]) is None


def test_options_of_a_case_are_sorted_into_flags_keys_and_variables():
    options = parse_options("--compile a.b=false c=bf16 d.e=5 NAME_X=1 micro/2 --x=y fused_adam")
    assert parse_options("micro*2 profile=zero3").micro_factor == 2.0
    assert options.flags == ["--compile", "--x=y"] and options.environment == {"NAME_X": "1"}
    assert options.keys == {"a.b": False, "c": "bf16", "d.e": 5}
    assert options.micro_factor == 0.5 and options.deepspeeds_adam


def test_the_carry_list_has_every_requirement_that_is_not_installed():
    target = carry.environment("3.12", "x86_64")
    missing = carry.missing(["torch", "transformers", "numpy", "pyarrow"], target)
    assert {"deepspeed", "accelerate", "pydantic-core", "orjson", "xxhash"} <= missing
    assert not missing & {"torch", "numpy", "huggingface-hub", "wandb", "matplotlib"}
    assert missing <= set(carry.versions(target))


def test_a_run_that_ends_by_itself_does_not_pass_as_killed(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def started(runs, *run, **options):
        (tmp_path / "log").write_text("step=6/6 loss=8.4\n")
        with subprocess.Popen(["true"]) as process:
            yield process, tmp_path / "log"

    monkeypatch.setattr(checks.Runs, "started", started)
    with pytest.raises(checks.Failed, match="exit code 0"):
        checks.Runs(True, tmp_path, 9).train("killed", kill=True)


def test_a_check_that_cannot_be_made_here_has_not_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = ("fp8 beside bf16", "out of memory")
    monkeypatch.setattr(checks, "CHECKS", {name: checks.CHECKS[name] for name in kept})
    shown = checks.run_checks(
        Namespace(output=tmp_path, toy=True, case_seconds=9), deadline=float("inf")
    )
    assert shown.count("| not run | needs a GPU |") == 2 and "passed" not in shown
    assert json.loads((tmp_path / "checks.json").read_text()) == {}


@pytest.mark.soak
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path):
    first = f"160M, 64: ({OURS} --compile zero_optimization.stage=1$|Trainer|plain)"
    flags = ["--toy", "--only", first, "--seconds", "800", "--case_seconds", "250"]
    flags += ["--lines", "3", "--warmup_lines", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "gpu.json").read_text())
    contenders = [OURS, TRAINER, PLAIN]
    assert [row["case"]["contender"] for row in rows] == contenders
    for row in rows:
        assert row["outcome"] == "" and row["tokens_per_second"] > 0 and row["peak_bytes"] > 1e8
        assert (row["graphs"] > 0) == (row["case"]["contender"] != TRAINER)
    assert done.stdout.rstrip().endswith((tmp_path / "gpu.md").read_text().rstrip())
