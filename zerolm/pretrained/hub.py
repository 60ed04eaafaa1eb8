"""Fetch a model from the Hugging Face hub into the hub client's cache."""

import re
from pathlib import Path

from zerolm.common.errors import ConfigError, reason
from zerolm.common.url import ask_hub

HUB_ID = re.compile(r"([\w.-]+/[\w.-]+|[\w-]+)(?:@([\w./-]+))?")  # name[@revision]
PATTERNS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
            "tokenizer*", "*.model", "vocab.json", "merges.txt", "adapter_config.json")  # fmt: skip


def split_id(name: str) -> tuple[str, str | None] | None:
    """Split `NAME[@REVISION]` into (hub id, revision); return None if it cannot be a hub id."""
    match = HUB_ID.fullmatch(name)
    return (match[1], match[2]) if match else None


def fetch(name: str) -> tuple[Path, str, str]:
    """Fetch a model; return its cache directory, its hub id, and its exact name, ID@COMMIT.

    Cached files are not fetched again; without a network all files must be cached.

    Raises:
        ConfigError: the model is not in the cache and cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    parts = split_id(name)
    assert parts is not None, name
    hub_id, revision = parts
    disable_progress_bars()
    absent = ask_hub(hub_id, revision)
    try:
        path = Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=list(PATTERNS),
                local_files_only=absent is not None,
            )
        )  # fmt: skip
    except Exception as error:  # many classes: errors of the network, the hub or the cache
        raise ConfigError(
            f"--init_from {name}: neither a directory nor a model that the Hugging Face client can "
            f"fetch or find in its cache ({absent or reason(error)}). Give a model directory, "
            f"RUN[@STEP], or a hub id; without a network, run `hf download {hub_id}` on a machine "
            "with one."
        ) from None
    return path, hub_id, f"{hub_id}@{path.name}"
