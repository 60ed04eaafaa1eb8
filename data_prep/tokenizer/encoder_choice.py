"""Which backend encodes: the fastest that is proven to give the reference's ids.

`choose_backend` runs once, in the process that starts the others. A proof takes seconds and is kept
(data_prep/equality.py makes it).
"""

import dataclasses
import hashlib
import json
import os
import platform
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.backends import (
    BACKENDS,
    FAST_BACKENDS,
    ID_FILES,
    BackendFailed,
    BackendRefused,
    installed_version,
    open_backend,
    reference_backend,
)
from data_prep.equality import PROOF_VERSION, Proof, prove
from data_prep.tokenizer_files import special_tokens, spellings
from zerolm.errors import ConfigError, did_you_mean
from zerolm.files import write_json

# Below this, encoding by `tokenizers` takes less time than the proof: 4.3 CPU seconds, in which
# that encodes 10 MB (a vocabulary of 32,000, 2 cores of an Intel Xeon, 2026-11-21, `zerolm, first
# run` of `python -m benchmarks.tokenize_speed`).
PROOF_BYTES = 10 << 20


@dataclass(frozen=True)
class Choice:
    """Which backend encodes; picklable and small, made once and sent to the workers."""

    backend: str  # one of backends.BACKENDS
    reference: str  # the backend whose ids are right by definition
    version: str | None = None
    proven: tuple[tuple[int, int], ...] = ()  # ranges [start, stop) of code points
    notes: tuple[str, ...] = ()  # for people: why others are not used

    def record(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        return {
            "backend": self.backend,
            "version": self.version,
            "reference": self.reference,
            "proven_code_points": sum(stop - start for start, stop in self.proven),
        }


def choose_backend(
    directory: Path, backend: str = "auto", input_bytes: int | None = None
) -> Choice:
    """Choose the backend for a tokenizer's copy; seconds, where equality has to be proven first.

    Args:
        backend: one of `backends.BACKENDS`, or "auto" for the fastest that is proven.
        input_bytes: of what is to be encoded; a proof that costs more than it saves is left out.

    Raises:
        ConfigError: a backend asked for by name that cannot be used.
    """
    reference = reference_backend(directory)
    if backend not in ("auto", *BACKENDS):
        raise ConfigError(
            f"--encoder {backend}: is not one of auto, {', '.join(BACKENDS)}."
            f"{did_you_mean(backend, BACKENDS)}"
        )
    names: tuple[str, ...] = (backend,)
    if backend == "auto":
        names = FAST_BACKENDS if reference != "transformers" else ()
    small = backend == "auto" and input_bytes is not None and input_bytes < PROOF_BYTES
    notes = []
    for name in names:
        if name == reference:
            break
        try:
            proof = _proof(directory, name, reference, only_known=small)
        except (BackendRefused, BackendFailed) as refusal:
            notes.append(f"{name} {refusal}")
            continue
        if proof is None:  # and the input is too small to make one
            continue
        if proof.refused:
            notes.append(f"{name} {proof.refused}")
        else:
            return Choice(name, reference, installed_version(name), proof.proven, tuple(notes))
    if backend not in ("auto", reference):
        raise ConfigError(
            f"--encoder {backend}: cannot be used for this tokenizer: {notes[0]}. "
            f"Use --encoder auto or --encoder {reference}."
        )
    return Choice(reference, reference, installed_version(reference), (), tuple(notes))


def _proof(directory: Path, name: str, reference: str, only_known: bool) -> Proof | None:
    """Return the proof for a backend: a known one, or a new one unless `only_known`."""
    path = _cache_directory() / f"{_key(directory, name, reference)}.json"
    known = _read_proof(path)
    if known is None and only_known:
        return None
    candidate = open_backend(name, directory)  # also where it is known: it has to be there
    if known is not None:
        return known
    texts = dict.fromkeys([*special_tokens(directory), *spellings(directory).values()])
    proof = prove(open_backend(reference, directory), candidate, [*filter(None, texts)])
    with suppress(OSError):  # a home that cannot be written: the next run proves it again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dataclasses.asdict(proof))
    return proof


def _read_proof(path: Path) -> Proof | None:
    try:
        content = json.loads(path.read_bytes())
        proven = tuple((int(start), int(stop)) for start, stop in content.pop("proven"))
        return Proof(proven=proven, **content)
    except (OSError, ValueError, KeyError, TypeError):  # none, or another version's
        return None


def _key(directory: Path, name: str, reference: str) -> str:
    """Return a digest of everything that a proof depends on."""
    digest = hashlib.sha256()
    for part in (
        f"proof {PROOF_VERSION}, Unicode {unicodedata.unidata_version}, {platform.machine()}",
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
