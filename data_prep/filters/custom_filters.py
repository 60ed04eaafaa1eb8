"""Custom filters: our own filters, and thin wrappers around datatrove's classes.

A filter is built from its parameters in the recipe, called with a datatrove document, and returns
what datatrove's filters return: True, False, or (False, reason). To add a filter, write a class and
list it in `CUSTOM`. The recipe is checked against the names, types and defaults of the
constructor's parameters. To check values, add a static method `problems(parameters)` that yields a
line for each invalid value.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_prep.filters.score_filters import FastText, Score
from zerolm.common.errors import ConfigError, ZerolmError

Json = dict[str, Any]


class Length:
    """Limits the number of characters and the number of words separated by spaces."""

    def __init__(
        self,
        min_characters: int | None = None,
        max_characters: int | None = None,
        min_words: int | None = None,
        max_words: int | None = None,
    ):
        self.limits = min_characters, max_characters, min_words, max_words

    @staticmethod
    def problems(parameters: Json) -> Iterator[str]:
        for key, value in parameters.items():
            if value is not None and (not isinstance(value, int) or value < 0):
                yield f"{key}: {value!r} is not a whole number of at least 0."

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        min_characters, max_characters, min_words, max_words = self.limits
        characters = len(document.text)
        if min_characters is not None and characters < min_characters:
            return False, "too_few_characters"
        if max_characters is not None and characters > max_characters:
            return False, "too_many_characters"
        if min_words is not None or max_words is not None:
            words = len(document.text.split())
            if min_words is not None and words < min_words:
                return False, "too_few_words"
            if max_words is not None and words > max_words:
                return False, "too_many_words"
        return True


class Pii:
    """Datatrove's replacement of e-mail and IP addresses, restarted for each document.

    By default, datatrove cycles through its replacements across all documents of a task, so a
    document's text would depend on the task's other documents.
    """

    def __init__(self, **parameters: Any):
        from datatrove.pipeline.formatters.pii import PIIFormatter

        self.formatter = PIIFormatter(**as_tuples(parameters))

    def __call__(self, document: Any) -> bool:
        self.formatter.emails_replacer._replace_i = self.formatter.ip_replacer._replace_i = 0
        document.text = self.formatter.format(document.text)
        return True


class Url:
    """Datatrove's URL filter, with the public suffix list that is included in `tldextract`.

    By default, each process would download the list. Results would then depend on the date, and
    without a network datatrove would wait and print a traceback.
    """

    def __init__(self, **parameters: Any):
        from datatrove.pipeline.filters.url_filter import URLFilter
        from tldextract import TLDExtract

        self.step = URLFilter(**as_tuples(parameters))
        self.step.tldextractor = TLDExtract(suffix_list_urls=())

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        url = document.metadata.get("url")
        if not url:
            return False, "no_url"
        if not isinstance(url, str):
            return False, "not_a_url"
        try:
            return self.step.filter(document)
        except ValueError:  # raised by tldextract and the libraries that it uses
            return False, "not_a_url"


class Language:
    """Datatrove's language filter, with a local model file instead of a download."""

    def __init__(self, model: str, **parameters: Any):
        from datatrove.pipeline.filters.language_filter import LanguageFilter
        from fasttext.FastText import _FastText

        self.step = LanguageFilter(**parameters)
        try:
            self.step.model._model = _FastText(model)
        except ValueError as error:
            raise ConfigError(f"filters: language: model: {model}: {error}") from error

    @staticmethod
    def problems(parameters: Json) -> Iterator[str]:
        if (model := parameters.get("model")) is None:
            yield (
                "needs `model`, the path of a fastText model file such as lid.176.bin from "
                "fasttext.cc/docs/en/language-identification.html. Nothing is downloaded."
            )
        elif not Path(model).is_file():
            yield f"model: {model}: no such file. Check the path."

    def __call__(self, document: Any) -> Any:
        return self.step.filter(document)


class UserFilter:
    """Calls a user function: `function(text, record, **options)` returns what a filter returns."""

    def __init__(self, function: str, options: Json | None = None):
        self.path, self.options = function, options or {}
        self.function = load_function(function)

    @staticmethod
    def problems(parameters: Json) -> Iterator[str]:
        path, options = parameters.get("function"), parameters.get("options")
        if not isinstance(path, str) or path.count(":") != 1:
            yield f"function: {path!r} is not of the form module:function."
        else:
            try:
                load_function(path)
            except ConfigError as error:
                yield from (f"function: {problem}" for problem in error.problems)
        if not isinstance(options, dict | None):
            yield f"options: {options!r} is not an object."

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        try:
            result = self.function(document.text, document.metadata, **self.options)
        except Exception as error:
            raise ZerolmError(
                f"{self.path}: raised {type(error).__name__}: {error}, at document {document.id}. "
                "Correct the function; the same command then resumes."
            ) from error
        kept, reason = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
        if not isinstance(kept, bool) or not isinstance(reason, str):
            raise ZerolmError(
                f"{self.path}: returned {result!r} at document {document.id}; it must return "
                "True, False, or (False, reason)."
            )
        return kept, reason


CUSTOM: dict[str, Callable[..., Callable[[Any], Any]]] = {
    "length": Length,
    "pii": Pii,
    "url": Url,
    "language": Language,
    "python": UserFilter,
    "fasttext": FastText,
    "score": Score,
}


def as_tuples(parameters: Json) -> Json:
    """Convert all lists in parameters to tuples, including nested lists, as datatrove expects."""
    return {
        key: tuple(tuple(each) if isinstance(each, list) else each for each in value)
        if isinstance(value, list)
        else value
        for key, value in parameters.items()
    }


def load_function(path: str) -> Callable[..., Any]:
    """Import `module:function`.

    Raises:
        ConfigError: the function does not exist.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise any exception
        raise ConfigError(
            f"{path} cannot be imported ({type(error).__name__}: {error}). Check the name, and "
            f"that its directory is on PYTHONPATH."
        ) from error
    if not callable(function):
        raise ConfigError(f"{path} is a {type(function).__name__}, not a function.")
    return function
