"""Checks at step 0 that every parameter has the distribution implied by the config.

DeepSpeed's `zero.Init` alone leaves plausible but wrong weights (an embedding with standard
deviation 1 instead of 0.02), and nothing else detects it. The expected values are known in closed
form or come from a re-initialisation without ZeRO. Must not depend on
`zerolm.model.initialization`, to keep the check independent.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerolm.distributed.collectives import gather_objects
from zerolm.engine.parameters import gathered
from zerolm.model.architecture import causal_lm_class, constructor_values, meta_model
from zerolm.model.stages import of_all_stages

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Tolerance for a statistic in standard errors: one false alarm in 10**8 statistics. A model with
# 1,000 parameters has 2,000 statistics.
NORMAL_SIGMAS = 6.0
REINITIALIZED_SIGMAS = 9.0  # for comparison with a sample from a distribution with unknown tails
CHUNK = 1 << 21  # number of values; limits the float64 copy to 16 MiB

# Model types whose own `_init_weights` is covered by the closed forms. These also cover all model
# types with transformers' general `_init_weights`.
COVERED_FAMILIES = frozenset({"gpt2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})


@dataclasses.dataclass(frozen=True)
class InitializationReport:
    """The result of the check; `str()` returns one line.

    Attributes:
        num_parameters: number of parameter tensors checked; tied parameters count once.
        num_values: number of values in these tensors.
        num_reinitialized: number of tensors compared with a re-initialisation, because they have no
            closed form.
        problems: one line per failure, with the parameter and its actual and expected values.
        good: statement printed if there are no problems.
    """

    num_parameters: int
    num_values: int
    num_reinitialized: int
    problems: tuple[str, ...]
    good: str = "as the config implies"

    def __str__(self) -> str:
        verdict = f"{len(self.problems)} wrong" if self.problems else f"all {self.good}"
        how = f", {self.num_reinitialized} by re-initialisation" if self.num_reinitialized else ""
        return (
            f"initial weights: {self.num_parameters} parameters with {self.num_values:,} values "
            f"checked{how}, {verdict}"
        )


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of one parameter's values."""

    count: int
    mean: float
    std: float
    non_finite: int = 0
    exact: bool = True  # whether they come from a closed form, not a sample

    def times(self, factor: float) -> "Statistics":
        return dataclasses.replace(self, mean=self.mean * factor, std=self.std * factor)


def check_initialization(
    model: nn.Module,
    config: "PretrainedConfig",
    factors: Mapping[str, float] = MappingProxyType({}),
) -> InitializationReport:
    """Compare every parameter's mean and standard deviation with those implied by the config.

    Every rank must call this before the first optimizer step. All ranks return the same report;
    problems that do not occur on rank 0 name the rank. Partitioned parameters are gathered one at a
    time. The caller raises an error if the report lists problems.

    Args:
        factors: {parameter name: factor for the values implied by the config}.
    """
    problems: list[str] = []
    reference = _ReferenceModel(config)
    checked: dict[str, tuple[int, bool]] = {}  # number of values, whether by re-initialisation
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        with gathered([parameter]):
            values = parameter.detach()
            actual = _statistics(values)
            expected = closed_form(config, module, path, leaf, values.numel())
            checked[name] = values.numel(), expected is None
            if expected is None:
                expected = reference.statistics(name)
            expected = expected.times(factors.get(name, 1.0))
            problems += _differences(name, actual, expected)
    problems = _merge_ranks(problems)
    checked = of_all_stages(model, checked)
    values_checked, requested = zip(*checked.values(), strict=True)
    return InitializationReport(len(checked), sum(values_checked), sum(requested), tuple(problems))


def _merge_ranks(problems: list[str]) -> list[str]:
    """Return the problems found on any rank, so either all ranks refuse the model or none does."""
    if not torch.distributed.is_initialized():
        return problems
    by_rank = gather_objects(problems)
    merged = list(by_rank[0])
    for rank, lines in enumerate(by_rank[1:], start=1):
        merged += [f"{line} (on rank {rank})" for line in lines if line not in by_rank[0]]
    return merged


def _statistics(values: torch.Tensor) -> Statistics:
    """Return the values' count, mean and standard deviation, computed in float64 by chunk."""
    count, total, squares, non_finite = values.numel(), 0.0, 0.0, 0
    for chunk in values.reshape(-1).split(CHUNK):
        wide = chunk.double()
        chunk_squares = float(torch.dot(wide, wide))
        if math.isfinite(chunk_squares):
            total += float(wide.sum())
            squares += chunk_squares
        else:
            non_finite += int((~torch.isfinite(wide)).sum())
    mean = total / max(count, 1)
    variance = max(squares / max(count, 1) - mean * mean, 0.0)
    return Statistics(count, mean, math.sqrt(variance), non_finite)


def closed_form(
    config: "PretrainedConfig", module: nn.Module, path: str, leaf: str, count: int
) -> Statistics | None:
    """Return the expected statistics of a parameter in `module`, or None if they have no closed
    form.
    """
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    model_class = causal_lm_class(config)
    general = model_class._init_weights is PreTrainedModel._init_weights
    if not general and config.model_type not in COVERED_FAMILIES:
        return None
    std = getattr(config, "initializer_range", None) or 0.02
    class_name = type(module).__name__
    if "LayerNorm" in class_name or "RMSNorm" in class_name:
        constant = {"weight": 1.0, "bias": 0.0}.get(leaf)
        return None if constant is None else Statistics(count, constant, 0.0)
    is_matrix = isinstance(module, nn.Linear | Conv1D)
    if is_matrix and leaf == "bias":
        return Statistics(count, 0.0, 0.0)
    if config.model_type == "gpt2" and path.endswith("c_proj"):
        # GPT-2 paper, section 2.3: residual projections are scaled by 1 / sqrt(residual layers).
        return Statistics(count, 0.0, std / math.sqrt(2 * config.n_layer))
    is_moe = not general and ("Experts" in class_name or "Router" in class_name)
    if is_moe or isinstance(module, nn.Embedding) or (is_matrix and leaf == "weight"):
        return Statistics(count, 0.0, std)
    return None


class _ReferenceModel:
    """A model without ZeRO in which transformers initialises single blocks for comparison."""

    def __init__(self, config: "PretrainedConfig"):
        self._config = config
        self._model: nn.Module | None = None
        self._statistics: dict[str, Statistics] = {}

    def statistics(self, name: str) -> Statistics:
        """Return a parameter's statistics after initialisation by transformers."""
        if name not in self._statistics:
            self._model = self._model or meta_model(self._config)
            block = _block_around(self._model, name)
            self._statistics.update(self._initialize_block(self._model, block))
        return self._statistics[name]

    def _initialize_block(self, model: Any, path: str) -> dict[str, Statistics]:
        from transformers import PreTrainedModel

        ancestors = [path.rsplit(".", depth)[0] for depth in range(path.count(".") + 1)]
        modules = [*(model.get_submodule(ancestor) for ancestor in ancestors), model]
        owner = next(module for module in modules if isinstance(module, PreTrainedModel))
        block = model.get_submodule(path)
        block.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameter in block.parameters():
                parameter.fill_(float("nan"))
            torch.default_generator.manual_seed(0)  # any seed: only the distribution matters
            _initialize(block, owner)
        values = {f"{path}.{name}": p.detach() for name, p in block.named_parameters()}
        unwritten = [name for name, value in values.items() if value.isnan().all()]
        values |= constructor_values(self._config, unwritten, seed=0)
        statistics = {
            name: dataclasses.replace(_statistics(value), exact=False)
            for name, value in values.items()
        }
        block.to("meta")
        return statistics


def _initialize(module: nn.Module, owner: Any) -> None:
    """Initialise a module after its children, using `_init_weights` of the innermost model that
    contains it.
    """
    from transformers import PreTrainedModel

    for child in module.children():
        _initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)


def _block_around(model: nn.Module, name: str) -> str:
    """Return the path of the outermost module that contains a parameter and is not a model or a
    list.
    """
    from transformers import PreTrainedModel

    parts = name.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts))]
    containers = (PreTrainedModel, nn.ModuleList, nn.ModuleDict)
    for path in paths:
        if not isinstance(model.get_submodule(path), containers):
            return path
    return paths[-1]


def _differences(name: str, actual: Statistics, expected: Statistics) -> list[str]:
    """Return a line for each statistic whose difference cannot be explained by chance."""
    if actual.non_finite:
        return [f"{name}: {actual.non_finite} of {actual.count} values are not finite"]
    sigmas = NORMAL_SIGMAS if expected.exact else REINITIALIZED_SIGMAS
    rounding = 1e-4 if expected.exact else 4e-3  # relative; bf16 has 8 bits, but 0 and 1 are exact
    # Standard errors of the mean and the standard deviation of n normal values.
    error = sigmas * expected.std / math.sqrt(max(actual.count, 1))
    slack = (
        rounding * (abs(expected.mean) + expected.std) * (expected.std > 0 or not expected.exact)
    )
    problems = []
    for what, value, implied, tolerance in (
        ("mean", actual.mean, expected.mean, error + slack),
        ("standard deviation", actual.std, expected.std, error / math.sqrt(2) + slack),
    ):
        if abs(value - implied) > tolerance + 1e-7:
            problems.append(
                f"{name}: {what} {value:.6g}, but the config implies {implied:.6g} "
                f"(tolerance {tolerance:.2g})"
            )
    return problems
