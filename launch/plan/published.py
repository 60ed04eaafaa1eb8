"""`plan --published`: compare the plan's predictions with published runs and benchmarks.

published_runs.json has the reported figures, with sources; docs/published_runs.md is the output.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from launch.plan import hardware, published_benchmarks
from launch.plan.published_benchmarks import FILE, Benchmark
from launch.plan.step_time import COSTS
from zerolm.common.records import read_json
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model

OLDEST = "MosaicML"  # and the largest source, of 2023


@dataclass(frozen=True)
class Row:
    """One comparison of predicted and reported figures; None if unknown.

    Attributes:
        devices: kind of device.
        flops: 6 N D, as most papers report; `all_flops` includes attention.
        predicted, reported: device-hours.
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


def _model(values: Mapping[str, Any], name: str) -> Model:
    from transformers import AutoConfig

    return Model.from_config(AutoConfig.for_model(**values), name)


def document() -> str:
    """Return the text of docs/published_runs.md."""
    values = read_json(FILE, "launch/plan/published_runs.json")
    lines = [
        "# Published runs",
        "",
        f"Predictions of `zerolm plan` compared with published runs. Written by "
        f"`zerolm plan --published > docs/published_runs.md` from "
        f"launch/plan/published_runs.json ({values['date']}).",
        "",
        *_benchmarks_section(),
        "",
        *_runs_section(runs()),
    ]
    return "\n".join(lines)


def _benchmarks_section() -> list[str]:
    rows, values = published_benchmarks.read()
    lines = [
        "## Benchmarks: tokens per second and device",
        "",
        "Predicted as runs with ds_configs/zero3.json, with the activations of fused kernels; a "
        "Hugging Face model keeps and moves more, which the plan takes into account. Fitted to "
        "these rows by `python -m benchmarks.fit_plan`, every source with the same weight: "
        f"{_fitted_text(values)} `left out` is the prediction of a fit without the row (10-fold). "
        "A share of the peak (`attained`) belongs to devices and the year of the software, so a "
        "new stack on a new device is predicted as well as the last line of the next table says, "
        "not better. Mixtures of experts are not fitted: `experts` of step_time.py is from "
        "another measurement.",
        "",
        "| source | rows | median error, fitted | left out, 10-fold | maximum | all of the source "
        "left out | |",
        "|---|---|---|---|---|---|---|",
    ]
    for source, about in values["sources"].items():
        which = [row for row in rows if row.entry["source"] == source]
        link = f"[{source}]({about['url']})"
        lines.append(_source_line(link, which, values, values["left_out"][source], about["about"]))
    recent = [row for row in rows if row.entry["source"] != OLDEST]
    recent_left_out = [each for name, each in values["left_out"].items() if name != OLDEST]
    lines.append(_source_line(f"all but {OLDEST}", recent, values, median(recent_left_out), ""))
    lines.append(_source_line("all", rows, values, median(values["left_out"].values()), ""))
    lines += [
        "",
        "| model | devices | tokens | micro-batch | recompute | precision | compiled | reported "
        "| fitted | error | left out | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_benchmark_line(row, values) for row in rows]


def _fitted_text(values: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{group} {share:g}" for group, share in values["attained"].items())
    costs = ", ".join(f"{name} {value:g}" for name, value in asdict(COSTS).items())
    return (
        f"the share of the peak FLOP/s that matrix products attain ({shares}; `attained` in "
        f"launch/plan/hardware.json has those of the last years), and the costs in "
        f"launch/plan/step_time.py ({costs})."
    )


def _source_line(
    name: str,
    rows: list[Benchmark],
    values: Mapping[str, Any],
    left_out: float,
    about: str,
) -> str:
    fitted = [abs(row.predict(values["attained"]) / row.reported - 1) for row in rows]
    held_out = [abs(row.held_out / row.reported - 1) for row in rows]
    return (
        f"| {name} | {len(rows)} | {median(fitted):.1%} | {median(held_out):.1%} | "
        f"{max(held_out):.0%} | {left_out:.0%} | {about} |"
    )


def _benchmark_line(row: Benchmark, values: Mapping[str, Any]) -> str:
    entry, predicted = row.entry, row.predict(values["attained"])
    return (
        f"| {entry['model']} | {entry['devices']} x {entry['hardware']} | {entry['seq_len']:,} | "
        f"{entry['micro_batch_size']} | {entry['recompute']} | {entry['precision']} | "
        f"{'yes' if entry['compiled'] else 'no'} | {row.reported:,.0f} | {predicted:,.0f} | "
        f"{predicted / row.reported - 1:+.1%} | {row.held_out:,.0f} | "
        f"{row.held_out / row.reported - 1:+.1%} |"
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


def _or_blank(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)
