"""Optimizers of users: found by name (`optimizer_classes`), and tried out (`trial`).

Must not depend on DeepSpeed or settings.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.optim.optimizer_classes import is_dotted as is_dotted
from zerolm.optim.optimizer_classes import optimizer_class as optimizer_class
from zerolm.optim.optimizer_classes import parameter_names as parameter_names
from zerolm.optim.optimizer_classes import preserve_state_dtypes as preserve_state_dtypes
from zerolm.optim.optimizer_classes import takes_betas as takes_betas
from zerolm.optim.trial import LARGE, Trial


def is_elementwise(name: str, params: Mapping[str, Any], stage: int = 2) -> bool:
    """Return whether an optimizer updates shards as it updates complete parameters, by a trial.

    Args:
        name: dotted path of the class.
        params: arguments of the class.
        stage: of ZeRO, which decides how parameters are divided.
    """
    return Trial(name, params, LARGE).is_elementwise(stage)
