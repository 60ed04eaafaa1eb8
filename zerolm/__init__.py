"""The library of pretrain.py, and of the commands of `zerolm`."""

__version__: str  # that of the installed package; looking for it takes time


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'zerolm' has no attribute {name!r}")
    from zerolm.common.provenance import installed_version

    return installed_version("zerolm") or "unknown"
