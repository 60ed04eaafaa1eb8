"""Writes a pipeline's report: `report.json`, and `report.html`, a self-contained page.

It is based on the published files of the stages: `stage.json`, task records, and shard manifests.
The report contains the numbers of documents and bytes that each stage read and wrote, the reasons
for dropping documents with examples, document lengths before and after, the duration of each task,
and the data's provenance.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.pipeline.html_report import render
from data_prep.read.stage_files import read_stage
from data_prep.tasks.phases import TaskRecord
from zerolm.common.files import write_atomically, write_json
from zerolm.common.records import read_record
from zerolm.data.packing import PackingManifest, index_file
from zerolm.shards.manifest import read_manifest

STAGES = ("clean", "dedup", "decontaminate")
REPORT_JSON, REPORT_HTML = "report.json", "report.html"
MAX_SLOW_TASKS = 5
Json = dict[str, Any]


def write_report(output: Path, recipe: Mapping[str, Any]) -> Path:
    """Write a report on all sources to the pipeline's output; return the path of the HTML page."""
    report: Json = {"recipe": dict(recipe), "sources": {}}
    for directory in sorted(path.parent for path in output.glob("*/pipeline.json")):
        report["sources"][directory.name] = _source(directory, recipe.get("content", {}))
    trained = output / "tokenizer" / "report.json"
    if trained.is_file() and "train_tokenizer" in recipe.get("content", {}):
        report["tokenizer"] = read_record(trained, dict)
    write_json(output / REPORT_JSON, report)
    page = render(report)
    write_atomically(output / REPORT_HTML, page.encode("utf-8", "replace"))
    return output / REPORT_HTML


def _source(directory: Path, recipe: Mapping[str, Any]) -> Json:
    """Return the report on a source, based on the published files of the recipe's stages."""
    source: Json = {"stages": [], "shards": {}, "packing": {}, "provenance": {}}
    for stage in STAGES:
        path = directory / stage / "stage.json"
        if not path.is_file() or (stage != "clean" and stage not in recipe):
            continue
        manifest = read_stage(path.parent).manifest
        kept = {key: value for key, value in manifest.items() if key not in ("files", "before")}
        source["stages"].append({**kept, "tasks": _tasks(directory / stage)})
        if stage == "clean":
            source["provenance"] = manifest["before"]
    for name in ("shards", "shards-validation"):
        path = directory / name / "manifest.json"
        if path.is_file() and "tokenize" in recipe:
            manifest = read_manifest(path.parent)
            keys = ("num_documents", "num_tokens", "text_bytes", "dtype", "vocab_size")
            source["shards"][name] = {key: manifest.get(key) for key in (*keys, "encoder")}
            if (packed := _packing(path.parent, recipe)) is not None:
                source["packing"][name] = packed
    _estimate_tokens(source)
    return source


def _packing(directory: Path, recipe: Mapping[str, Any]) -> Json | None:
    """Return the comparison of best-fit packing with concatenation, or None without an index."""
    if "pack" not in recipe:
        return None
    path = index_file(directory, int(recipe["pack"]["seq_len"]))
    found = read_record(path, PackingManifest)
    if found is None:
        return None
    return {key: found[key] for key in ("seq_len", "num_rows", "efficiency")}


def _estimate_tokens(source: Json) -> None:
    """Estimate the tokens of each stage from its bytes, since only shards have exact counts.

    The estimate is imprecise where dropped text has a different number of bytes per token than the
    text in the shards.
    """
    shards = source["shards"].values()
    text_bytes = sum(each["text_bytes"] for each in shards)
    if not text_bytes:
        return
    per_byte = sum(each["num_tokens"] for each in shards) / text_bytes
    source["estimated_tokens_per_byte"] = per_byte
    for stage in source["stages"]:
        for end in ("in", "out"):
            stage[f"estimated_tokens_{end}"] = round(stage[f"text_bytes_{end}"] * per_byte)


def _tasks(directory: Path) -> list[Json]:
    """Return a table with one row per phase: the number of tasks, their durations, and the slowest
    tasks.
    """
    rows = []
    for phase in sorted((directory / "records").glob("*")):
        found = [read_record(path, TaskRecord) for path in sorted(phase.glob("[0-9]*.json"))]
        records = [record for record in found if record is not None]
        if not records:
            continue
        slowest = sorted(records, key=lambda each: -each["seconds"])[:MAX_SLOW_TASKS]
        starts = [each["started"] for each in records]
        ends = [each["started"] + each["seconds"] for each in records]
        rows.append(
            {
                "phase": phase.name,
                "num_tasks": len(records),
                "task_seconds": sum(each["seconds"] for each in records),
                "wall_seconds": max(ends) - min(starts),
                "seconds": [each["seconds"] for each in records],
                "hosts": sorted({each["host"] for each in records}),
                "slowest": [
                    {key: each[key] for key in ("task", "seconds", "host")} for each in slowest
                ],
            }
        )
    return sorted(rows, key=lambda row: row["phase"])
