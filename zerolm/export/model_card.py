"""Model card of an exported model: training settings, data, results and versions.

Generated from the run directory's `run.json` and `metrics.jsonl`, up to the exported checkpoint.
The card may be published, so it contains no local paths. Must not depend on weights.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.values import printable
from zerolm.run_dir import jsonl
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import MetricsRow
from zerolm.run_dir.records import find_run_json, lineage

PICTURE = RunFiles("").plot.name
PRIVATE_KEYS = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
)  # keys of DeepSpeed configs that contain paths and names
LOSS_ROWS = 10  # number of steps averaged for the training loss, because a single step is noisy
PLAIN = re.compile(r"[\w .,%+/()-]*")
SETTINGS = {
    "seq_len": "sequence length (tokens)",
    "batch_tokens": "batch (tokens)",
    "batch_ramp_start": "first batch of the batch-size ramp (tokens)",
    "total_tokens": "token budget",
    "schedule": "learning-rate schedule",
    "learning_rate": "peak learning rate",
    "min_learning_rate": "final learning rate",
    "warmup_tokens": "warm-up (tokens)",
    "decay_tokens": "decay (tokens)",
    "weight_decay": "weight decay",
    "document_mask": "attention within documents only",
    "seed": "seed",
}


def model_card(
    run_dir: Path,
    manifest: Mapping[str, Any],
    name: str,
    num_parameters: int,
    picture: bool,
    about: str = "",
    measured: Callable[[str], bool] = lambda key: True,
) -> str:
    """Return the text of the model card.

    Args:
        run_dir: the run directory; a section of the card is omitted if its file is missing.
        num_parameters: number of parameters; tied parameters count once.
        picture: whether `loss.png` is next to the card.
        about: Markdown about the weights, if they are not the trained weights themselves.
        measured: takes a metric's key; returns whether the metric was measured with these weights.
    """
    files = RunFiles(run_dir)
    run = find_run_json(run_dir) or {}
    progress = manifest["progress"]
    rows = [
        row for row in jsonl.read_rows(files.metrics, MetricsRow) if row["step"] <= progress["step"]
    ]
    newest: dict[str, Any] = {}
    measured_at: dict[str, int] = {}  # {metric: step of its newest value}
    for row in rows:
        values = {key: value for key, value in row.items() if value is not None}
        newest |= values
        measured_at.update((key, row["step"]) for key in values)
    model_type = manifest["model_config"]["model_type"]
    evaluations = {
        key: value for key, value in newest.items() if key.startswith("eval/") and measured(key)
    }
    sections = [
        front_matter(
            name,
            {key: v for key, v in evaluations.items() if measured_at[key] == progress["step"]},
            run.get("initial_weights", {}).get("hub_id"),
        ),
        f"# {plain(name)}",
        f"A `{model_type}` causal language model with {num_parameters:,} parameters, pretrained "
        f"from {_origin(run)} on {progress['tokens']:,} tokens with zerolm (DeepSpeed "
        f"ZeRO-{manifest['zero_stage']}, {plain(manifest['precision'])}).",
        *([about] if about else []),
        USE,
        "## Training",
        table(("", ""), _training(run, manifest)),
        *_data(newest),
        *_results(rows, evaluations, measured_at),
        *([f"![loss over tokens]({PICTURE})"] if picture else []),
        "## Made with",
        table(("", ""), _made_with(run, manifest)),
    ]
    if "ds_config" in run:
        text = json.dumps(_published(run["ds_config"]), indent=2)
        sections.append(
            f"<details><summary>ds_config</summary>\n\n```json\n{text}\n```\n\n</details>"
        )
    sections.append(
        "This is a base model: it continues text and was not trained to follow instructions."
    )
    return "\n\n".join(sections) + "\n"


USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this")
tokenizer = AutoTokenizer.from_pretrained("path/to/this")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```"""


def _origin(run: Mapping[str, Any]) -> str:
    """Describe the run's initial weights, without local paths."""
    source = run.get("initial_weights")
    if not source:
        return "random weights"
    return f"the weights of {code(str(source['hub_id'] or Path(source['source']).name))}"


def front_matter(name: str, evaluations: Mapping[str, float], base_model: str | None = None) -> str:
    """Return the card's YAML metadata for the hub.

    Args:
        base_model: hub id of the run's initial weights.
    """
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
        base_model=base_model or None,
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _training(run: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings = run.get("settings", {})
    rows = [
        ("branch", f"of {lineage(run['branch'])}" if run.get("branch") else ""),
        ("tokens", f"{manifest['progress']['tokens']:,}"),
        ("steps", f"{manifest['progress']['step']:,}"),
    ]
    rows += [(label, _shown(settings[key])) for key, label in SETTINGS.items() if settings.get(key)]
    rows += [
        ("optimizer", manifest["optimizer"]),
        ("devices", str(manifest["world_size"])),
    ]
    return [(label, value) for label, value in rows if value]


def _data(newest: Mapping[str, Any]) -> list[str]:
    names = [
        key[len("data/") : -len("/tokens")]
        for key in newest
        if key.startswith("data/") and key.endswith("/tokens") and key.count("/") > 1
    ]
    if not names:
        return []
    total = sum(newest[f"data/{name}/tokens"] for name in names) or 1
    rows = [
        (
            name,
            f"{newest[f'data/{name}/tokens']:,}",
            f"{newest[f'data/{name}/tokens'] / total:.1%}",
            f"{newest.get(f'data/{name}/epochs', math.nan):.3g}",
        )
        for name in names
    ]
    return ["## Data", table(("source", "tokens", "share", "epochs"), rows)]


def _results(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Mapping[str, float],
    measured_at: Mapping[str, int],
) -> list[str]:
    losses = [row["train/loss"] for row in rows if row.get("train/loss") is not None][-LOSS_ROWS:]
    results = []
    if losses:
        mean = f"{sum(losses) / len(losses):.4f}"
        results.append(
            ("train/loss (mean of the last rows)", mean, f"{measured_at['train/loss']:,}")
        )
    results += [
        (key, f"{value:.4f}", f"{measured_at[key]:,}") for key, value in evaluations.items()
    ]
    return ["## Results", table(("metric", "value", "at step"), results)] if results else []


def _published(value: Any) -> Any:
    """Return a DeepSpeed config without paths and monitors, which must not be published."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _published(part)
        for key, part in value.items()
        if key not in PRIVATE_KEYS and not (isinstance(part, str) and ("/" in part or "\\" in part))
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


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose cells are plain text."""
    lines = [map(plain, heads), ["---"] * len(heads), *(map(plain, row) for row in rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def plain(text: object) -> str:
    """Escape text for Markdown, since names come from other people's files.

    Text that could be HTML, a link or an image is returned as a code span.
    """
    word = printable(" ".join(str(text).split()))
    is_plain = PLAIN.fullmatch(word) and "www." not in word.lower()
    return word if is_plain else code(word)


def code(text: str) -> str:
    """Return a code span."""
    return "`{}`".format(printable(text).replace("`", "'"))
