"""Import Megatron-LM and mosaicml-streaming without their parts that need other libraries."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any


def import_streaming() -> Any:
    """Import mosaicml-streaming without its image data sets, which need torchvision."""
    for name in ("streaming.vision", "streaming.multimodal"):
        sys.modules[name] = types.ModuleType(name)
    import streaming

    return streaming


def import_megatron(checkout: Path) -> Any:
    """Import Megatron-LM's data sets without its other modules, which need GPU libraries."""
    sys.path.insert(0, str(checkout))
    core = types.ModuleType("megatron.core")
    core.__path__ = [str(checkout / "megatron/core")]
    sys.modules["megatron.core"] = core
    importlib.import_module(
        "megatron.core.parallel_state"
    )  # first, because the others have an import cycle
    from megatron.core.datasets import gpt_dataset, indexed_dataset, utils

    return gpt_dataset, indexed_dataset, utils
