"""The text of benchmarks/results/published_runs.md: predictions compared with published figures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.published_runs import rows as benchmark_rows
from benchmarks.published_runs.rows import FILE, Benchmark
from launch.estimate.step_time import COSTS, MANY_DEVICES
from zerolm.common.records import read_json
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model
from zerolm.plan import hardware


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
    for entry in read_json(FILE, "runs.json")["runs"]:
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
    """Return the text of benchmarks/results/published_runs.md."""
    values = read_json(FILE, "runs.json")
    rows, fit = benchmark_rows.read()
    return f"""# Published runs

Tokens per second and device that others have reported, and what `zerolm plan` predicts for the
same model, devices and batch. `python -m benchmarks.published_runs` prints this page, from its
runs.json ({values["date"]}); with `--json` it prints each row.

- A row is planned with the nearest profile, `zero3.json` unless the table says another, and with
  the activations of fused kernels. Plans of Hugging Face models count theirs, which are more.
- Collectives are called as the trainer calls them: FSDP by layer, InternEvo by the owner of each
  tensor. Latencies are not fitted: NCCL's own for all-gathers and reduce-scatters, and for a
  broadcast 10 us a rank, where NCCL's model has 3.4 (a step in a host) to 14 (between hosts).
- Links have the bandwidth of hardware.json, or the one that the source names.
- Fitted to the first {_num_fitted(fit)} sources (`python -m benchmarks.published_runs.fit`):
{_fitted_text(fit)}
- A share of the peak belongs to devices and the software of a year. A new stack on a new device
  is predicted as well as the last column says. Mixtures of experts are not fitted.
- Memory: {_memory_text()}

Errors are those of a fit without the row (10-fold), in the last column of one without the source.

{chr(10).join(_table(rows, fit))}

{_runs_text(runs())}"""


def _memory_text() -> str:
    ratios = benchmark_rows.memory_ratios()
    return (
        f"{len(ratios)} reported figures are {min(ratios):.2f} to {max(ratios):.2f} times the live "
        f"tensors that a plan counts,\n  the median {median(ratios):.2f} times."
    )


def to_json() -> list[dict[str, Any]]:
    """Return every benchmark with its prediction, for `--json`."""
    rows, fit = benchmark_rows.read()
    return [
        {**row.entry, "predicted": row.predict(fit["attained"]), "left_out": row.held_out}
        for row in rows
    ]


def _num_fitted(values: Mapping[str, Any]) -> int:
    return sum(about.get("fitted", True) for about in values["sources"].values())


def _fitted_text(values: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{group} {share:g}" for group, share in values["attained"].items())
    costs = ", ".join(f"{name} {value:g}" for name, value in asdict(COSTS).items())
    return (
        f"  the share of the peak that matrix products attain ({shares}),\n  and the costs of "
        f"step_time.py ({costs})."
    )


def _table(rows: list[Benchmark], values: Mapping[str, Any]) -> list[str]:
    lines = [
        "| source | what it is, and what is assumed | rows | devices | median error | largest "
        "| without the source |",
        "|---|---|---|---|---|---|---|",
    ]
    dense = [row for row in rows if not row.run.routed_flops]
    for source, about in values["sources"].items():
        which = [row for row in dense if row.entry["source"] == source]
        alone = values["left_out"].get(source)
        link = f"[{source}]({about['url']})"
        lines.append(_line(link, about["about"], which, alone))
    counted = [row for row in dense if row.is_counted]
    for text, which in (
        ("all dense models", counted),
        (f"on more than {MANY_DEVICES} devices", [row for row in counted if row.is_large]),
        ("mixtures of experts", [row for row in rows if row.run.routed_flops]),
    ):
        lines.append(_line(text, "", which, None))
    return lines


def _line(name: str, about: str, rows: list[Benchmark], alone: float | None) -> str:
    errors = [abs(row.error) for row in rows]
    devices = sorted({row.entry["devices"] for row in rows})
    alone = median(errors) if alone is None and about else alone
    cells = [
        name,
        about,
        str(len(rows)),
        " to ".join(f"{each:,}" for each in dict.fromkeys((devices[0], devices[-1]))),
        f"{median(errors):.1%}",
        f"{max(errors):.0%}",
        _or_blank(alone, ".0%"),
    ]
    return f"| {' | '.join(cells)} |"


def _runs_text(rows: list[Row]) -> str:
    ratios = sorted(row.ratio for row in rows if row.ratio is not None)
    quarter = len(ratios) // 4
    flops = [abs(row.flops_error) for row in rows if row.flops_error is not None]
    return (
        f'**Complete runs.** {len(ratios)} runs whose device-hours are known ("runs" of '
        f"runs.json, with their sources) took\n{ratios[0]:.1f} to {ratios[-1]:.1f} times "
        f"the hours of their matrix products, the middle half {ratios[quarter]:.1f} to "
        f"{ratios[-1 - quarter]:.1f}: restarts, evaluation,\ncommunication and pipelines are not "
        f"in these hours. Their reported FLOPs are 6 N D within {max(flops):.1%}."
    )


def _or_blank(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)
