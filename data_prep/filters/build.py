"""Builds the filters of a recipe, and applies them to documents.

The filters are datatrove's own code, except that `fast_words` replaces its word splitting and
returns the same words.
"""

import platform
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.filters import fast_words
from data_prep.filters.custom_filters import CUSTOM, as_tuples, load_function
from data_prep.filters.parameters import (
    DATATROVE,
    datatrove_class,
    filter_parameters,
    missing_package,
    parameters_of,
)
from data_prep.stages.line_ends import with_line_feeds
from zerolm.common.errors import ConfigError
from zerolm.common.files import sha256_file
from zerolm.common.provenance import installed_version

# Packages whose versions change what datatrove's filters keep: for all languages, the splitting of
# words and sentences; and of single filters.
WORDS = (
    "datatrove", "spacy", "regex", "numpy", "nltk", "stanza", "pyvi", "pythainlp", "jieba",
    "indic-nlp-library", "kiwipiepy", "urduhack", "khmer-nltk", "laonlp", "botok",
    "pyidaungsu-numpy2", "sudachipy", "sudachidict-core",
)  # fmt: skip
FASTTEXT = ("fasttext-numpy2-wheel", "fasttext-wheel", "fasttext")
PACKAGES = {
    "url": ("tldextract", "pyahocorasick", "idna"),
    "language": FASTTEXT,
    "fasttext": FASTTEXT,
}

Json = dict[str, Any]


class FilterResult(NamedTuple):
    """What the filters decided about a document."""

    kept: bool
    reason: str  # "gopher_quality.gopher_short_doc"; empty for a kept document
    text: str  # text after all filters, or before the filter that dropped the document
    changed: tuple[str, ...]  # names of the filters that changed the text
    added: Json  # keys that filters added, such as the language; also set for dropped documents


@dataclass
class Filters:
    """The filters of a recipe, in order, built once per process."""

    steps: list[tuple[str, Callable[[Any], Any]]] = field(default_factory=list)  # by name

    def apply(self, text: str, document_id: str, record: Json) -> FilterResult:
        """Pass a document through the filters until one of them drops it.

        Line ends are converted to LF for the filters; a text that no filter changes keeps its
        original line ends.

        Args:
            record: the document's keys and values, except its text and id.
        """
        if not self.steps:  # without datatrove
            return FilterResult(True, "", text, (), {})
        from datatrove.data import Document

        judged = with_line_feeds(text)
        original = lambda changed: text if changed == judged else changed  # noqa: E731
        document = Document(text=judged, id=document_id, metadata=dict(record))
        changed: list[str] = []
        for name, step in self.steps:
            before = document.text
            try:
                result = step(document)
            except ZeroDivisionError:  # datatrove divides by the number of words or lines
                result = False, "nothing_to_count"
            kept, reason = result if isinstance(result, tuple) else (result, None)
            if not kept:
                reason = f"{name}.{reason}" if reason else name
                added = _added(document.metadata, record)
                return FilterResult(False, reason, original(before), tuple(changed), added)
            if document.text != before:
                changed.append(name)
        added = _added(document.metadata, record)
        return FilterResult(True, "", original(document.text), tuple(changed), added)


def _added(metadata: Json, record: Json) -> Json:
    """Return the metadata keys, with their values, that filters have added or changed."""
    return {
        key: value
        for key, value in metadata.items()
        if key not in record or record[key] is not value
    }


def build_filters(specifications: Sequence[Json]) -> Filters:
    """Build the filters of a recipe that `filter_problems` has checked."""
    filters = Filters()
    for specification in specifications:
        name = specification["filter"]
        try:
            step = _build_filter(name, parameters_of(specification))
            filters.steps.append((name, step))
        except ImportError as error:
            raise ConfigError(missing_package("filters", name, error)) from error
    return filters


def _build_filter(name: str, parameters: Json) -> Callable[[Any], Any]:
    if name in CUSTOM:
        return CUSTOM[name](**parameters)
    parameter = filter_parameters(name).get("language")
    language = parameters.get("language", parameter.default if parameter else None)
    if isinstance(language, str):
        fast_words.install(language)
    return datatrove_class(name)(**as_tuples(parameters)).filter


def filters_identity(specifications: Sequence[Json]) -> Json:
    """Return what determines the filters' results besides their parameters, to be fingerprinted.

    This covers package versions, Python's Unicode tables and, for `pii`, Python itself (its
    `ipaddress` says which addresses are public); a hash of each user function's module (but not of
    the modules that this module imports); and the sizes and modification times of model files.
    """
    identity: Json = {}
    for specification in specifications:
        name = specification["filter"]
        if name == "python":
            load_function(specification["function"])
            module = specification["function"].partition(":")[0]
            path = getattr(sys.modules[module], "__file__", None)
            identity[module] = sha256_file(Path(path)) if path else None
        elif name in DATATROVE:
            for package in (*WORDS, *PACKAGES.get(name, ())):
                if (version := installed_version(package)) is not None:
                    identity[package] = version
            identity["unicode"] = unicodedata.unidata_version
            if name == "pii":
                identity["python"] = platform.python_version()
        if "model" in specification:
            status = Path(specification["model"]).stat()
            identity[specification["model"]] = [status.st_size, status.st_mtime_ns]
    return identity
