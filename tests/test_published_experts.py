"""`benchmarks.published_experts` writes its page, and plans its rows as published."""

import re

import pytest

from benchmarks import published_experts
from benchmarks.published_experts import MODELS, ROWS, config_of, plan, rate
from tests import ROOT
from zerolm.model.model import Model

PARAMETERS = {"Qwen3-30B-A3B": 30.5e9, "GPT-OSS 20B": 20.9e9, "Nemotron 3 Nano 30B-A3B": 31.6e9}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name):
    found = Model.from_config(config_of(MODELS[name]), name).num_parameters
    assert found == pytest.approx(PARAMETERS[name], rel=0.005)


def test_the_modules_of_transformers_are_predicted_within_a_quarter():
    """Of Qwen3; nothing was fitted to it."""
    row = next(each for each in ROWS if each.degree == 1 and "Qwen3" in each.model)
    model = Model.from_config(config_of(MODELS[row.model]), row.model)
    assert rate(plan(row, model)) == pytest.approx(row.rates[0], rel=0.25)


@pytest.mark.soak
def test_the_page_of_results_is_what_the_command_prints():
    """But for the last digits of figures, which other versions of transformers may move."""
    compare_with_page("published_experts.md", published_experts.document())


def compare_with_page(name: str, printed: str) -> None:
    written = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    texts = written, printed
    words, others = (re.sub(r"[\d,.]+", "N", text) for text in texts)
    assert words == others
    figures, theirs = (
        [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?(?=\D)", text)]
        for text in texts
    )
    assert figures == pytest.approx(theirs, rel=0.05, abs=1)
