"""The parts of training that may be off: one module each, and this list of them.

Its order is the order of their hooks (`Feature`). At its top a module imports little, so that
`--help` is instant; its hooks may import what the training loop may.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolm.features.chunked_loss import ChunkedLoss
from zerolm.features.compiled_blocks import CompiledBlocks
from zerolm.features.completep import Completep
from zerolm.features.document_mask import DocumentMask
from zerolm.features.ema import Ema
from zerolm.features.expert_balance import ExpertBalance
from zerolm.features.feature import Case, Feature
from zerolm.features.fp8 import Fp8
from zerolm.features.gathered_blocks import GatheredBlocks
from zerolm.features.integrity import Integrity
from zerolm.features.memory_copies import MemoryCopies
from zerolm.features.qk_clip import QkClip
from zerolm.features.z_loss import ZLoss

if TYPE_CHECKING:
    from zerolm.plan.plan import Plan

FEATURES: tuple[type[Feature], ...] = (
    Integrity,
    Completep,
    ExpertBalance,
    ChunkedLoss,
    ZLoss,
    Fp8,
    GatheredBlocks,
    CompiledBlocks,
    DocumentMask,
    QkClip,
    Ema,
    MemoryCopies,
)


def problems(case: Case) -> list[str]:
    """Return why a run cannot have the features that its settings ask for."""
    return [line for kind in FEATURES for line in kind.problems(case)]


def notices(case: Case) -> list[str]:
    """Return what the user should know about features before a run."""
    return [line for kind in FEATURES for line in kind.notices(case)]


def host_problems(plan: "Plan", environment: Mapping[str, str]) -> list[str]:
    """Return what this host lacks for the features of a run without other problems."""
    return [line for kind in FEATURES for line in kind.host_problems(plan, environment)]


def flops_per_token(settings: Any, config: Any) -> float:
    """Return the FLOPs that features take per token of training, besides those of the model."""
    return sum(kind.flops_per_token(settings, config) for kind in FEATURES)


def summary(plan: "Plan") -> dict[str, str]:
    """Return the lines of features in the plan of a run."""
    return {name: line for kind in FEATURES for name, line in kind.summary(plan).items()}


def build(plan: "Plan") -> list[Feature]:
    """Return the features of a run."""
    return [kind(plan) for kind in FEATURES if kind.wanted(plan)]
