"""Lay out a W&B workspace whose panels suit a run: `python -m zerolm wandb-workspace RUN`.

The panels are of the metrics that the run has. Needs the package wandb-workspaces and, to save it,
an account. Knows what the metrics mean, and nothing of training.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zerolm.errors import ConfigError
from zerolm.machine import has_wandb_key
from zerolm.mirror import Tail
from zerolm.wandb_tracker import identity

# section: its panels, each a title and beginnings of the metrics on it; what no run has is left out
SECTIONS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "Loss": [
        ("training loss", ("train/loss",)),
        ("validation loss", ("eval/loss",)),
        ("loss per source", ("data/*/loss",)),
        ("validation loss per source", ("eval/*/loss",)),
        ("router loss", ("train/auxiliary_loss",)),
    ],
    "Routers": [
        ("router balance", ("router/load_imbalance",)),
        ("router balance, each", ("router/load_imbalance/*",)),
        ("entropy and unused experts", ("router/entropy", "router/unused_experts")),
    ],
    "Evaluations": [("accuracy", ("eval/*/acc", "eval/*/acc_norm"))],
    "Optimization": [
        ("learning rate", ("train/learning_rate",)),
        ("gradient norm", ("train/grad_norm",)),
        ("clipped steps", ("train/clipped_share",)),
        ("clipped to", ("train/clip_norm",)),
        ("parameter norm", ("train/param_norm",)),
        ("update to weight ratio", ("train/update_ratio",)),
        ("gradient noise scale", ("train/noise_scale_tokens",)),
        ("batch", ("train/batch_tokens",)),
        ("spikes, skipped steps, rollbacks", ("health/*",)),
    ],
    "Speed": [
        ("MFU", ("throughput/mfu",)),
        ("tokens per second", ("throughput/tokens_per_second",)),
        ("step", ("throughput/step_seconds", "throughput/data_seconds")),
        ("slowest rank", ("throughput/slowest_rank_seconds", "throughput/mean_rank_seconds")),
        ("checkpoint stall", ("checkpoint/stall_seconds",)),
        ("memory", ("memory/*",)),
    ],
    "Data": [("epochs", ("data/*/epochs",)), ("tokens", ("data/*/tokens",))],
}
PATIENT = {"training loss", "gradient norm"}  # also shown smoothed
SMOOTHING = 0.6


def make(run_dir: Path, project: str | None, entity: str | None, print_only: bool = False) -> str:
    """Create the workspace; return its address, or its JSON if it is only to be printed.

    Raises:
        ConfigError: no run, no package, or no account.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "run.json").is_file():
        raise ConfigError(f"{run_dir}: no run.json in it, so this is not a run directory.")
    name = identity(run_dir, json.loads((run_dir / "run.json").read_text())["settings"])
    entity = entity or name.entity
    if not print_only:
        if not has_wandb_key():
            raise ConfigError(
                "no W&B key is configured. Run wandb login or set WANDB_API_KEY, "
                "or see what it would make with --print."
            )
        if not entity:
            raise ConfigError("--entity: not given, and a workspace needs it: a user or a team.")
    keys = {key for row in Tail(run_dir / "metrics.jsonl").read() for key in row}
    if (run_dir / "samples.jsonl").is_file():
        keys.add("samples")
    workspace = layout(keys, project or name.project, entity or "entity", f"{name.group}: training")
    if print_only:
        return spec(workspace)
    try:
        return workspace.save().url
    except Exception as error:  # whatever of network, key or permission W&B finds wanting
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"W&B did not take it: {reason}") from error


def layout(keys: set[str], project: str, entity: str, title: str) -> Any:
    """Return the workspace for these metrics, as an object of wandb-workspaces.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ConfigError(
            "needs the package wandb-workspaces. Install it with "
            "pip install 'zerolm[wandb-workspaces]'."
        ) from error
    sections: list[Any] = []
    for section, wanted in SECTIONS.items():
        found: list[Any] = []
        for panel, patterns in wanted:
            metrics: list[Any] = sorted(
                key for key in keys if any(fnmatchcase(key, one) for one in patterns)
            )
            if metrics:
                smooth: dict[str, Any] = {
                    "smoothing_factor": SMOOTHING,
                    "smoothing_show_original": True,
                }
                found.append(
                    panels.LinePlot(
                        title=panel,
                        x="tokens",
                        y=metrics,
                        title_x="tokens",
                        **(smooth if panel in PATIENT else {}),
                    )
                )
        if found:
            sections.append(workspaces.Section(name=section, panels=found, is_open=True))
    if "samples" in keys:
        table = panels.WeavePanelSummaryTable(table_name="samples")
        sections.append(workspaces.Section(name="Samples", panels=[table], is_open=True))
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="tokens"),
    )


def spec(workspace: Any) -> str:
    """Return what W&B would be sent, as JSON."""
    return workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1)
