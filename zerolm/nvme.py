"""Where ZeRO-3's NVMe offload keeps its files: `--nvme_path`, and whether this host can use it.

A directory of a machine has no place in a profile that is shared: `ds_configs/zero3_nvme.json` says
"auto", which stands for the flag. Before `ds_rules.py`; knows nothing of sizes.
"""

import copy
from collections.abc import Mapping
from typing import Any

from zerolm.ds_config import block, offload_device
from zerolm.ds_schema import AUTO
from zerolm.machine import unwritable
from zerolm.settings import Settings
from zerolm.values import shown


def with_path(
    ds_config: Mapping[str, Any], settings: Settings, name: str, problems: list[str]
) -> dict[str, Any]:
    """Return the config with `--nvme_path` where it leaves the path to the run.

    Args:
        ds_config: as the user wrote it; it is not changed.
        name: of its file, for the messages.
        problems: is added to.
    """
    found: dict[str, Any] = dict(copy.deepcopy(ds_config))
    wanted, used = settings.nvme_path, False
    for what in ("optimizer", "param"):
        if offload_device(found, what) != "nvme":
            continue
        used = True
        offload: Any = block(found, "zero_optimization", f"offload_{what}")
        written = offload.get("nvme_path", AUTO)
        key = f"{name}: zero_optimization.offload_{what}.nvme_path"
        if written == AUTO and wanted is None:
            problems.append(
                f"{key}: auto, is for --nvme_path to say. Name a directory on a local NVMe disk "
                f"of each host: --nvme_path PATH."
            )
        elif written == AUTO:
            offload["nvme_path"] = wanted
        elif wanted not in (None, written):
            problems.append(
                f"{key}: {shown(written)}, contradicts {settings.where('nvme_path')} {wanted}. "
                f'Set it to "auto", or remove the flag.'
            )
    if wanted is not None and not used and ds_config:
        problems.append(
            f"{settings.where('nvme_path')}: {wanted}, but {name} offloads nothing to NVMe. Use "
            f"ds_configs/zero3_nvme.json, or remove the flag."
        )
    return found


def host_problems(ds_config: Mapping[str, Any], name: str) -> list[str]:
    """Say why this host cannot read and write its NVMe disk as DeepSpeed does."""
    offloads = {
        what: block(ds_config, "zero_optimization", f"offload_{what}").get("nvme_path")
        for what in ("optimizer", "param")
        if offload_device(ds_config, what) == "nvme"
    }
    problems = [
        f"{name}: zero_optimization.offload_{what}.nvme_path: {path}, {why}"
        for what, path in offloads.items()
        if isinstance(path, str) and path != AUTO and (why := unwritable(path))
    ]
    if offloads and not has_asynchronous_io():
        problems.append(
            f"{name}: offload to NVMe needs DeepSpeed's async_io, which cannot be built on this "
            f"host. Install libaio's headers (Debian: libaio-dev), or use "
            f"ds_configs/zero3_offload.json."
        )
    return problems


def has_asynchronous_io() -> bool:
    """Tell whether DeepSpeed's operator for asynchronous files is there or can be built."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible(verbose=False)
