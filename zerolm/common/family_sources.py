"""Digests of the transformers sources that compute a model, whatever their version says.

An editable install keeps its version while its sources change, and so does a file that was edited
in place. What was found with other sources must not be recalled. Standard library only; imports
nothing of transformers.
"""

import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

# Besides the directory of a family.
SHARED = ("*_utils.py", "modeling_*.py", "activations.py", "conversion_mapping.py")
SHARED_DIRECTORIES = ("integrations",)


@functools.cache
def shared_digest() -> str:
    """Return a digest of the sources that families of models share; empty if not installed."""
    root = _root()
    if root is None:
        return ""
    files = [path for pattern in SHARED for path in root.glob(pattern)]
    files += [path for name in SHARED_DIRECTORIES for path in root.joinpath(name).glob("*.py")]
    return _digest(root, files)


@functools.cache
def family_digest(config_module: str) -> str:
    """Return a digest of a family's sources; empty if it is not one of transformers.

    Args:
        config_module: of the config's class, like `transformers.models.llama.configuration_llama`;
            what follows does not count.
    """
    root, parts = _root(), config_module.split(".")
    if root is None or len(parts) < 3 or parts[:2] != ["transformers", "models"]:
        return ""
    return _digest(root, root.joinpath("models", parts[2]).glob("*.py"))


def _root() -> Path | None:
    found = importlib.util.find_spec("transformers")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _digest(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(set(files)):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]
