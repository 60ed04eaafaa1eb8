"""Filters that are not a class of datatrove as it is: limits of length, and thin covers.

Each is called with a datatrove document, and gives a verdict as datatrove's filters do: true,
false, or (False, reason).
"""

import importlib
from collections.abc import Callable
from typing import Any

from zerolm.errors import ConfigError, ZerolmError

Json = dict[str, Any]


class Length:
    """Limits on characters, and on words between spaces."""

    def __init__(
        self,
        min_characters: int | None = None,
        max_characters: int | None = None,
        min_words: int | None = None,
        max_words: int | None = None,
    ):
        self.limits = min_characters, max_characters, min_words, max_words

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
    """Replaces e-mail and IP addresses; the replacements begin anew in each document.

    datatrove goes round its replacements over all documents of a task, so that a document's text
    would depend on which others are in its task.
    """

    def __init__(self, given: Json):
        from datatrove.pipeline.formatters.pii import PIIFormatter

        self.formatter = PIIFormatter(**given)

    def __call__(self, document: Any) -> bool:
        self.formatter.emails_replacer._replace_i = self.formatter.ip_replacer._replace_i = 0
        document.text = self.formatter.format(document.text)
        return True


class Url:
    """datatrove's URL filter, which needs a URL; the list of public suffixes is the package's own.

    datatrove's would be downloaded by each process: other verdicts on another day, and without a
    network a wait and a traceback on standard error.
    """

    def __init__(self, step: Any):
        from tldextract import TLDExtract

        self.step = step
        self.step.tldextractor = TLDExtract(suffix_list_urls=())

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        url = document.metadata.get("url")
        if not url:
            return False, "no_url"
        if not isinstance(url, str):
            return False, "not_a_url"
        try:
            return self.step.filter(document)
        except ValueError:  # of tldextract and what it is made of
            return False, "not_a_url"


def load_language(given: Json) -> Callable[[Any], Any]:
    """Return datatrove's language filter with a model file instead of its download.

    Raises:
        ConfigError: the file is not a model.
    """
    from datatrove.pipeline.filters.language_filter import LanguageFilter
    from fasttext.FastText import _FastText

    given = dict(given)
    model = given.pop("model")
    if isinstance(given.get("languages"), tuple):
        given["languages"] = list(given["languages"])
    step = LanguageFilter(**given)
    try:
        step.model._model = _FastText(model)
    except ValueError as error:
        raise ConfigError(f"filters: language: model: {model}: {error}") from error
    return step.filter


class UserFilter:
    """A function of the user: `function(text, record, **options)` is a verdict as datatrove's."""

    def __init__(self, path: str, options: Json):
        self.path, self.options = path, options
        self.function = load_function(path)

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        try:
            result = self.function(document.text, document.metadata, **self.options)
        except Exception as error:
            raise ZerolmError(
                f"{self.path}: raised {type(error).__name__}: {error}, at document {document.id}. "
                f"Correct the function; the same command again goes on."
            ) from error
        kept, reason = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
        if not isinstance(kept, bool) or not isinstance(reason, str):
            raise ZerolmError(
                f"{self.path}: returned {result!r} at document {document.id}; it has to return "
                f"True, False, or (False, reason)."
            )
        return kept, reason


def load_function(path: str) -> Callable[..., Any]:
    """Import `module:function`.

    Raises:
        ConfigError: there is no such function.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise ConfigError(
            f"{path} cannot be imported ({type(error).__name__}: {error}). Check the name, and "
            f"that its directory is on PYTHONPATH."
        ) from error
    if not callable(function):
        raise ConfigError(f"{path} is a {type(function).__name__} and not a function.")
    return function
