"""What we would have predicted of runs that others published: the worth of our figures.

published_runs.json has what was reported, with sources; docs/published_runs.md is what this prints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launch.plan import hardware
from launch.plan.search import profile_of
from launch.plan.step_time import step_time
from launch.plan.subject import resolve_subject
from zerolm.common.values import read_json
from zerolm.config.settings import Settings
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model

FILE = Path(__file__).with_name("published_runs.json")
FUSED_KEPT_BYTES = 34  # a token, layer and hidden unit


@dataclass(frozen=True)
class Row:
    """One comparison: what was predicted over what was reported, less one, where both are there.

    Attributes:
        flops: 6 N D, as most report it; `all_flops` has attention too.
    """

    name: str
    where: str
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
    def times(self) -> float | None:
        """Return reported over predicted."""
        return None if self.error is None else 1 / (1 + self.error)

    @property
    def flops_error(self) -> float | None:
        return None if self.reported_flops is None else self.flops / self.reported_flops - 1


def runs() -> list[Row]:
    """Predict the operations and the device-hours of whole runs.

    The hours are those of the arithmetic alone, on the devices they had: how these runs were
    divided over devices is not something that a run of ours can do.
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
                where=entry["hardware"] or "",
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
    """Predict tokens per second and device of the benchmarks, as for a run of ours with ZeRO-3."""
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
        subject = resolve_subject(model, profile, settings, device, count, min(8, count))
        # What their fused kernels keep: Korthikanti et al. 2022, equation 2, without dropout.
        kept = FUSED_KEPT_BYTES * model.config.d_model * model.config.n_layers
        rate = batch / step_time(subject, kept_bytes=kept).seconds / count
        total = subject.flops_per_token * batch
        rows.append(
            Row(
                name=f"MPT {entry['model']}",
                where=f"{count} x {entry['hardware']}",
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

    return Model.of(AutoConfig.for_model(**values), name)


def document() -> str:
    """Return docs/published_runs.md."""
    values = read_json(FILE, "launch/plan/published_runs.json")
    lines = [
        "# Published runs",
        "",
        f"What `python -m launch plan` predicts of runs that others published, by "
        f"`python -m launch plan --published > docs/published_runs.md`, from "
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
        f"ds_configs/zero3.json. Fitted to them are the share of its peak that a device attains "
        f"(`attained` in launch/plan/hardware.json: "
        + ", ".join(f"{key} {one.attained:g}" for key, one in _fitted().items())
        + "), the cost of recomputation and that of element-wise kernels "
        "(launch/plan/step_time.py). A "
        "Hugging Face model keeps and moves more than their fused kernels, which the plan of one "
        "takes into account.",
        "",
        "| model | devices | micro-batch | recomputed | fitted | reported | predicted | error |",
        "|---|---|---|---|---|---|---|---|",
        *map(_benchmark_line, rows),
        "",
        f"Errors without sign: median {median(errors[True]):.1%} and largest "
        f"{max(errors[True]):.1%} of the fitted ones, {median(errors[False]):.1%} and "
        f"{max(errors[False]):.1%} of the others. The largest are 13B and 70B models in "
        f"micro-batches of 2 to 4 on few devices, which fill the memory: an allocator at its limit "
        f"is not in the model.",
    ]


def _benchmark_line(row: Row) -> str:
    again = "yes" if row.entry["gradient_checkpointing"] else "no"
    return (
        f"| {row.name} | {row.where} | {row.entry['micro_batch_size']} | {again} | "
        f"{'yes' if row.entry['fitted'] else 'no'} | "
        f"{row.reported:,.0f} | {row.predicted:,.0f} | {row.error:+.1%} |"
    )


def _runs_section(rows: list[Row]) -> list[str]:
    factors = sorted(row.times for row in rows if row.times is not None)
    quarter = len(factors) // 4
    flops_errors = [abs(row.flops_error) for row in rows if row.flops_error is not None]
    return [
        "## Whole runs: operations and device-hours",
        "",
        "Operations as 6 N D, as they are reported, and with attention, as we count them. Hours "
        "are those of the arithmetic alone: nothing computed again, no waiting, no restarts, no "
        "evaluation. These runs were cut into tensor and pipeline stages, which is not modelled "
        "here, so that their communication is not predicted. `times` is reported over predicted.",
        "",
        "| run | parameters | FLOPs (6 N D) | reported | error | with attention | device-hours "
        "| reported | error | times | source | seen |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(_run_line, rows),
        "",
        f"6 N D: median of the errors without sign {median(flops_errors):.1%}, largest "
        f"{max(flops_errors):.1%}. Whole runs took {factors[0]:.2f} to {factors[-1]:.2f} times the "
        f"hours of their arithmetic, the middle half {factors[quarter]:.2f} to "
        f"{factors[-1 - quarter]:.2f}, the median {median(factors):.2f}. `seen` says whether the "
        f"figure was read in a copy of its source when the file was made.",
    ]


def _run_line(row: Row) -> str:
    source = f"[{row.entry['source']}]({row.entry['url']})"
    if row.entry.get("flops_source"):
        source += f"; FLOPs: {row.entry['flops_source']}"
    said = [
        row.name,
        f"{row.parameters:,}",
        f"{row.flops:.3g}",
        _or_dash(row.reported_flops, ".3g"),
        _or_dash(row.flops_error, "+.1%"),
        f"{row.all_flops:.3g}",
        _or_dash(row.predicted, ",.0f"),
        _or_dash(row.reported, ",.0f"),
        _or_dash(row.error, "+.0%"),
        _or_dash(row.times, ".2f"),
        source,
        row.entry["seen"],
    ]
    return f"| {' | '.join(said)} |"


def _fitted() -> dict[str, hardware.Hardware]:
    devices = hardware.devices_of(hardware.FILE)
    return {key: devices[key] for key in ("A100-40GB", "A100-80GB", "H100")}


def _or_dash(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
