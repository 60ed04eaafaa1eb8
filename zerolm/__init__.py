"""The library behind pretrain.py and the `zerolm` commands."""

__version__: str  # of the installed package; looked up on first use, because the lookup is slow


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'zerolm' has no attribute {name!r}")
    from zerolm.common.provenance import installed_version

    return installed_version("zerolm") or "unknown"
