"""Filters that store scores in documents, and a filter that drops documents based on a number.

Scores are numbers that a document stores in its object `scores`. A first pass can run the models,
and later passes can apply different thresholds without running the models again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from data_prep.files.parse import find_text
from zerolm.common.errors import ConfigError

SCORES = "scores"  # the document key that contains scores
PREFIX = "__label__"

Json = dict[str, Any]


class FastText:
    """Datatrove's fastText filter with a local model file; it also stores the scores of all labels.

    Args:
        name: prefix of the scores' keys, as in `scores["NAME.LABEL"]`; by default the name of the
            model file.
    """

    def __init__(self, model: str, name: str = "", **parameters: Any):
        from datatrove.pipeline.filters.fasttext_filter import FastTextClassifierFilter
        from fasttext.FastText import _FastText

        for key in ("keep_labels", "remove_labels"):
            parameters[key] = [(label, low) for label, low in parameters.get(key) or ()] or None
        self.step = FastTextClassifierFilter(model_url=model, **parameters)
        self.name = name or Path(model).stem.replace(".", "_")
        try:
            self.step._model = _FastText(model)
        except ValueError as error:
            raise ConfigError(f"filters: fasttext: model: {model}: {error}") from error
        known = [label.removeprefix(PREFIX) for label in self.step._model.labels]
        asked = [*(parameters["keep_labels"] or ()), *(parameters["remove_labels"] or ())]
        if unknown := [label for label, _ in asked if label not in known]:
            raise ConfigError(
                f"filters: fasttext: {model} has no label {', '.join(unknown)}. It has "
                f"{', '.join(known[:20])}{', ...' if len(known) > 20 else ''}."
            )

    @staticmethod
    def problems(parameters: Json) -> Iterator[str]:
        if (model := parameters.get("model")) is None:
            yield "needs `model`, the path of a fastText model file."
        elif not Path(model).is_file():
            yield f"model: {model}: no such file. Check the path."
        if parameters.get("keep_labels") and parameters.get("remove_labels"):
            yield "keep_labels: cannot be combined with remove_labels. Use two filters."
        for key in ("keep_labels", "remove_labels"):
            pairs = parameters.get(key) or []
            if not all(_is_label(pair) for pair in pairs):
                yield f"{key}: {pairs!r} is not a list of [label, threshold from 0 to 1] pairs."
        if parameters.get("filter_mode", "DOCUMENT") not in ("DOCUMENT", "PARAGRAPH", "SENTENCE"):
            yield "filter_mode: is not DOCUMENT, PARAGRAPH or SENTENCE."

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        before = document.text
        is_kept = self.step.filter(document)
        found = {key: value for key, value in document.metadata.items() if key.startswith(PREFIX)}
        for key in found:
            del document.metadata[key]
        scores = {f"{self.name}.{key.removeprefix(PREFIX)}": value for key, value in found.items()}
        # Create a new object, so that the original record is not changed.
        document.metadata[SCORES] = {**(document.metadata.get(SCORES) or {}), **scores}
        if is_kept:
            return True
        document.text = before  # a dropped document is listed with its original text
        return False, self.name


def _is_label(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], int | float)
        and 0 <= pair[1] <= 1
    )


class Score:
    """Drops documents based on a number that the input contains or an earlier stage has added."""

    def __init__(
        self,
        key: str,
        min: float | None = None,  # names as in the recipe
        max: float | None = None,
        missing: str = "drop",
    ):
        self.key, self.min, self.max, self.missing = key, min, max, missing

    @staticmethod
    def problems(parameters: Json) -> Iterator[str]:
        if not isinstance(parameters.get("key"), str):
            yield "needs `key`, the path of a number such as scores.quality.hq."
        low, high = parameters.get("min"), parameters.get("max")
        for key, limit in (("min", low), ("max", high)):
            if limit is not None and not _is_number(limit):
                yield f"{key}: {limit!r} is not a number."
        if low is None and high is None:
            yield "needs `min` or `max`."
        elif _is_number(low) and _is_number(high) and low > high:
            yield f"min: {low} is above max, {high}."
        if parameters.get("missing", "drop") not in ("drop", "keep"):
            yield f"missing: {parameters['missing']!r} is not drop or keep."

    def __call__(self, document: Any) -> bool | tuple[bool, str]:
        _, value = find_text(document.metadata, self.key)
        if not _is_number(value):
            return self.missing == "keep" or (False, f"{self.key}.missing")
        if self.min is not None and not value >= self.min:  # also NaN
            return False, f"{self.key}.too_low"
        if self.max is not None and not value <= self.max:
            return False, f"{self.key}.too_high"
        return True


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
