import pytest

from data_prep.filters.parameters import filter_problems

pytest.importorskip("datatrove")
pytest.importorskip("spacy")


def test_every_problem_with_filters_is_reported_at_once():
    wrong = [
        {"filter": "gopher_qualty"},
        {"filter": "gopher_quality", "min_doc_word": 3},
        {"filter": "fineweb_quality", "line_punct_thr": "high"},
        {"filter": "fineweb_quality", "language": "xx"},
        {"filter": "length", "min_words": -1},
        {"filter": "python", "function": "nowhere:f"},
        {"filter": "language"},
        "pii",
    ]
    problems = filter_problems(wrong, "r.json: clean.filters")
    assert len(problems) == len(wrong)
    text = "\n".join(problems)
    assert 'Did you mean "gopher_quality"?' in text
    assert 'Did you mean "min_doc_words"?' in text
    assert "r.json: clean.filters[6] (language): needs `model`" in text
