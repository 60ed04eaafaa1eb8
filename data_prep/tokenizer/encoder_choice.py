"""Chooses the encoding backend: the fastest backend whose ids equal the reference's.

`choose_backend` runs once, in the process that starts the workers. Checking a backend's equivalence
(`data_prep.tokenizer.equivalence`) takes seconds, so the results are cached in the user's cache
directory.
"""

import dataclasses
import hashlib
import os
import platform
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.tokenizer.backends import (
    BACKENDS,
    FAST_BACKEND,
    ID_FILES,
    BackendFailed,
    BackendUnavailable,
    open_backend,
    reference_backend,
)
from data_prep.tokenizer.equivalence import CHECK_VERSION, EquivalenceResult, check_equivalence
from data_prep.tokenizer.vocabulary import added_tokens, token_texts
from zerolm.common.errors import ConfigError, RecordError, did_you_mean
from zerolm.common.files import write_json
from zerolm.common.provenance import installed_version
from zerolm.common.records import read_record

# For smaller inputs, encoding with `tokenizers` takes less time than the check. The check takes
# 4.3 CPU seconds, the time in which `tokenizers` encodes 10 MB (vocabulary of 32,000, 2 cores of
# an Intel Xeon, 2026-11-21, `zerolm, first run` of `python -m benchmarks.tokenize_speed`).
MIN_CHECKED_INPUT_BYTES = 10 << 20


@dataclass(frozen=True)
class EncoderChoice:
    """The chosen encoding backend. The object is small and picklable; it is created once and sent
    to the workers.

    Attributes:
        backend: one of `backends.BACKENDS`.
        reference: the backend whose ids are correct by definition.
        proven: ranges [start, stop) of the code points for which the backend equals the reference;
            texts with other code points require the reference.
        note: message to the user that states why the fast backend is not used.
    """

    backend: str
    reference: str
    version: str | None = None
    proven: tuple[tuple[int, int], ...] = ()
    note: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the entry that the manifest contains about the encoder."""
        return {
            "backend": self.backend,
            "version": self.version,
            "reference": self.reference,
            "proven_code_points": sum(stop - start for start, stop in self.proven),
        }


def choose_backend(
    directory: Path, backend: str = "auto", input_bytes: int | None = None
) -> EncoderChoice:
    """Choose the backend for a tokenizer's saved copy; takes seconds if no check result is cached.

    Args:
        backend: one of `backends.BACKENDS`, or "auto" for the fast backend if it passes the check.
        input_bytes: size of the input; a check that would cost more than it saves is skipped.
    """
    reference = reference_backend(directory)
    if backend not in ("auto", *BACKENDS):
        raise ConfigError(
            f"--encoder {backend}: is not one of auto, {', '.join(BACKENDS)}."
            f"{did_you_mean(backend, BACKENDS)}"
        )
    if backend == "auto" and reference == "transformers":
        return EncoderChoice(reference, reference, installed_version(reference))
    name = FAST_BACKEND if backend == "auto" else backend
    small = backend == "auto" and input_bytes is not None and input_bytes < MIN_CHECKED_INPUT_BYTES
    note = None
    if name != reference:
        try:
            result = _equivalence(directory, name, reference, only_cached=small)
        except (BackendUnavailable, BackendFailed) as error:
            note = f"{name} {error}"
        else:
            if result is not None and result.refused:
                note = f"{name} {result.refused}"
            elif result is not None:
                return EncoderChoice(name, reference, installed_version(name), result.proven)
    if backend not in ("auto", reference):
        raise ConfigError(
            f"--encoder {backend}: cannot be used for this tokenizer: {note}. "
            f"Use --encoder auto or --encoder {reference}."
        )
    return EncoderChoice(reference, reference, installed_version(reference), note=note)


def _equivalence(
    directory: Path, name: str, reference: str, only_cached: bool
) -> EquivalenceResult | None:
    """Return the result of checking a backend; None if `only_cached` and no result is cached."""
    path = _cache_directory() / f"{_cache_key(directory, name, reference)}.json"
    cached = _read_cached(path)
    if cached is None and only_cached:
        return None
    candidate = open_backend(name, directory)  # also checks that the backend loads
    if cached is not None:
        return cached
    texts = dict.fromkeys([*added_tokens(directory), *token_texts(directory).values()])
    expected = open_backend(reference, directory)
    result = check_equivalence(expected, candidate, [*filter(None, texts)])
    with suppress(OSError):  # the home directory is not writable: the next run checks again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(result))
    return result


def _read_cached(path: Path) -> EquivalenceResult | None:
    try:
        content: Any = read_record(path, EquivalenceResult)
    except RecordError:  # damaged or written by another version: the check is repeated
        return None
    if content is None:
        return None
    proven = tuple((start, stop) for start, stop in content.pop("proven", ()))
    return EquivalenceResult(proven=proven, **content)


def _cache_key(directory: Path, name: str, reference: str) -> str:
    """Return a digest of everything that affects the result of a check."""
    digest = hashlib.sha256()
    for part in (
        f"proof {CHECK_VERSION}, Unicode {unicodedata.unidata_version}, {platform.machine()}",
        *(f"{each} {installed_version(each)}" for each in (name, reference)),
    ):
        digest.update(part.encode() + b"\n")
    for file in ID_FILES:
        if (directory / file).is_file():
            digest.update(file.encode() + (directory / file).read_bytes())
    return digest.hexdigest()[:40]


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "zerolm" / "encoders"
