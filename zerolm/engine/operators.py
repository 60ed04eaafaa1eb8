"""Reports which DeepSpeed operators are installed, and which this host can build."""


def installed() -> set[str]:
    """Return the names of the operators that were compiled when DeepSpeed was installed."""
    from deepspeed.git_version_info import installed_ops

    return {name for name, is_installed in installed_ops.items() if is_installed}


def has_asynchronous_io() -> bool:
    """Return whether DeepSpeed's async_io operator is installed or can be built."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible(verbose=False)
