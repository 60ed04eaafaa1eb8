"""The ladder of imports: who may import whom, read from the source of every module.

Rung 4 starts things, rung 3 puts a run together, rung 2 has what is measured beside training, rung
1 the parts, rung 0 what parts share. Imports run downward only: parts do not import each other, and
what two of them need stands on rung 0. `data_prep` and `launch` may use rung 0 of `zerolm`, never
the reverse.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("zerolm", "data_prep", "launch")


def of(package: str, names: str) -> list[str]:
    """Return the dotted names of modules of one package."""
    return [f"{package}.{name}" for name in names.split()]


RUNGS = {
    4: ["pretrain", "zerolm.__main__", "data_prep.__main__", "launch.__main__"],
    3: [
        "zerolm.run",
        *of("data_prep", "commands_clean commands_dedup commands_look commands_pack commands_run"),
        *of("data_prep", "commands_tokenize commands_tokenizer"),
    ],
    2: [
        *of("zerolm", "evaluations feed journal resumption"),
        *of("data_prep", "pipeline_plan recipe tokenization tokenizer_run"),
    ],
    1: [
        # before a run
        *of("zerolm", "preflight restore run_directory"),
        # training
        *of("zerolm", "batches data health leakage model optimizer stability throughput"),
        *of("zerolm", "train_step uploads watchdog"),
        # checkpoints
        *of("zerolm", "checkpoint checkpoint_writer probe reshard saves uploader"),
        # what is measured and looked at
        *of("zerolm", "evaluate evaluate_export export metrics plot report status"),
        *of("data_prep", "assemble clean decontaminate dedup encoders executors inspect pack"),
        *of("data_prep", "pipeline_report shard_manifests sources stats stats_page"),
        *of("data_prep", "tokenization_state tokenize tokenizer_training tokenizers"),
        *of("launch", "demo_corpus demo_summary doctor node plan render supervise"),
    ],
    0: [
        # settings, files and the machine become a plan
        *of("zerolm", "budget defaults ds_config ds_optimizers ds_resolve ds_rules ds_schema"),
        *of("zerolm", "flags host_rules inputs machine memory model_rules plan resolution"),
        *of("zerolm", "resources run_record run_rules settings topology"),
        # the flags of what comes after a run
        *of("zerolm", "command_flags"),
        # what all use
        *of("zerolm", "distributed errors faults files jsonl ledger provenance unpickling values"),
        # the model and its arithmetic
        *of("zerolm", "architecture flops initialization loss schedule self_check"),
        # token shards
        *of("zerolm", "manifest order origins packing shard_directory shard_writer shards sources"),
        *of("zerolm", "windows"),
        # blocks of shards, and shards that are elsewhere
        *of("zerolm", "block_cache block_sums data_cache object_ranges own_directory"),
        *of("zerolm", "range_threads remote_blocks remote_shards shard_files shares store_copies"),
        *of("zerolm", "url window_readers"),
        # checkpoints, and steps that are taken back
        *of("zerolm", "checkpoint_directory partitions refusal rollback skipped snapshot spike"),
        *of("zerolm", "zero_files"),
        # looking at memory
        *of("zerolm", "activations live_memory"),
        # the optimizer's parts
        *of("zerolm", "adaptive_clip muon"),
        # mixtures of experts
        *of("zerolm", "routing"),
        # the loss without all of its logits
        *of("zerolm", "chunked_head loss_chunks"),
        # how blocks are computed
        *of("zerolm", "allocator attention_kernels compiled_blocks flash_attention fused_kernels"),
        *of("zerolm", "nvme recomputation"),
        # what a run takes from its sources
        *of("zerolm", "epoch_plan mixture mixture_settings permutation run_order"),
        # looking at data
        *of("zerolm", "excerpts tokenizer_copy"),
        # documents kept apart
        *of("zerolm", "document_mask"),
        # ranks that share sequences
        *of("zerolm", "parallel parallel_rules ulysses"),
        # export's parts
        *of("zerolm", "hub line_file model_card weight_files"),
        # the evaluations' parts
        *of("zerolm", "begun evaluation_rules harness hellaswag likelihood patience sampling"),
        *of("zerolm", "text_coder"),
        # looking at a run's health
        *of("zerolm", "diagnosis diagnosis_of_speed noise_scale norms observations"),
        # the object store's parts
        *of("zerolm", "events object_store upload_rules"),
        # looking at a run
        *of("zerolm", "console curves event_words page_data panels reporting run_history"),
        *of("zerolm", "run_settings run_summary thinning"),
        # the trackers, each in a process of its own
        *of("zerolm", "alerts mirror tensorboard_tracker tracker wandb_files wandb_sync"),
        *of("zerolm", "wandb_tracker wandb_workspace"),
        # the watchdog's parts
        *of("zerolm", "heartbeats processes pulse stacks verdict vital_signs"),
        # what the stages of data_prep share
        *of("data_prep", "command_line documents phases progress remote_tasks sieve slurm"),
        *of("data_prep", "stage_counts stage_documents stage_files stage_options stage_outputs"),
        *of("data_prep", "workers"),
        # filters
        *of("data_prep", "fast_words filter_steps filters words"),
        # between encoding and shards
        *of("data_prep", "best_fit parts reuse write_shard"),
        # reading inputs
        *of("data_prep", "bad_input input_flags readers streams tables units"),
        # deduplication's and decontamination's parts
        *of("data_prep", "dedup_candidates dedup_clusters dedup_files evaluation_items"),
        *of("data_prep", "flags_dedup minhash overlap"),
        # the encoders' parts
        *of("data_prep", "backends encoder_choice equality fuzz_texts text_sample"),
        *of("data_prep", "tokenizer_files tokenizer_flags tokenizer_report"),
        # recipes
        *of("data_prep", "pipeline_page pipeline_state recipe_options"),
        # starting and looking at hosts
        *of("launch", "all_reduce attempt collector command_words findings flag_types forwarded"),
        *of("launch", "host_session hosts templates"),
        # the plan's parts
        *of("launch", "estimate hardware plan_text probing published reliability scaling search"),
        *of("launch", "step_time subject"),
    ],
}
HEAVY = {"torch", "deepspeed", "transformers", "datasets"}


def modules() -> dict[str, Path]:
    """Return {dotted name: file} of every module of the project, packages' own files left out."""
    found = {"pretrain": ROOT / "pretrain.py"}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__init__":
                found[".".join(parts)] = path
    return found


MODULES = modules()
RUNG_OF = {name: rung for rung, names in RUNGS.items() for name in names}


def imports_of(name: str) -> set[str]:
    """Return the project's modules that a module imports anywhere in its source."""
    named = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write imports of the project in full"
            named.add(node.module or "")
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return named & set(MODULES) - {name}


def test_every_module_stands_on_one_rung_once():
    listed = [name for names in RUNGS.values() for name in names]
    assert sorted(listed) == sorted(MODULES), "say in RUNGS, once, where a new module stands"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_run_downward(name):
    package = name.partition(".")[0]
    for imported in imports_of(name):
        target = imported.partition(".")[0]
        if RUNG_OF[name] == 0:
            assert RUNG_OF[imported] == 0, f"{name} must not import {imported}: it is above"
        else:
            assert RUNG_OF[imported] < RUNG_OF[name], f"{name} must not import {imported}"
        if target != package and name != "pretrain":
            assert target == "zerolm" and RUNG_OF[imported] == 0, (
                f"{name} must not import {imported}: only rung 0 of zerolm is shared"
            )


def test_rung_0_has_no_cycles():
    graph = {name: imports_of(name) for name in MODULES if RUNG_OF.get(name) == 0}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    "words",
    [
        ["data_prep", "--help"],
        ["data_prep", "tokenize", "--help"],
        ["launch.demo_corpus", "--help"],
        ["launch", "supervise", "--help"],
        ["launch", "plan", "--help"],
        ["launch", "doctor", "--help"],
        ["launch", "render", "--help"],
        ["zerolm", "--help"],
        ["zerolm", "status", "--help"],
        ["zerolm", "report", "--help"],
    ],
    ids=" ".join,
)
def test_help_waits_for_no_heavy_import(words):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported or "zerolm.errors" in imported, "the list of imports is empty"
    assert not HEAVY & imported
