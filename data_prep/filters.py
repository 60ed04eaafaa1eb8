"""Filters of documents: datatrove's own classes under a strict schema, and functions of the user.

A filter is an object of a recipe: `{"filter": "gopher_quality", "min_doc_words": 50}`. Its other
keys are the parameters of datatrove's class, with the class's names and defaults. Verdicts are
datatrove's: its code decides here, and only its words come from `fast_words`, which are the same.
Optional extra `pipeline`.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import fast_words
from data_prep.filter_steps import Length, Pii, Url, UserFilter, load_function, load_language
from zerolm.errors import ConfigError, did_you_mean
from zerolm.files import sha256_file

DATATROVE = {  # name: module and class; those that can work without a network
    "gopher_quality": "gopher_quality_filter:GopherQualityFilter",
    "gopher_repetition": "gopher_repetition_filter:GopherRepetitionFilter",
    "c4_quality": "c4_filters:C4QualityFilter",
    "c4_paragraphs": "c4_filters:C4ParagraphFilter",
    "fineweb_quality": "fineweb_quality_filter:FineWebQualityFilter",
    "language": "language_filter:LanguageFilter",
    "url": "url_filter:URLFilter",
}
OWN = ("length", "pii", "python")
NAMES = (*DATATROVE, *OWN)
LENGTH_KEYS = ("min_characters", "max_characters", "min_words", "max_words")
PYTHON_KEYS = ("function", "options")

Json = dict[str, Any]


class Verdict(NamedTuple):
    """What the filters say of a document."""

    kept: bool
    reason: str  # "gopher_quality.gopher_short_doc"; empty for a kept document
    text: str  # of the kept document, as they have changed it
    changed: tuple[str, ...]  # the filters that changed it
    added: Json  # keys that they added, such as the language


@dataclass
class Filters:
    """The filters of a recipe, in order, made once in each process."""

    steps: list[tuple[str, Callable[[Any], Any]]] = field(default_factory=list)

    def judge(self, text: str, identity: str, record: Json) -> Verdict:
        """Pass a document through the filters, up to the first that drops it.

        Args:
            record: its other keys.
        """
        if not self.steps:  # which needs no datatrove
            return Verdict(True, "", text, (), {})
        from datatrove.data import Document

        document = Document(text=text, id=identity, metadata=dict(record))
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
                return Verdict(False, reason, before, tuple(changed), {})
            if document.text != before:
                changed.append(name)
        added = {
            key: value
            for key, value in document.metadata.items()
            if key not in record or record[key] is not value
        }
        return Verdict(True, "", document.text, tuple(changed), added)


def filter_problems(specifications: Any, where: str) -> list[str]:
    """Say what is wrong with the `filters` of a recipe, without loading models.

    Args:
        where: file and key, for messages.
    """
    if not isinstance(specifications, list):
        return [f"{where}: is not a list of filters, each an object with a `filter` key."]
    problems: list[str] = []
    for number, specification in enumerate(specifications):
        place = f"{where}[{number}]"
        if not isinstance(specification, dict) or "filter" not in specification:
            problems.append(f"{place}: is not an object with a `filter` key.")
            continue
        name = specification["filter"]
        if name not in NAMES:
            problems.append(
                f"{place}: {name!r} is not a filter.{did_you_mean(str(name), NAMES)} "
                f"There are {', '.join(NAMES)}."
            )
            continue
        given = {key: value for key, value in specification.items() if key != "filter"}
        try:
            problems += _parameter_problems(name, given, f"{place} ({name})")
        except ImportError as error:
            problems.append(_missing_package(place, name, error))
    return problems


def relative_to(directory: Path, specifications: Any) -> Any:
    """Return filters whose model files are those seen from a directory, that of the recipe."""
    if not isinstance(specifications, list):
        return specifications
    return [
        {**each, "model": str(directory / each["model"])}
        if isinstance(each, dict) and isinstance(each.get("model"), str)
        else each
        for each in specifications
    ]


def build(specifications: Sequence[Json]) -> Filters:
    """Make the filters of a recipe that `filter_problems` has nothing to say about.

    Raises:
        ConfigError: an optional package, a model or a function that is not there.
    """
    filters = Filters()
    for specification in specifications:
        name = specification["filter"]
        given = {key: value for key, value in specification.items() if key != "filter"}
        try:
            filters.steps.append((name, _build_one(name, given)))
        except ImportError as error:
            raise ConfigError(_missing_package("filters", name, error)) from error
    return filters


def _build_one(name: str, given: Json) -> Callable[[Any], Any]:
    if name == "length":
        return Length(**given)
    if name == "python":
        return UserFilter(given["function"], given.get("options", {}))
    language = given.get("language", _language_of(name))
    if language is not None:
        fast_words.install(language)
    given = {key: _tuples(value) for key, value in given.items()}
    if name == "pii":
        return Pii(given)
    if name == "language":
        return load_language(given)
    if name == "url":
        return Url(_class_of(name)(**given))
    return _class_of(name)(**given).filter


def _tuples(value: Any) -> Any:
    return (
        tuple(tuple(each) if isinstance(each, list) else each for each in value)
        if isinstance(value, list)
        else value
    )


def _class_of(name: str) -> Any:
    if name == "pii":
        module, attribute = "datatrove.pipeline.formatters.pii", "PIIFormatter"
    else:
        file, attribute = DATATROVE[name].split(":")
        module = f"datatrove.pipeline.filters.{file}"
    return getattr(importlib.import_module(module), attribute)


def _parameters(name: str) -> dict[str, Any]:
    """Return the names and defaults of a filter's parameters."""
    if name == "length":
        return dict.fromkeys(LENGTH_KEYS)
    if name == "python":
        return {"function": "", "options": {}}
    signature = inspect.signature(_class_of(name).__init__)
    found = {
        key: parameter.default
        for key, parameter in signature.parameters.items()
        if key not in ("self", "exclusion_writer")
    }
    if name == "language":
        found["model"] = ""  # a file, where datatrove would download one
    return found


def _language_of(name: str) -> str | None:
    """Return the language that a filter splits words in unless it is told another; or None."""
    default = _parameters(name).get("language") if name in DATATROVE else None
    return default if isinstance(default, str) else None


def _parameter_problems(name: str, given: Json, place: str) -> list[str]:
    known = _parameters(name)
    problems = []
    for key, value in given.items():
        if key not in known:
            problems.append(
                f"{place}: {key!r} is not a parameter of it.{did_you_mean(key, known)} "
                f"It has {', '.join(known) or 'none'}."
            )
        elif not _fits(value, known[key]):
            problems.append(
                f"{place}: {key}: {value!r} does not fit; the default is {known[key]!r}."
            )
    if name == "length":
        problems += [
            f"{place}: {key}: {value!r} is not a whole number from 0 up."
            for key, value in given.items()
            if key in known and not (isinstance(value, int) and value >= 0)
        ]
    if name == "language" and not isinstance(given.get("model"), str):
        problems.append(
            f"{place}: needs model, the path of a fastText model file such as lid.176.bin, which "
            f"fasttext.cc/docs/en/language-identification.html has. Nothing is downloaded."
        )
    elif name == "language" and not Path(given["model"]).is_file():
        problems.append(f"{place}: model: {given['model']}: no such file. Check the path.")
    if name == "python":
        problems += _function_problems(given, place)
    if "language" in given and name in DATATROVE:
        from datatrove.utils.word_tokenizers import load_word_tokenizer

        try:
            load_word_tokenizer(given["language"])
        except ValueError:
            problems.append(
                f"{place}: language: {given['language']!r} has no word tokenizer in datatrove. "
                f"Use a code such as 'en' or 'fra'."
            )
    return problems


def _fits(value: Any, default: Any) -> bool:
    """Say whether a value is of the kind of a default; where there is none, anything may fit."""
    if default is None or value is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, int | float):
        return isinstance(value, int | float)
    if isinstance(default, tuple | list):
        return isinstance(value, list | str)
    return isinstance(value, type(default))


def _function_problems(given: Json, place: str) -> list[str]:
    path = given.get("function")
    if not isinstance(path, str) or path.count(":") != 1:
        return [f"{place}: function: {path!r} is not of the form module:function."]
    try:
        load_function(path)
    except ConfigError as error:
        return [f"{place}: function: {problem}" for problem in error.problems]
    return []


def _missing_package(place: str, name: str, error: ImportError) -> str:
    return f"{place}: filter {name}: {error}. Install the extra: pip install 'zerolm[pipeline]'."


def identity(specifications: Sequence[Json]) -> Json:
    """Return, for a fingerprint, what filters are made of beside their parameters.

    That is the versions of the packages that decide, the modules of the user's functions (not what
    these import), and size and time of models.

    Raises:
        ConfigError: a function that is not there.
    """
    found: Json = {}
    for specification in specifications:
        name = specification["filter"]
        if name == "python":
            load_function(specification["function"])
            module = specification["function"].partition(":")[0]
            path = getattr(sys.modules[module], "__file__", None)
            found[module] = sha256_file(Path(path)) if path else None
        elif name != "length":
            for package in ("datatrove", "spacy", "tldextract")[: 3 if name == "url" else 2]:
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    found[package] = importlib.metadata.version(package)
        if name == "language":
            status = Path(specification["model"]).stat()
            found[specification["model"]] = [status.st_size, status.st_mtime_ns]
    return found
