"""Parameters of the filters in a recipe: names, defaults and checks.

A filter is an object such as `{"filter": "gopher_quality", "min_doc_words": 50}`. Its other keys
are the parameters of datatrove's class, or of a filter in `CUSTOM`, with their names and defaults.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

from data_prep.filters.custom_filters import CUSTOM, load_function
from zerolm.common.errors import ConfigError, did_you_mean

DATATROVE = {  # name: module and class in datatrove.pipeline; only filters that need no network
    "gopher_quality": "filters.gopher_quality_filter:GopherQualityFilter",
    "gopher_repetition": "filters.gopher_repetition_filter:GopherRepetitionFilter",
    "c4_quality": "filters.c4_filters:C4QualityFilter",
    "c4_paragraphs": "filters.c4_filters:C4ParagraphFilter",
    "fineweb_quality": "filters.fineweb_quality_filter:FineWebQualityFilter",
    "language": "filters.language_filter:LanguageFilter",
    "url": "filters.url_filter:URLFilter",
    "pii": "formatters.pii:PIIFormatter",
}
NAMES = tuple(dict.fromkeys([*DATATROVE, *CUSTOM]))

Json = dict[str, Any]


def filter_problems(specifications: Any, where: str) -> list[str]:
    """Return the problems of the `filters` of a recipe, without loading models.

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
                f"Known: {', '.join(NAMES)}."
            )
            continue
        try:
            problems += _parameter_problems(name, parameters_of(specification), f"{place} ({name})")
        except ImportError as error:
            problems.append(missing_package(place, name, error))
    return problems


def resolve_model_paths(directory: Path, specifications: Any) -> Any:
    """Return the filters with the paths of their models resolved against the recipe's directory.

    Args:
        directory: of the recipe.
    """
    if not isinstance(specifications, list):
        return specifications
    return [
        {**each, "model": str(directory / each["model"])}
        if isinstance(each, dict) and isinstance(each.get("model"), str)
        else each
        for each in specifications
    ]


def parameters_of(specification: Json) -> Json:
    """Return the parameters of a filter: all keys but its name."""
    return {key: value for key, value in specification.items() if key != "filter"}


def datatrove_class(name: str) -> Any:
    """Return the datatrove class of a filter; its constructor takes the filter's parameters."""
    module, attribute = DATATROVE[name].split(":")
    return getattr(importlib.import_module(f"datatrove.pipeline.{module}"), attribute)


def parameter_defaults(name: str) -> dict[str, Any]:
    """Return the names and defaults of a filter's parameters."""
    if name == "python":
        return {"function": "", "options": {}}
    constructor = datatrove_class(name) if name in DATATROVE else CUSTOM[name]
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(constructor).parameters.items()
        if key != "exclusion_writer"
    }
    if name == "language":
        defaults["model"] = ""  # a file; datatrove would download one
    return defaults


def _parameter_problems(name: str, parameters: Json, place: str) -> list[str]:
    defaults = parameter_defaults(name)
    problems = []
    for key, value in parameters.items():
        if key not in defaults:
            problems.append(
                f"{place}: {key!r} is not a parameter of the filter."
                f"{did_you_mean(key, defaults)} Known: {', '.join(defaults) or 'none'}."
            )
        elif not _has_type_of(value, defaults[key]):
            problems.append(
                f"{place}: {key}: {value!r} has the wrong type; the default is {defaults[key]!r}."
            )
    if name == "length":
        problems += [
            f"{place}: {key}: {value!r} is not a whole number of at least 0."
            for key, value in parameters.items()
            if key in defaults and not (isinstance(value, int) and value >= 0)
        ]
    if name == "language":
        problems += _model_problems(parameters, place)
    if name == "python":
        problems += _function_problems(parameters, place)
    if "language" in parameters and "language" in defaults:
        problems += _language_problems(parameters["language"], place)
    return problems


def _has_type_of(value: Any, default: Any) -> bool:
    """Return whether a value has the type of a default; anything fits where the default is None."""
    if default is None or value is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, int | float):
        return isinstance(value, int | float)
    if isinstance(default, tuple | list):
        return isinstance(value, list | str)
    return isinstance(value, type(default))


def _model_problems(parameters: Json, place: str) -> list[str]:
    model = parameters.get("model")
    if not isinstance(model, str):
        return [
            f"{place}: needs `model`, the path of a fastText model file such as lid.176.bin from "
            f"fasttext.cc/docs/en/language-identification.html. Nothing is downloaded."
        ]
    if not Path(model).is_file():
        return [f"{place}: model: {model}: no such file. Check the path."]
    return []


def _function_problems(parameters: Json, place: str) -> list[str]:
    path = parameters.get("function")
    if not isinstance(path, str) or path.count(":") != 1:
        return [f"{place}: function: {path!r} is not of the form module:function."]
    try:
        load_function(path)
    except ConfigError as error:
        return [f"{place}: function: {problem}" for problem in error.problems]
    return []


def _language_problems(language: Any, place: str) -> list[str]:
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
    """Return the message for a filter whose package is not installed."""
    return f"{place}: filter {name}: {error}. Install the extra: pip install 'zerolm[pipeline]'."
