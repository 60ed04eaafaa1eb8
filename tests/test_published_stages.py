"""`benchmarks.published_stages` writes its page, and plans its rows as published."""

import pytest

from benchmarks import published_stages
from benchmarks.published_stages import MODELS, ROWS, model_of, plan, rate
from launch.estimate.estimate import device_memory
from tests.test_published_experts import compare_with_page

PARAMETERS = {
    "GPT 1.5B": 1.5e9, "GPT 6.2B": 6.2e9, "GPT 14.6B": 14.6e9, "GPT 28.3B": 28.3e9,
    "Llama 2 13B": 13.0e9,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name):
    assert model_of(name).num_parameters == pytest.approx(PARAMETERS[name], rel=0.02)


@pytest.mark.parametrize("place", [0, 8, 11, 20])
def test_throughput_and_memory_of_stages_are_predicted(place):
    """Of Megatron-LM's 1F1B on 8 to 32 A100; nothing was fitted to it."""
    row = ROWS[place]
    assert sum(row.layers) == model_of(row.model).config.get_text_config().num_hidden_layers
    assert rate(row) == pytest.approx(row.rate, rel=0.05)
    assert device_memory(plan(row)).used == pytest.approx(row.memory, rel=0.15)


@pytest.mark.soak
def test_the_page_of_results_is_what_the_command_prints():
    """But for the last digits of figures, which other versions of transformers may move."""
    compare_with_page("published_stages.md", published_stages.document())
