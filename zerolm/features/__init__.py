"""Optional parts of training: one module each, and the list of them.

Hooks run in the order of `FEATURES`. A module imports little at its top, so `--help` is instant;
its hooks may import anything that the training loop may import.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolm.features.agc import Agc
from zerolm.features.chunked_loss import ChunkedLoss
from zerolm.features.compiled_blocks import CompiledBlocks
from zerolm.features.completep import Completep
from zerolm.features.document_mask import DocumentMask
from zerolm.features.ema import Ema
from zerolm.features.expert_balance import ExpertBalance
from zerolm.features.expert_ranks import ExpertRanks
from zerolm.features.feature import Case, Feature
from zerolm.features.fp8 import Fp8
from zerolm.features.gathered_blocks import GatheredBlocks
from zerolm.features.health import Health
from zerolm.features.integrity import Integrity
from zerolm.features.memory_copies import MemoryCopies
from zerolm.features.pipeline_stages import PipelineStages
from zerolm.features.qk_clip import QkClip
from zerolm.features.z_loss import ZLoss

if TYPE_CHECKING:
    from zerolm.plan.plan import Plan

FEATURES: tuple[type[Feature], ...] = (
    Health,
    Integrity,
    Completep,
    ExpertBalance,
    ExpertRanks,
    PipelineStages,
    ChunkedLoss,
    ZLoss,
    Fp8,
    GatheredBlocks,
    CompiledBlocks,
    DocumentMask,
    Agc,
    QkClip,
    Ema,
    MemoryCopies,
)


def problems(case: Case) -> list[str]:
    """Return problems with the features that the settings turn on, one line each."""
    return [line for kind in FEATURES for line in kind.problems(case)]


def notices(case: Case) -> list[str]:
    """Return lines that the user should read about the features before a run."""
    return [line for kind in FEATURES for line in kind.notices(case)]


def host_problems(plan: "Plan", environment: Mapping[str, str]) -> list[str]:
    """Return what the features need but this host lacks; called if there are no other problems."""
    return [line for kind in FEATURES for line in kind.host_problems(plan, environment)]


def flops_per_token(settings: Any, config: Any) -> float:
    """Return the FLOPs per training token that the features add to the model's."""
    return sum(kind.flops_per_token(settings, config) for kind in FEATURES)


def summary(plan: "Plan") -> dict[str, str]:
    """Return the lines that the features add to a run's plan."""
    return {name: line for kind in FEATURES for name, line in kind.summary(plan).items()}


def build(plan: "Plan") -> list[Feature]:
    """Build the features that a run uses."""
    return [kind(plan) for kind in FEATURES if kind.wanted(plan)]
