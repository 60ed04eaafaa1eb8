"""`zerolm predict`: fit a scaling law to finished runs, and predict the loss of a larger one."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.plan.flags import add_devices, hardware_of, is_cpu
from zerolm.common.command_line import count, number
from zerolm.common.errors import ConfigError
from zerolm.common.values import count as shown_count
from zerolm.common.values import strict_json

if TYPE_CHECKING:
    from launch.experiments.ladder import Rung
    from launch.experiments.law import Fitted

DEFAULT_EXTRAPOLATION = 10.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fit L(N, D) = E + A / N^alpha + B / D^beta to the final losses of finished runs of "
        "different sizes N and tokens D, and predict the loss of a larger run with an interval."
    )
    add = parser.add_argument
    add(
        "runs", nargs="+", type=Path,
        help="run directories, or directories of sweeps; unfinished and undecayed runs are left "
        "out",
    )  # fmt: skip
    add("--model_config", metavar="PATH", help="config.json of the model to predict")
    add("--total_tokens", type=count, metavar="TOKENS", help="its tokens")
    add(
        "--check_against", type=Path, metavar="RUN",
        help="a finished run to compare with its prediction; it is not fitted",
    )  # fmt: skip
    add(
        "--parameters", choices=("total", "non_embedding"), default="total",
        help="what N counts: all parameters, or those without embeddings and output head "
        "(default: total)",
    )  # fmt: skip
    add(
        "--budget", metavar="FLOPS|MONEY|DAYS",
        help="the model size and tokens with the least loss for 1e22 (FLOPs), $50000, or 14d on "
        "the devices",
    )  # fmt: skip
    add(
        "--max_extrapolation", type=number, default=DEFAULT_EXTRAPOLATION, metavar="X",
        help="refuse predictions for more than X times the compute, parameters or tokens of the "
        "runs (default: 10)",
    )  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    devices = parser.add_argument_group("the devices of --budget, as for zerolm plan")
    add_devices(devices)
    devices.add_argument(
        "--mfu", metavar="X", type=number, help="model FLOP/s utilization (default: that of the "
        "hardware)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from launch.experiments import ladder
    from launch.experiments.law import Fitted

    budget = _budget(arguments)
    own = arguments.check_against
    paths = [path for path in ladder.expand(arguments.runs)
             if own is None or path.resolve() != own.resolve()]  # fmt: skip
    rungs, left_out, notices = ladder.read_ladder(paths)
    target = _target(arguments)
    kinds = (arguments.parameters, *(set(ladder.KINDS) - {arguments.parameters}))
    points = {kind: [rung.observed(kind) for rung in rungs] for kind in kinds}
    points = {kind: each for kind, each in points.items() if min(each)[0] > 0}
    fitted = {kind: Fitted.of(points[kind], kind) for kind in points}
    chosen = fitted[kinds[0]]
    _require_near(arguments, chosen, target, budget)
    if implausible := chosen.implausible():
        notices.append(
            f"{', '.join(implausible)}: no law of language models. These runs do not show how the "
            f"loss depends on size and tokens: they are too few, too alike or badly tuned. Do not "
            f"trust the prediction"
        )
    record: dict[str, Any] = {
        "parameters": kinds[0], "runs": [vars(rung).copy() for rung in rungs], "left_out": left_out,
        "notices": notices, "law": vars(chosen.law).copy(), "errors": chosen.errors(),
        "one_ratio": chosen.one_ratio,
    }  # fmt: skip
    if target is not None:
        record["target"] = target | {
            "predictions": {
                kind: vars(each.predict(target["sizes"][kind], target["tokens"])).copy()
                for kind, each in fitted.items()
            },
            "beyond": ladder.outside(chosen.points, target["sizes"][kinds[0]], target["tokens"]),
        }
    if budget is not None:
        record["budget"] = _optimum(chosen, *budget)
    print(strict_json(record, indent=2) if arguments.json else as_text(record, chosen, rungs))


def _budget(arguments: argparse.Namespace) -> tuple[float, str] | None:
    """Return the FLOPs of --budget, and how they were derived."""
    from launch.plan import scaling

    if not arguments.budget:
        return None
    if arguments.devices is None:
        arguments.devices = 1 if is_cpu(arguments) else 8
    hardware = hardware_of(arguments)
    return scaling.flops_of(arguments.budget, hardware, arguments.devices, arguments.mfu)


def _target(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the size and tokens to predict, with the measured loss of --check_against."""
    from launch.experiments import ladder
    from zerolm.model.model import Model
    from zerolm.report.run_history import read_run

    if arguments.check_against is not None:
        if arguments.model_config or arguments.total_tokens:
            raise ConfigError(
                "command line: --check_against: has a model and tokens of its own. Remove "
                "--model_config and --total_tokens."
            )
        found = ladder.read_rung(read_run(arguments.check_against), {})
        if isinstance(found, str):
            raise ConfigError(f"{arguments.check_against}: {found}. Give a finished, decayed run.")
        return {"name": found.name, "sizes": found.sizes, "tokens": found.tokens,
                "measured": found.loss}  # fmt: skip
    if bool(arguments.model_config) != bool(arguments.total_tokens):
        raise ConfigError(
            "command line: --model_config and --total_tokens: one is missing. Give both, or "
            "neither."
        )
    if not arguments.model_config:
        return None
    model = Model.load(arguments.model_config)
    return {"name": arguments.model_config, "sizes": ladder.sizes_of(model),
            "tokens": arguments.total_tokens}  # fmt: skip


def _require_near(
    arguments: argparse.Namespace,
    fitted: "Fitted",
    target: dict[str, Any] | None,
    budget: tuple[float, str] | None,
) -> None:
    """Refuse what the runs say too little about.

    Raises:
        ConfigError: the target or the budget is too far from the runs.
    """
    from launch.experiments import ladder

    limit, problems = arguments.max_extrapolation, []
    points, one_ratio = fitted.points, fitted.one_ratio
    if target is not None:
        size = target["sizes"][arguments.parameters]
        beyond = ladder.outside(points, size, target["tokens"])
        ratio = beyond.pop("tokens per parameter")
        far = {name: factor for name, factor in beyond.items() if factor > limit}
        if far:
            problems.append(
                f"{target['name']}: is {_factors(far)} outside the range of the runs, more than "
                f"--max_extrapolation {limit:g}. Add larger runs, or say how far you trust the "
                f"fit: --max_extrapolation {math.ceil(max(far.values()))}."
            )
        if one_ratio and ratio > 1.5:
            problems.append(
                f"{target['name']}: has other tokens per parameter than the runs, which all have "
                f"about the same, so that nothing is known about it. Add runs with more and fewer "
                f"tokens."
            )
    if budget is not None:
        largest = max(6 * each.parameters * each.tokens for each in points)
        if budget[0] / largest > limit:
            problems.append(
                f"--budget: {budget[0]:.3g} FLOPs are {budget[0] / largest:.3g} x those of the "
                f"largest run, more than --max_extrapolation {limit:g}. Add larger runs, or give "
                f"--max_extrapolation {math.ceil(budget[0] / largest)}."
            )
        if one_ratio:
            problems.append(
                "--budget: the runs all have about the same tokens per parameter, so the best "
                "shape is unknown. Add runs with more and fewer tokens."
            )
    if problems:
        raise ConfigError(problems)


def _optimum(fitted: "Fitted", flops: float, derivation: str) -> dict[str, Any]:
    """Return the size and tokens with the least loss, and their range over the left-out runs."""
    parameters, tokens = fitted.law.optimum(flops)
    sizes = sorted(law.optimum(flops)[0] for law in fitted.without)
    largest = max(6 * each.parameters * each.tokens for each in fitted.points)
    return {
        "flops": flops, "derivation": derivation, "parameters": parameters, "tokens": tokens,
        "parameters_range": [sizes[0], sizes[-1]], "beyond": max(1.0, flops / largest),
        **vars(fitted.predict(parameters, tokens)),
    }  # fmt: skip


def as_text(record: dict[str, Any], fitted: "Fitted", rungs: "Sequence[Rung]") -> str:
    """Return the table of the runs, the law, and what it predicts."""
    kind, law = record["parameters"], fitted.law
    width = max(len(rung.name) for rung in rungs)
    head = f"{'run':<{width}}  {'parameters':>10}  {'tokens':>8}  {'loss':>8}  {'fit':>8}"
    lines = [f"{head}  without it"]
    for rung, error in zip(rungs, record["errors"], strict=True):
        size, tokens = rung.sizes[kind], rung.tokens
        lines.append(
            f"{rung.name:<{width}}  {shown_count(size):>10}  {shown_count(tokens):>8}  "
            f"{rung.loss:>8.4f}  {law.loss(size, tokens):>8.4f}  {error / rung.loss:>+10.2%}"
        )
    metrics = sorted({rung.metric for rung in rungs})
    lines += [f"loss: {metric}; N: {kind} parameters" for metric in metrics]
    lines += [f"left out: {name}: {why}" for name, why in record["left_out"].items()]
    lines += [f"note: {notice}" for notice in record["notices"]]
    one_ratio = record["one_ratio"]
    lines += ["", f"L(N, D) = {law.entropy:.4f} + {law.model:.4g} / N^{law.alpha:.4f} + "
              f"{law.data:.4g} / D^{law.beta:.4f}"]  # fmt: skip
    if one_ratio:
        lines.append("all runs have about the same tokens per parameter: only the sum of the terms "
                     "is known")  # fmt: skip
    else:
        lines.append("without one of the runs: " + ", ".join(
            f"{name} {_range([getattr(each, key) for each in fitted.without])}"
            for name, key in (("E", "entropy"), ("alpha", "alpha"), ("beta", "beta"))
        ))  # fmt: skip
    if (target := record.get("target")) is not None:
        lines += ["", *_target_lines(target, kind)]
    if (found := record.get("budget")) is not None:
        low, high = found["parameters_range"]
        lines += [
            "",
            f"{found['derivation']}{found['flops']:.3g} FLOPs: best with "
            f"{shown_count(found['parameters'])} parameters ({shown_count(low)} to "
            f"{shown_count(high)} without one of the runs) and {shown_count(found['tokens'])} "
            f"tokens, {found['tokens'] / found['parameters']:.3g} per parameter",
            f"loss {found['loss']:.4f}, 80% interval {found['low']:.4f} to {found['high']:.4f}; "
            f"{found['beyond']:.3g} x the compute of the largest run",
        ]
    return "\n".join(lines)


def _target_lines(target: dict[str, Any], kind: str) -> list[str]:
    size, tokens = target["sizes"][kind], target["tokens"]
    found, beyond = target["predictions"][kind], target["beyond"]
    lines = [
        f"{target['name']}: {shown_count(size)} parameters, {shown_count(tokens)} tokens",
        f"predicted loss {found['loss']:.4f}, 80% interval {found['low']:.4f} to "
        f"{found['high']:.4f}",
        f"extrapolates: {_factors(beyond)} outside the range of the runs"
        if max(beyond.values()) > 1
        else "within the range of the runs",
    ]
    for other, each in target["predictions"].items():
        if other != kind:
            lines.append(f"with {other} parameters as N: {each['loss']:.4f}, {each['low']:.4f} to "
                         f"{each['high']:.4f}")  # fmt: skip
    if (measured := target.get("measured")) is not None:
        place = "inside" if found["low"] <= measured <= found["high"] else "outside"
        lines.append(
            f"measured loss {measured:.4f}: the prediction is {found['loss'] - measured:+.4f} "
            f"({found['loss'] / measured - 1:+.2%}) off, and the loss is {place} the interval"
        )
    return lines


def _factors(beyond: dict[str, float]) -> str:
    return ", ".join(f"{factor:.3g} x in {name}" for name, factor in beyond.items() if factor > 1)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}"
