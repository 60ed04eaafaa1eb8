"""`plan --published`: compare the plan's predictions with published runs and benchmarks.

published_runs.json has the reported figures, with sources; docs/published_runs.md is the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launch.plan import hardware
from launch.plan.planned_run import plan_run
from launch.plan.search import profile_of
from launch.plan.step_time import step_time
from zerolm.common.records import read_json
from zerolm.config.settings import Settings
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model

FILE = Path(__file__).with_name("published_runs.json")
FUSED_KEPT_BYTES = 34  # activations per token, layer and hidden unit


@dataclass(frozen=True)
class Row:
    """One comparison of predicted and reported figures; None if unknown.

    Attributes:
        devices: their kind, and in a benchmark their number.
        flops: 6 N D, as most papers report; `all_flops` includes attention.
        predicted, reported: device-hours of a run, tokens per second and device of a benchmark.
    """

    name: str
    devices: str
    parameters: int
    flops: float
    all_flops: float
    reported_flops: float | None
    predicted: float | None
    reported: float | None
    entry: Mapping[str, Any]

    @property
    def error(self) -> float | None:
        if self.predicted is None or self.reported is None:
            return None
        return self.predicted / self.reported - 1

    @property
    def ratio(self) -> float | None:
        """Return reported over predicted."""
        return None if self.error is None else 1 / (1 + self.error)

    @property
    def flops_error(self) -> float | None:
        return None if self.reported_flops is None else self.flops / self.reported_flops - 1


def runs() -> list[Row]:
    """Predict the FLOPs and device-hours of published runs.

    The hours count compute only, since these runs used pipeline and tensor parallelism in ways that
    the plan does not model.
    """
    devices = hardware.devices_of(hardware.FILE)
    rows = []
    for entry in read_json(FILE, "launch/plan/published_runs.json")["runs"]:
        if "config" in entry:
            model = _model(entry["config"], entry["name"])
            parameters = model.num_parameters
            each = flops_per_token(model.config, model.shapes, entry["seq_len"])
        else:
            parameters = int(entry["parameters"])
            each = 6 * parameters + 12 * entry["layers"] * entry["width"] * entry["seq_len"]
        total = each * entry["tokens"]
        device = devices.get(entry["hardware"] or "")
        hours = None
        if device is not None and device.bf16 is not None:
            hours = total / (device.bf16 * device.attained) / 3600
        rows.append(
            Row(
                name=entry["name"],
                devices=entry["hardware"] or "",
                parameters=parameters,
                flops=6.0 * parameters * entry["tokens"],
                all_flops=total,
                reported_flops=entry["flops"],
                predicted=hours,
                reported=entry["device_hours"],
                entry=entry,
            )
        )
    return rows


def benchmarks() -> list[Row]:
    """Predict tokens per second and device of the benchmarks, as of a run with ZeRO-3."""
    devices = hardware.devices_of(hardware.FILE)
    values = read_json(FILE, "launch/plan/published_runs.json")["benchmarks"]
    models = {name: _model(config, name) for name, config in values["models"].items()}
    rows = []
    for entry in values["rows"]:
        device, count = devices[entry["hardware"]], entry["devices"]
        batch = entry["micro_batch_size"] * entry["accumulation"] * count * values["seq_len"]
        settings = Settings(
            seq_len=values["seq_len"],
            batch_tokens=batch,
            total_tokens=batch,
            micro_batch_size=entry["micro_batch_size"],
            gradient_checkpointing=entry["gradient_checkpointing"],
            explicit=frozenset({"batch_tokens", "micro_batch_size"}),
        )
        model = models[entry["model"]]
        profile = profile_of(3, "none", device)
        run = plan_run(model, profile, settings, device, count, min(8, count))
        # Activations of their fused kernels: Korthikanti et al. 2022, equation 2, without dropout.
        kept = FUSED_KEPT_BYTES * model.config.d_model * model.config.n_layers
        rate = batch / step_time(run, kept_bytes=kept).seconds / count
        total = run.flops_per_token * batch
        rows.append(
            Row(
                name=f"MPT {entry['model']}",
                devices=f"{count} x {entry['hardware']}",
                parameters=model.num_parameters,
                flops=6.0 * model.num_parameters * batch,
                all_flops=total,
                reported_flops=None,
                predicted=rate,
                reported=entry["tokens_per_second_per_device"],
                entry=entry,
            )
        )
    return rows


def _model(values: Mapping[str, Any], name: str) -> Model:
    from transformers import AutoConfig

    return Model.from_config(AutoConfig.for_model(**values), name)


def document() -> str:
    """Return the text of docs/published_runs.md."""
    values = read_json(FILE, "launch/plan/published_runs.json")
    lines = [
        "# Published runs",
        "",
        f"Predictions of `python -m launch plan` compared with published runs. Written by "
        f"`python -m launch plan --published > docs/published_runs.md` from "
        f"launch/plan/published_runs.json ({values['date']}).",
        "",
        *_benchmarks_section(benchmarks(), values["benchmarks"]),
        "",
        *_runs_section(runs()),
    ]
    return "\n".join(lines)


def _benchmarks_section(rows: list[Row], values: Mapping[str, Any]) -> list[str]:
    errors = {
        fitted: [abs(row.error or 0.0) for row in rows if row.entry["fitted"] is fitted]
        for fitted in (True, False)
    }
    return [
        "## Benchmarks: tokens per second and device",
        "",
        f"{values['source']}: [{values['url']}]({values['url']}). Predicted as a run with "
        f"ds_configs/zero3.json. Fitted to these benchmarks: the share of the peak FLOP/s that a "
        f"device attains (`attained` in launch/plan/hardware.json: "
        + ", ".join(f"{key} {one.attained:g}" for key, one in _fitted().items())
        + "), and the costs of recomputation and of element-wise kernels "
        "(launch/plan/step_time.py). A Hugging Face model keeps and moves more activations than "
        "their fused kernels; the plan takes that into account.",
        "",
        "| model | devices | micro-batch | recompute | fitted | reported | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
        *map(_benchmark_line, rows),
        "",
        f"Absolute errors: median {median(errors[True]):.1%} and maximum {max(errors[True]):.1%} "
        f"for the fitted benchmarks, {median(errors[False]):.1%} and {max(errors[False]):.1%} for "
        f"the others. The largest are 13B and 70B models with micro-batches of 2 to 4 on few "
        f"devices, which fill the memory; the estimate does not model an allocator at its limit.",
    ]


def _benchmark_line(row: Row) -> str:
    recompute = "yes" if row.entry["gradient_checkpointing"] else "no"
    return (
        f"| {row.name} | {row.devices} | {row.entry['micro_batch_size']} | {recompute} | "
        f"{'yes' if row.entry['fitted'] else 'no'} | "
        f"{row.reported:,.0f} | {row.predicted:,.0f} | {row.error:+.1%} |"
    )


def _runs_section(rows: list[Row]) -> list[str]:
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    quarter = len(ratios) // 4
    flops_errors = [abs(row.flops_error) for row in rows if row.flops_error is not None]
    return [
        "## Runs: FLOPs and device-hours",
        "",
        "FLOPs are 6 N D, as papers report them, and with attention, as zerolm counts them. Hours "
        "count compute only, without recomputation, communication, restarts or evaluation: these "
        "runs used tensor and pipeline parallelism, which is not modelled here. `ratio` is "
        "reported over predicted hours.",
        "",
        "| run | parameters | FLOPs (6 N D) | reported | error | with attention | device-hours "
        "| reported | error | ratio | source | seen |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_run_line, rows),
        "",
        f"Absolute errors of 6 N D: median {median(flops_errors):.1%}, maximum "
        f"{max(flops_errors):.1%}. The runs took {ratios[0]:.2f} to {ratios[-1]:.2f} times the "
        f"predicted hours of compute, the middle half {ratios[quarter]:.2f} to "
        f"{ratios[-1 - quarter]:.2f}, the median {median(ratios):.2f}. `seen` says whether the "
        f"figure was checked against a copy of its source when published_runs.json was written.",
    ]


def _run_line(row: Row) -> str:
    source = f"[{row.entry['source']}]({row.entry['url']})"
    if row.entry.get("flops_source"):
        source += f"; FLOPs: {row.entry['flops_source']}"
    cells = [
        row.name,
        f"{row.parameters:,}",
        f"{row.flops:.3g}",
        _or_blank(row.reported_flops, ".3g"),
        _or_blank(row.flops_error, "+.1%"),
        f"{row.all_flops:.3g}",
        _or_blank(row.predicted, ",.0f"),
        _or_blank(row.reported, ",.0f"),
        _or_blank(row.error, "+.0%"),
        _or_blank(row.ratio, ".2f"),
        source,
        row.entry["seen"],
    ]
    return f"| {' | '.join(cells)} |"


def _fitted() -> dict[str, hardware.Hardware]:
    devices = hardware.devices_of(hardware.FILE)
    return {key: devices[key] for key in ("A100-40GB", "A100-80GB", "H100")}


def _or_blank(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)
