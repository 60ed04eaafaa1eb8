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
RUNGS = {
    4: {"pretrain", "zerolm.__main__", "data_prep.__main__", "launch.__main__"},
    3: {"zerolm.run", "data_prep.commands_pack", "data_prep.commands_tokenize",
        "data_prep.commands_dedup", "data_prep.commands_clean", "data_prep.commands_run",
        "data_prep.commands_look", "data_prep.commands_tokenizer"},
    2: {"zerolm.evaluations", "data_prep.tokenization", "data_prep.recipe",
        "data_prep.tokenizer_run", "data_prep.pipeline_plan"},
    1: {
        *("zerolm." + name for name in (
            "checkpoint", "checkpoint_writer", "data", "evaluate", "evaluate_export", "export",
            "metrics", "model", "optimizer", "plot", "preflight", "probe", "report",
            "reshard", "restore", "run_directory", "saves", "status", "stability", "throughput",
            "train_step", "uploader", "uploads", "watchdog", "batches",
            "health", "metrics", "model", "optimizer", "plot", "preflight", "probe", "report",
            "reporting", "reshard", "restore", "run_directory", "saves", "status", "stability",
            "throughput", "train_step", "uploader", "uploads", "watchdog", "batches",
        )),
        *("data_prep." + name for name in ("inspect", "sources", "tokenize", "tokenizers")),
        *("data_prep." + name for name in ("stats", "stats_page")),
        "data_prep.clean",
        "data_prep.executors",
        "data_prep.pipeline_report",
        "data_prep.encoders",
        "data_prep.tokenizer_training",
        *("data_prep." + name for name in ("assemble", "shard_manifests", "tokenization_state")),
        "data_prep.pack",
        "data_prep.dedup", "data_prep.decontaminate",
        "zerolm.leakage",
        *("launch." + name for name in (
            "demo_corpus", "demo_summary", "doctor", "node", "plan", "render", "supervise",
        )),
    },
    0: {
        *("zerolm." + name for name in (
            "architecture", "budget", "checkpoint_directory", "defaults", "distributed",
            "ds_config", "ds_optimizers", "ds_resolve", "ds_rules", "ds_schema", "errors", "faults",
            "files", "flags", "flops", "initialization", "jsonl", "ledger", "loss", "machine",
            "manifest", "memory", "model_rules", "order", "origins", "packing", "partitions",
            "plan", "provenance",
            "refusal", "resources", "rollback", "run_record", "schedule", "self_check", "settings",
            "shard_directory", "shard_writer", "shards", "skipped", "snapshot", "sources", "spike",
            "topology", "unpickling", "values", "windows", "zero_files",
            # blocks of shards, and shards that are elsewhere
            "block_cache", "block_sums", "data_cache", "object_ranges", "own_directory",
            "range_threads", "remote_blocks", "remote_shards", "shard_files", "shares",
            "store_copies", "url", "window_readers",
            # looking at memory
            "activations", "live_memory",
            # the optimizer's parts
            "adaptive_clip", "muon",
            # mixtures of experts
            "routing",
            # the loss without all of its logits
            "chunked_head", "loss_chunks",
            # how blocks are computed
            "allocator", "attention_kernels", "compiled_blocks", "recomputation", "nvme",
            # what a run takes from its sources
            "epoch_plan", "mixture", "mixture_settings", "permutation", "run_order",
            # looking at data
            "excerpts", "tokenizer_copy",
            # documents kept apart
            "document_mask",
            # ranks that share sequences
            "parallel", "parallel_rules", "ulysses",
            # export's parts
            "hub", "line_file", "model_card", "weight_files",
            # the evaluations' parts
            "begun", "evaluation_rules", "harness", "hellaswag", "likelihood", "patience",
            "sampling", "text_coder",
            # looking at a run's health
            "diagnosis", "diagnosis_of_speed", "observations", "noise_scale", "norms",
            # the object store's parts
            "events", "object_store", "upload_rules",
            # looking at a run
            "console", "curves", "event_words", "page_data", "panels", "reporting", "run_history",
            "run_settings", "run_summary", "thinning",
            # the trackers, each in a process of its own
            "alerts", "mirror", "tensorboard_tracker", "tracker", "wandb_files", "wandb_sync",
            "wandb_tracker", "wandb_workspace",
            # the watchdog's parts
            "processes", "pulse", "stacks", "verdict", "vital_signs",
        )),
        *("data_prep." + name for name in (
            "command_line", "documents", "phases", "progress", "remote_tasks", "sieve", "slurm",
            "stage_counts", "stage_files", "workers",
            # filters
            "fast_words", "filter_steps", "filters",
            # between encoding and shards
            "parts", "reuse", "write_shard",
            # reading inputs
            "bad_input", "input_flags", "readers", "streams", "tables", "units",
            # packing
            "best_fit",
        )),
        *("launch." + name for name in (
            "all_reduce", "attempt", "collector", "command_words", "findings", "flag_types",
            "forwarded", "host_session", "hosts", "templates",
            # the plan's parts
            "estimate", "hardware", "plan_text", "probing", "published", "reliability", "scaling",
            "search", "step_time", "subject",
        )),
        # deduplication's and decontamination's parts
        *("data_prep." + name for name in (
            "dedup_candidates", "dedup_clusters", "dedup_files", "evaluation_items", "flags_dedup",
            "minhash", "overlap", "stage_documents", "stage_options", "words",
            "stage_outputs",
        )),
        # the encoders' parts
        *("data_prep." + name for name in (
            "backends", "encoder_choice", "equality", "fuzz_texts", "text_sample",
            "tokenizer_files", "tokenizer_flags", "tokenizer_report",
            "pipeline_page", "pipeline_state", "recipe_options",
        )),
    },
}  # fmt: skip
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


def test_every_module_stands_on_a_rung():
    assert set(MODULES) == set(RUNG_OF), "say in RUNGS where a new module stands"


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
