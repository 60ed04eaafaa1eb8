"""What a step does with routers: counts on ranks, biases, and losses of the global batch."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end.test_expert_balance import DEEPSEEK, MIXTRAL
from zerolm.routers.routing import Routing


def model_of(values: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    values = dict(values)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values)
    )


def run_step(model, routing: Routing, step: int, ids, applied: bool) -> dict:
    """Do what a step does on two ranks that each have half of the sequences."""
    figures: dict[str, dict[str, torch.Tensor]] = {}
    for half in ids.chunk(2):
        routing.begin(step)
        with routing.observing():
            outputs = model(input_ids=half, use_cache=False)
        routing.observe(outputs)
        losses = routing.losses(ids.numel())
        for group, sums in routing.sums().items():
            before = figures.get(group, {})
            figures[group] = {name: before.get(name, 0) + each for name, each in sums.items()}
    row = routing.row(
        {
            group: {name: each.tolist() for name, each in sums.items()}
            for group, sums in figures.items()
        }
    )
    routing.end_step(applied)
    return row | {name: loss.item() for name, loss in losses.items()}


@pytest.mark.parametrize("values", [DEEPSEEK, MIXTRAL], ids=["bias", "global loss"])
def test_a_refused_step_changes_neither_biases_nor_loads(values) -> None:
    model = model_of(values)
    biased = values is DEEPSEEK
    routing = Routing(
        model, 1, balance_rate=0.01 if biased else 0.0, global_loss=not biased, z_loss=0.0
    )
    biases = [each for name, each in model.named_buffers() if "e_score" in name]
    ids = torch.randint(1, 500, (4, 16))
    run_step(model, routing, 1, ids, applied=True)
    before = copy.deepcopy((biases, routing.state))
    assert all(bias.abs().max() == torch.tensor(0.01) for bias in biases)
    assert bool(routing.state) != biased
    run_step(model, routing, 2, ids.flip(0) + 1, applied=False)
    assert routing.state == before[1] and all(map(torch.equal, biases, before[0]))
    run_step(model, routing, 3, ids.flip(0) + 1, applied=True)
    assert routing.state != before[1] if not biased else not torch.equal(biases[0], before[0][0])


def test_metrics_are_of_measured_steps_only_while_every_step_is_counted() -> None:
    model = model_of(DEEPSEEK)
    routing = Routing(model, 2, balance_rate=0.01)
    ids = torch.randint(1, 500, (4, 16))
    assert run_step(model, routing, 1, ids, applied=True) == {}
    row = run_step(model, routing, 2, ids, applied=True)
    assert {"router/load_imbalance", "router/load_imbalance/router.1"} <= row.keys()
    off = Routing(model_of(DEEPSEEK), 2)
    off.begin(1)
    assert off.sums() == {}


def test_a_resumed_router_loss_uses_the_loads_of_the_last_step() -> None:
    model, ids = model_of(MIXTRAL), torch.randint(1, 500, (4, 16))
    routing = Routing(model, 1, global_loss=True, z_loss=0.5)
    first = run_step(model, routing, 1, ids, applied=True)
    second = run_step(model, routing, 2, ids, applied=True)
    assert first["train/auxiliary_loss"] != second["train/auxiliary_loss"]
    resumed = Routing(model, 1, global_loss=True, z_loss=0.5)
    resumed.state = routing.state
    assert run_step(model, resumed, 3, ids, applied=True) == second
    assert [sum(load) for load in routing.state["loads"]] == [2 * ids.numel()] * 2
    outputs = model(input_ids=ids, use_cache=False)
    routing.observe(SimpleNamespace(router_logits=outputs.router_logits))
    squares = torch.stack(outputs.router_logits).logsumexp(-1) ** 2
    expected = 0.5 * squares.mean()
    torch.testing.assert_close(routing.losses(ids.numel())["train/router_z_loss"], expected)
