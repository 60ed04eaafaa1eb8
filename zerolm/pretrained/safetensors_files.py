"""`SafetensorsFiles`: the weights in a Hugging Face model directory, read one tensor at a time.

Names, shapes and dtypes come from the file headers. Values are memory-mapped until `release` frees
them. Must not depend on model code: names are those in the files.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from zerolm.common.errors import ConfigError, reason
from zerolm.common.records import read_json
from zerolm.common.values import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN_NAME = re.compile(r"[\w.-]+\.safetensors")
# `digest` reads files up to this size completely, and only samples of larger files.
COMPLETE_BYTES, SAMPLES, SAMPLE_BYTES = 1 << 26, 16, 1 << 16
CONVERT = (
    "Convert them on a machine where you trust them: AutoModelForCausalLM.from_pretrained(...)."
    "save_pretrained(...) writes safetensors."
)


class Tensors(Protocol):
    """Interface for weights on disk, used by `LoadedWeights`.

    Attributes:
        converts: whether names and shapes must be converted from those in published files to those
            in the model code.
    """

    converts: bool

    @property
    def listed(self) -> dict[str, Tensor]:
        """{name: shape and dtype}."""
        ...

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def release(self) -> None:
        """Free the memory used by the values that were read."""


class SafetensorsFiles:
    """The weights in a model directory: `model.safetensors`, or several files with an index.

    Raises:
        ConfigError: lists all files that are missing, damaged or in another format.
    """

    converts = True
    listed: dict[str, Tensor]

    def __init__(self, directory: Path):
        self.files, indexed = _find_files(directory)
        self.listed = {}
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        problems = []
        for path in self.files:
            try:
                problems += self._read_header(path)
            except Exception as error:  # SafetensorError, OSError
                why = reason(error, named=False)
                problems.append(f"{path}: damaged or truncated ({why}). Fetch it again.")
        if not problems:
            problems = [
                f"{directory / INDEX}: weight_map: lists {name} in {file}, which does not contain "
                f"it. Fetch the model again."
                for name, file in indexed.items()
                if self._file_of.get(name) != directory / file
            ][:5]
        if problems:
            raise ConfigError(problems)

    def _read_header(self, path: Path) -> list[str]:
        from safetensors import safe_open

        problems = []
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if name in self._file_of:
                    other = self._file_of[name]
                    problems.append(f"{path}: {name}: also in {other}. Fetch the model again.")
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                self.listed[name] = Tensor(shape, DTYPES.get(part.get_dtype(), part.get_dtype()))
                self._file_of[name] = path
        return problems

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path].get_tensor(name)

    def release(self) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def digest(self) -> str:
        """Return a hex SHA-256 that identifies the files.

        Only the header and 1 MiB of samples are hashed from files over 64 MiB. That is enough,
        because the weights of two training steps differ in nearly all values.
        """
        digest = hashlib.sha256()
        for path in self.files:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                if size <= COMPLETE_BYTES:
                    digest.update(file.read())
                    continue
                header_bytes = 8 + int.from_bytes(file.read(8), "little")
                file.seek(0)
                digest.update(file.read(header_bytes))
                last = max(header_bytes, size - SAMPLE_BYTES)
                for number in range(SAMPLES):
                    file.seek(header_bytes + (last - header_bytes) * number // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


# Dtypes that weights may have, as {safetensors name: torch name}.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _find_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the weight files in a directory and, if it has an index, the index's {name: file}."""
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX, "the index of a model's safetensors files")
        indexed = index.get("weight_map")
        if not isinstance(indexed, dict) or not indexed:
            raise ConfigError(f"{directory / INDEX}: weight_map: missing. Fetch the model again.")
        names = sorted({str(file) for file in indexed.values()})
        problems = _missing(directory, names)
        if problems:
            raise ConfigError(problems)
        return [directory / name for name in names], indexed
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS], {}
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"{directory}: contains an adapter (adapter_config.json), not a model. Merge it into "
            "its base model, and give the merged model."
        )
    if pickles := sorted(path.name for path in directory.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{directory}: its weights are pickles ({pickles[0]}), which may run code and are "
            f"never read. {CONVERT}"
        )
    raise ConfigError(
        f"{directory}: contains neither {WEIGHTS} nor {INDEX}. Give a directory written by "
        "save_pretrained or zerolm export."
    )


def _missing(directory: Path, names: Iterable[str]) -> list[str]:
    where, again = f"{directory / INDEX}: weight_map", "Fetch the model again."
    problems = []
    for name in names:
        if not PLAIN_NAME.fullmatch(name):
            problems.append(f"{where}: {name!r} is not the name of a safetensors file. {again}")
        elif not (directory / name).is_file():
            problems.append(f"{where}: {name}: no such file. {again}")
    return problems
