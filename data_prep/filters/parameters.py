"""Parameters of the filters in a recipe: names, defaults and checks.

A filter is an object such as `{"filter": "gopher_quality", "min_doc_words": 50}`. The other keys
are the parameters of datatrove's class, or of a filter in `CUSTOM`, with the same names and
defaults.
"""

import importlib
import inspect
import math
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from data_prep.filters.custom_filters import CUSTOM
from zerolm.common.errors import did_you_mean

DATATROVE = {  # name: module and class in datatrove.pipeline; only filters that require no network
    "gopher_quality": "filters.gopher_quality_filter:GopherQualityFilter",
    "gopher_repetition": "filters.gopher_repetition_filter:GopherRepetitionFilter",
    "c4_quality": "filters.c4_filters:C4QualityFilter",
    "c4_paragraphs": "filters.c4_filters:C4ParagraphFilter",
    "fineweb_quality": "filters.fineweb_quality_filter:FineWebQualityFilter",
    "language": "filters.language_filter:LanguageFilter",
    "fasttext": "filters.fasttext_filter:FastTextClassifierFilter",
    "url": "filters.url_filter:URLFilter",
    "pii": "formatters.pii:PIIFormatter",
}
OURS = ("exclusion_writer", "model_url", "save_labels_in_metadata")  # set by wrappers
NAMES = tuple(dict.fromkeys([*DATATROVE, *CUSTOM]))

Json = dict[str, Any]


def filter_problems(specifications: Any, where: str) -> list[str]:
    """Return the problems with a recipe's `filters`, without loading models."""
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
                f"Known: {', '.join(NAMES)}."
            )
            continue
        try:
            problems += _parameter_problems(name, parameters_of(specification), f"{place} ({name})")
        except ImportError as error:
            problems.append(missing_package(place, name, error))
    return problems


def resolve_model_paths(directory: Path, specifications: Any) -> Any:
    """Return the filters with model paths resolved relative to the recipe's directory."""
    if not isinstance(specifications, list):
        return specifications
    return [
        {**each, "model": str(directory / each["model"])}
        if isinstance(each, dict) and isinstance(each.get("model"), str)
        else each
        for each in specifications
    ]


def parameters_of(specification: Json) -> Json:
    """Return the parameters of a filter: all keys except its name."""
    return {key: value for key, value in specification.items() if key != "filter"}


def datatrove_class(name: str) -> Any:
    """Return a filter's datatrove class, whose constructor takes the filter's parameters."""
    module, attribute = DATATROVE[name].split(":")
    return getattr(importlib.import_module(f"datatrove.pipeline.{module}"), attribute)


def filter_parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return a filter's parameters: those of datatrove's class and of its wrapper in `CUSTOM`."""
    constructors = [datatrove_class(name)] if name in DATATROVE else []
    constructors += [CUSTOM[name]] if name in CUSTOM else []
    return {
        key: parameter
        for constructor in constructors
        for key, parameter in inspect.signature(constructor).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and key not in OURS
    }


def _parameter_problems(name: str, parameters: Json, place: str) -> list[str]:
    """Return the problems with a filter's parameters: unknown names, wrong types, bad values."""
    known = filter_parameters(name)
    problems = []
    for key, value in parameters.items():
        if key not in known:
            problems.append(
                f"{place}: {key!r} is not a parameter of the filter."
                f"{did_you_mean(key, known)} Known: {', '.join(known) or 'none'}."
            )
        elif expected := _expected_type(value, known[key]):
            problems.append(f"{place}: {key}: {value!r} has the wrong type; {expected}.")
    if problems:
        return problems
    value_problems = getattr(CUSTOM.get(name), "problems", lambda parameters: ())
    problems += [f"{place}: {problem}" for problem in value_problems(parameters)]
    if not problems:
        problems += [
            f"{place}: needs `{key}`."
            for key, parameter in known.items()
            if parameter.default is parameter.empty and key not in parameters
        ]
    if "language" in parameters:
        problems += _language_problems(parameters["language"], place)
    return problems


def _expected_type(value: Any, parameter: inspect.Parameter) -> str:
    """Return the type that a value should have; empty if its type is right or any is allowed."""
    default = parameter.default
    if default is parameter.empty:
        kind = get_origin(parameter.annotation) or parameter.annotation
        fits = not isinstance(kind, type) or isinstance(value, kind)
        return "" if fits else f"it is of type {kind.__name__}"
    if default is None or (value is None and type(None) in get_args(parameter.annotation)):
        return ""
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, int | float):
        fits = isinstance(value, int | float) and math.isfinite(value)
    elif isinstance(default, tuple | list):
        fits = isinstance(value, list | str)
    else:
        fits = isinstance(value, type(default))
    return "" if fits else f"the default is {default!r}"


def _language_problems(language: Any, place: str) -> list[str]:
    """Return a problem if datatrove has no word tokenizer for a language."""
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    try:
        load_word_tokenizer(language)
    except ValueError:
        return [
            f"{place}: language: {language!r} has no word tokenizer in datatrove. "
            f"Use a code such as 'en' or 'fra'."
        ]
    return []


def missing_package(place: str, name: str, error: ImportError) -> str:
    """Return the error message for a filter whose package is not installed."""
    fix = "Install the extra: bash launch/setup.sh pipeline."
    if "fasttext" in str(error) and sys.version_info >= (3, 13):
        fix = "fastText has no package for this Python version: use Python 3.12, or another filter."
    return f"{place}: filter {name}: {error}. {fix}"
