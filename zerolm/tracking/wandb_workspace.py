"""`zerolm wandb-workspace RUN`: creates a W&B workspace with the panels of `report.html`.

A metric that is not in the table of `zerolm.parts.metrics` gets a separate panel. Needs
the package wandb-workspaces and, to save the workspace, a W&B account.
"""

from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, reason
from zerolm.parts import metrics
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import MetricsRow
from zerolm.run_dir.records import read_run_json
from zerolm.tracking.mirror import Tail
from zerolm.tracking.wandb_identity import has_key, identity

SMOOTHED = {"smoothing_factor": 0.6, "smoothing_show_original": True}


def make(run_dir: Path, project: str | None, entity: str | None, print_only: bool = False) -> str:
    """Create the workspace and return its URL; with `print_only` return its JSON instead."""
    run_dir = Path(run_dir)
    files = RunFiles(run_dir)
    name = identity(run_dir, read_run_json(run_dir))
    entity = entity or name.entity
    if not print_only:
        if not has_key():
            raise ConfigError(
                "no W&B key is configured. Run wandb login or set WANDB_API_KEY, or print the "
                "workspace with --print."
            )
        if not entity:
            raise ConfigError(
                "--entity: not given, and a workspace needs it. Give a W&B user or team."
            )
    keys = {key for row in Tail(files.metrics, MetricsRow).read() for key in row}
    keys -= {"step", "tokens"}
    if files.samples.is_file():
        keys.add("samples")
    workspace = layout(keys, project or name.project, entity or "entity", f"{name.group}: training")
    if print_only:
        return spec(workspace)
    try:
        return workspace.save().url
    except Exception as error:  # of the network, the key, or permissions
        raise ConfigError(f"W&B refused the workspace: {reason(error, named=False)}") from error


def layout(keys: set[str], project: str, entity: str, title: str) -> Any:
    """Return the workspace for these metrics as an object of wandb-workspaces."""
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ConfigError(
            "needs the package wandb-workspaces. Install it with "
            "bash launch/setup.sh wandb-workspaces."
        ) from error
    plots: dict[str, list[Any]] = {}
    for section, panel, _, chosen in metrics.charts(keys - {"samples"}):
        for evaluated in (False, True):  # evaluations are few: a separate plot, not smoothed
            curves: list[Any] = [key for key in chosen if key.startswith("eval/") == evaluated]
            if not curves:
                continue
            mixed = evaluated and len(curves) < len(chosen)
            options: dict[str, Any] = SMOOTHED if panel.smooth and not evaluated else {}
            plots.setdefault(section, []).append(
                panels.LinePlot(
                    title=panel.title + (", evaluations" if mixed else ""),
                    x="tokens",
                    y=curves,
                    title_x="tokens",
                    log_y=panel.log or None,
                    **options,
                )
            )
    sections: list[Any] = [
        workspaces.Section(name=name, panels=drawn, is_open=True) for name, drawn in plots.items()
    ]
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
    """Return the workspace as the JSON that would be sent to W&B."""
    return workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=1)
