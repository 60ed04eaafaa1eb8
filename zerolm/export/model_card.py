"""README.md of an exported model: what it is, how it was trained, on what, and how well.

Filled from a run directory's `run.json` and `metrics.jsonl`, up to the checkpoint that is exported.
No path of the machine goes into it, since it may be published. Knows nothing of weights.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolm.common import jsonl
from zerolm.common.run_files import RunFiles

PICTURE = "loss.png"
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")  # of ds configs: where they write
LAST_LINES = 10  # whose mean loss is given: one step's is noisy
SETTINGS = {
    "seq_len": "sequence length (tokens)",
    "batch_tokens": "batch (tokens)",
    "batch_ramp_start": "first batch (tokens), growing from there",
    "total_tokens": "token budget",
    "schedule": "learning-rate schedule",
    "learning_rate": "peak learning rate",
    "min_learning_rate": "last learning rate",
    "warmup_tokens": "warm-up (tokens)",
    "decay_tokens": "decay (tokens)",
    "weight_decay": "weight decay",
    "document_mask": "attention stays inside a document",
    "seed": "seed",
}


def model_card(
    run_dir: Path, manifest: Mapping[str, Any], name: str, num_parameters: int, picture: bool
) -> str:
    """Return the text of the model card.

    Args:
        run_dir: of the run; what it lacks is left out.
        manifest: of the checkpoint.
        name: of the model.
        num_parameters: counted once each.
        picture: whether `loss.png` will stand beside it.
    """
    files = RunFiles(run_dir)
    run = json.loads(files.record.read_text()) if files.record.is_file() else {}
    progress = manifest["progress"]
    rows = [row for row in jsonl.read_all(files.metrics) if row["step"] <= progress["step"]]
    newest: dict[str, Any] = {}
    measured: dict[str, int] = {}  # at which step
    for row in rows:
        found = {key: value for key, value in row.items() if value is not None}
        newest |= found
        for key in found:
            measured[key] = row["step"]
    model_type = manifest["model_config"]["model_type"]
    evaluations = {key: value for key, value in newest.items() if key.startswith("eval/")}
    sections = [
        front_matter(
            name,
            {key: v for key, v in evaluations.items() if measured[key] == progress["step"]},
        ),
        f"# {name}",
        f"A `{model_type}` causal language model with {num_parameters:,} parameters, pretrained "
        f"from random weights on {progress['tokens']:,} tokens with zerolm (DeepSpeed "
        f"ZeRO-{manifest['zero_stage']}, {manifest['precision']}).",
        USE,
        "## Training",
        _table(("", ""), _training(run, manifest)),
        *_data(newest),
        *_results(rows, evaluations, measured),
        *([f"![loss over tokens]({PICTURE})"] if picture else []),
        "## Made with",
        _table(("", ""), _made_with(run, manifest)),
    ]
    if "ds_config" in run:
        text = json.dumps(_published(run["ds_config"]), indent=2)
        sections.append(
            f"<details><summary>ds_config</summary>\n\n```json\n{text}\n```\n\n</details>"
        )
    sections.append(
        "This is a base model: it continues text, it was not taught to follow instructions."
    )
    return "\n\n".join(sections) + "\n"


USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this")
tokenizer = AutoTokenizer.from_pretrained("path/to/this")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```"""


def front_matter(name: str, evaluations: Mapping[str, float]) -> str:
    """Return the card's metadata, as the hub reads it."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=key.split("/")[1] if key.count("/") > 1 else "validation",
            dataset_name=key.split("/")[1] if key.count("/") > 1 else "validation",
            metric_type=key.rpartition("/")[2],
            metric_value=value,
        )
        for key, value in evaluations.items()
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["pretrained", "deepspeed", "zerolm"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _training(run: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = run.get("settings", {})
    rows = [
        ("tokens", f"{manifest['progress']['tokens']:,}"),
        ("steps", f"{manifest['progress']['step']:,}"),
    ]
    rows += [(words, _shown(settings[key])) for key, words in SETTINGS.items() if settings.get(key)]
    rows += [
        ("optimizer", manifest["optimizer"]),
        ("devices", str(manifest["world_size"])),
    ]
    return [(words, value) for words, value in rows if value]


def _data(newest: Mapping[str, Any]) -> list[str]:
    names = [
        key.split("/")[1] for key in newest if key.startswith("data/") and key.endswith("/tokens")
    ]
    if not names:
        return []
    total = sum(newest[f"data/{name}/tokens"] for name in names) or 1
    rows = [
        (
            name,
            f"{newest[f'data/{name}/tokens']:,}",
            f"{newest[f'data/{name}/tokens'] / total:.1%}",
            f"{newest[f'data/{name}/epochs']:.3g}",
        )
        for name in names
    ]
    return ["## Data", _table(("source", "tokens", "share", "epochs"), rows)]


def _results(
    rows: Sequence[Mapping[str, Any]], evaluations: Mapping[str, float], measured: Mapping[str, int]
) -> list[str]:
    losses = [row["train/loss"] for row in rows if row.get("train/loss") is not None][-LAST_LINES:]
    results = []
    if losses:
        mean = f"{sum(losses) / len(losses):.4f}"
        results.append(("train/loss, last lines", mean, f"{measured['train/loss']:,}"))
    results += [(key, f"{value:.4f}", f"{measured[key]:,}") for key, value in evaluations.items()]
    return ["## Results", _table(("metric", "value", "at step"), results)] if results else []


def _published(value: Any) -> Any:
    """Return what of a ds config may be seen by everybody: no paths, nothing of monitors."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _published(part)
        for key, part in value.items()
        if key not in MONITORS and not (isinstance(part, str) and ("/" in part or "\\" in part))
    }


def _made_with(run: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, version) for name, version in manifest.get("versions", {}).items()]
    if run.get("git_commit"):
        rows.append(("commit", run["git_commit"]))
    rows.append(("data fingerprint", manifest["data_fingerprint"]))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; cells cannot end it."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
