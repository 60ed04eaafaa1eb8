"""`zerolm predict`: fit a scaling law to finished runs, and predict the loss of a larger one."""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.estimate.flags import add_devices, budget_of
from zerolm.common.command_line import count, number
from zerolm.common.errors import ConfigError
from zerolm.common.values import count as shown_count
from zerolm.common.values import strict_json

if TYPE_CHECKING:
    from launch.experiments.ladder import Rung
    from launch.experiments.law import Fitted

DEFAULT_EXTRAPOLATION = 10.0
OTHER_RATIO = 1.5  # factor outside the runs' tokens per parameter above which a ratio is new


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fit L(N, D) = E + A / N^alpha + B / D^beta to the final losses of finished runs with "
        "different sizes N and tokens D, and predict the loss of a larger run with an interval."
    )
    add = parser.add_argument
    add(
        "runs", nargs="+", type=Path,
        help="run directories or sweep directories; unfinished and undecayed runs are left out",
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
    devices = parser.add_argument_group("the devices for --budget, with flags of zerolm plan")
    add_devices(devices)
    devices.add_argument(
        "--mfu", metavar="X", type=number, help="model FLOP/s utilization (default: from "
        "--hardware)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    from launch.experiments import ladder
    from launch.experiments.law import Fitted

    budget = budget_of(arguments) if arguments.budget else None
    own = arguments.check_against
    paths = [path for path in ladder.expand(arguments.runs)
             if own is None or path.resolve() != own.resolve()]  # fmt: skip
    target = _target(arguments)
    rungs, left_out, notices = ladder.read_ladder(paths, own)
    kinds = sorted(ladder.KINDS, key=lambda kind: kind != arguments.parameters)
    points = {kind: [rung.observed(kind) for rung in rungs] for kind in kinds}
    fitted = {kind: Fitted.of(each, kind) for kind, each in points.items() if min(each)[0] > 0}
    chosen, limit = fitted[arguments.parameters], arguments.max_extrapolation
    if implausible := chosen.implausible():
        notices.append(
            f"{', '.join(implausible)}: not plausible for language models. These runs do not show "
            f"how the loss depends on size and tokens: they are too few, too similar or badly "
            f"tuned. Do not trust the prediction"
        )
    record: dict[str, Any] = {
        "parameters": arguments.parameters, "runs": [vars(rung) for rung in rungs],
        "left_out": left_out, "notices": notices, "law": vars(chosen.law),
        "errors": chosen.errors(), "one_ratio": chosen.one_ratio,
    }  # fmt: skip
    problems, is_other_ratio = [], budget is not None
    if target is not None:
        sizes, tokens = target["sizes"], target["tokens"]
        problems += _other_vocabulary(target, rungs[0].vocab_size)
        beyond = chosen.beyond(sizes[arguments.parameters], tokens)
        is_other_ratio |= beyond["tokens per parameter"] > OTHER_RATIO
        asked = {name: beyond[name] for name in ("compute", "parameters", "tokens")}
        problems += _too_far(f"{target['name']}: is", asked, limit)
        found = {kind: vars(each.predict(sizes[kind], tokens)) for kind, each in fitted.items()}
        record["target"] = target | {"predictions": found, "beyond": beyond}
    if chosen.one_ratio and is_other_ratio:
        problems.append(
            "the runs: all have about the same tokens per parameter, so nothing is known about "
            "other ratios. Add runs with more and fewer tokens."
        )
    elif budget is not None:
        record["budget"] = best = _optimum(chosen, *budget)
        asked = {"compute": best["beyond"]}
        problems += _too_far(f"--budget: {budget[0]:.3g} FLOPs are", asked, limit)
    if problems:
        raise ConfigError(problems)
    print(strict_json(record, indent=2) if arguments.json else as_text(record, chosen, rungs))


def _target(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the model sizes and token count to predict a loss for; None if none are given.

    With --check_against, they are the values of that run, and its measured loss is included.
    """
    from launch.experiments import ladder
    from zerolm.model.model import Model
    from zerolm.report.run_history import read_run

    path, tokens, own = arguments.model_config, arguments.total_tokens, arguments.check_against
    if own is not None:
        if path or tokens:
            raise ConfigError(
                "command line: --check_against: has its own model and tokens. Remove "
                "--model_config and --total_tokens."
            )
        found = ladder.read_rung(read_run(own))
        if isinstance(found, str):
            raise ConfigError(f"{own}: {found}. Give a finished, decayed run.")
        return {"name": found.name, "sizes": found.sizes, "tokens": found.tokens,
                "measured": found.loss}  # fmt: skip
    if bool(path) != bool(tokens):
        raise ConfigError(
            "command line: --model_config and --total_tokens: one is missing. Give both, or "
            "neither."
        )
    if not path:
        return None
    model = Model.load(path)
    return {"name": path, "sizes": ladder.sizes_of(model), "tokens": tokens,
            "vocab_size": model.vocab_size}  # fmt: skip


def _other_vocabulary(target: Mapping[str, Any], vocab_size: int | None) -> list[str]:
    """Return a problem if the model's vocabulary differs in size from that of the runs."""
    own = target.get("vocab_size")
    if None in (own, vocab_size) or own == vocab_size:
        return []
    return [
        f"{target['name']}: vocab_size: {own}, but the runs have {vocab_size}, and losses per "
        f"token with different vocabularies cannot be compared. Give a config with the same size."
    ]


def _too_far(name: str, beyond: Mapping[str, float], limit: float) -> list[str]:
    """Return a problem if the prediction is too far outside the range of the runs."""
    far = {each: factor for each, factor in beyond.items() if factor > limit}
    if not far:
        return []
    return [
        f"{name} {_factors(far)} outside the range of the runs, more than --max_extrapolation "
        f"{limit:g}. Add larger runs, or allow it with --max_extrapolation "
        f"{math.ceil(max(far.values()))}."
    ]


def _optimum(fitted: "Fitted", flops: float, derivation: str) -> dict[str, Any]:
    """Return the model size and token count with the lowest predicted loss for a budget.

    `parameters_range` is the range of optimal sizes when each run is left out in turn.
    """
    parameters, tokens = fitted.law.optimum(flops)
    sizes = [law.optimum(flops)[0] for law in fitted.without]
    largest = max(6 * each.parameters * each.tokens for each in fitted.points)
    return {
        "flops": flops, "derivation": derivation, "parameters": parameters, "tokens": tokens,
        "parameters_range": [min(sizes), max(sizes)], "beyond": max(1.0, flops / largest),
        **vars(fitted.predict(parameters, tokens)),
    }  # fmt: skip


def as_text(record: dict[str, Any], fitted: "Fitted", rungs: "Sequence[Rung]") -> str:
    """Format the table of runs, the fitted law, and its predictions."""
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
    lines += ["", f"L(N, D) = {law.entropy:.4f} + {law.model:.4g} / N^{law.alpha:.4f} + "
              f"{law.data:.4g} / D^{law.beta:.4f}"]  # fmt: skip
    coefficients = {"E": "entropy", "alpha": "alpha", "beta": "beta"}
    ranges = [
        f"{name} {min(values):.4g} to {max(values):.4g}"
        for name, key in coefficients.items()
        if (values := [getattr(each, key) for each in fitted.without])
    ]
    lines.append(
        "all runs have about the same tokens per parameter: only the sum of their terms is known"
        if record["one_ratio"]
        else f"when leaving out a run: {', '.join(ranges)}"
    )
    if (target := record.get("target")) is not None:
        lines += ["", *_target_lines(target, kind)]
    if (found := record.get("budget")) is not None:
        low, high = map(shown_count, found["parameters_range"])
        lines += [
            "",
            f"{found['derivation']}{found['flops']:.3g} FLOPs: best with "
            f"{shown_count(found['parameters'])} parameters ({low} to {high} when leaving out each "
            f"run in turn) and {shown_count(found['tokens'])} tokens, "
            f"{found['tokens'] / found['parameters']:.3g} per parameter",
            f"loss {_interval(found)}; {found['beyond']:.3g} x the compute of the largest run",
        ]
    return "\n".join(lines)


def _target_lines(target: dict[str, Any], kind: str) -> list[str]:
    found, beyond = target["predictions"][kind], target["beyond"]
    size, tokens = shown_count(target["sizes"][kind]), shown_count(target["tokens"])
    lines = [
        f"{target['name']}: {size} parameters, {tokens} tokens",
        f"predicted loss {_interval(found)}",
        f"extrapolates: {_factors(beyond)} outside the range of the runs"
        if max(beyond.values()) > 1
        else "within the range of the runs",
    ]
    lines += [
        f"with {other} parameters as N: {_interval(each)}"
        for other, each in target["predictions"].items()
        if other != kind
    ]
    if (measured := target.get("measured")) is not None:
        place = "inside" if found["low"] <= measured <= found["high"] else "outside"
        lines.append(
            f"measured loss {measured:.4f}: the prediction is {found['loss'] - measured:+.4f} "
            f"({found['loss'] / measured - 1:+.2%}) off, and the loss is {place} the interval"
        )
    return lines


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['loss']:.4f}, 80% interval {found['low']:.4f} to {found['high']:.4f}"


def _factors(beyond: Mapping[str, float]) -> str:
    return ", ".join(f"{factor:.3g} x in {name}" for name, factor in beyond.items() if factor > 1)
