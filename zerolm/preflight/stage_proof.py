"""Check on a small copy that cutting a model into pipeline stages changes no bit.

For `pipeline.stages`. The stages of a copy run one after another in this process, and get each
other's hidden states and gradients. The loss and the gradient of every parameter must have the bits
of a whole copy, so no list of model types is needed. `model_proof` must have found no problem.
"""

import copy
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import reason
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile, block
from zerolm.ds_config.topology import STAGES_KEY
from zerolm.model.architecture import ConfigKey
from zerolm.model.model import Model
from zerolm.preflight.model_proof import computable_copy, kernels, trial_tokens, was_proven
from zerolm.preflight.small_copy import with_depth
from zerolm.run_dir.records import find_run_json

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

STAGES = 3  # at most, so that one of them is neither first nor last
USE = "Use ZeRO-3 instead of the block"


def problems(model: Model, settings: Settings, profile: Profile, found: Any) -> list[str]:
    """Return why the model cannot be cut, unless the run's record says that it can."""
    if profile.stages == 1 or found.problems:
        return []
    if not settings.check and was_proven(model, settings) and began_in_stages(settings):
        return []
    from zerolm.preflight.observed_model import quiet  # imports torch

    with quiet():
        try:
            small, tokens = computable_copy(
                ConfigKey.of(model.config), trial_tokens(settings.seq_len)
            )
            wrong = differences(small, tokens, min(STAGES, profile.stages))
        except Exception as error:  # any class: a model's own code may not run cut
            text = f"a small copy cut into stages cannot be computed ({reason(error)})"
        else:
            if not wrong:
                return []
            names, worst = ", ".join([*wrong][:4]), max(wrong.values())
            text = f"cut into stages, {names} of a small copy differ by {worst:.1e}"
    where = f"{profile.name}: {STAGES_KEY}: {profile.stages}"
    return [f"{where}: {model.path}: {model.config.model_type}: {text}. {USE}."]


def began_in_stages(settings: Settings) -> bool:
    """Return whether the run's record says that it has pipeline stages, which were proven then."""
    record = (find_run_json(settings.run_dir) if settings.run_dir else None) or {}
    return Profile.parse(block(record, "ds_config")).stages > 1


def differences(config: "PretrainedConfig", tokens: int, stages: int = STAGES) -> dict[str, float]:
    """Return {parameter, or "loss": difference} of a cut from a whole model, where a bit differs,
    relative to the largest value; infinity for a parameter that no stage or several have.

    Args:
        tokens: in a row.
        stages: number of stages; a copy with fewer layers gets more.
    """
    import torch

    from zerolm.preflight.observed_model import build_with_large_weights

    config = deep_enough(config, stages)
    whole = build_with_large_weights(config, kernels(config)[0]).eval()
    batch = batch_of(whole, tokens)
    models = stages_of(whole, stages)
    with torch.enable_grad():
        expected = of_whole(whole, batch)
        found, owners = in_stages(models, batch)
    wrong = {}
    for name, values in expected.items():
        largest = float(values.abs().max().clamp_min(1e-30))
        got = found.get(name)
        if got is None or got.shape != values.shape:
            wrong[name] = float("inf")
        elif not torch.equal(got, values):
            wrong[name] = float((got - values).abs().max()) / largest
    shared = {name for name, count in owners.items() if count > 1}
    tied = bool(models[0].zerolm_stage.shared is not None)
    if len(shared) > tied or set(owners) - set(expected):
        wrong |= dict.fromkeys(shared | (set(owners) - set(expected)), float("inf"))
    return wrong


def deep_enough(config: "PretrainedConfig", stages: int) -> "PretrainedConfig":
    """Return a config with a layer for each stage, or more."""
    depth = config.get_text_config().num_hidden_layers
    return config if depth >= stages else with_depth(config, stages)


def stages_of(whole: Any, stages: int) -> list[Any]:
    """Return copies of a model, cut into stages."""
    from zerolm.model.stages import cut, values_returned
    from zerolm.plan.stage_share import divide

    layers = divide([1.0] * whole.config.get_text_config().num_hidden_layers, stages)
    returned, models = values_returned(whole.config), []
    for index in range(stages):
        models.append(copy.deepcopy(whole))
        cut(models[-1], index, layers, returned)
    return models


def batch_of(model: Any, tokens: int, rows: int = 2) -> dict[str, "torch.Tensor"]:
    """Return a batch of random tokens."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (rows, tokens + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def of_whole(model: Any, batch: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Return the loss of a batch, and the gradient of each parameter."""

    from zerolm.model.forward import token_losses

    loss = token_losses(model, batch)[0].sum()
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def gradients(model: Any) -> dict[str, "torch.Tensor"]:
    """Return the gradient of each parameter, zeros if it got none."""
    import torch

    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }


def in_stages(
    stages: list[Any], batch: dict[str, "torch.Tensor"]
) -> tuple[dict[str, "torch.Tensor"], dict[str, int]]:
    """Return the same of a model's stages, and the number of stages that have each parameter."""
    import torch

    from zerolm.model.forward import hidden_states, token_losses

    received: torch.Tensor | None = None
    passes = []
    for stage in stages[:-1]:
        sent = hidden_states(stage, batch, received)
        passes.append((received, sent))
        received = sent.detach().requires_grad_()
    loss = token_losses(stages[-1], batch, received=received)[0].sum()
    loss.backward()
    for before, sent in reversed(passes):
        assert received is not None and received.grad is not None
        (sent * received.grad).sum().backward()
        received = before
    found: dict[str, torch.Tensor] = {}
    owners: dict[str, int] = {"loss": 1}
    for stage in reversed(stages):
        for name, own in gradients(stage).items():
            found[name] = found[name] + own if name in found else own
            owners[name] = owners.get(name, 0) + 1
    return {"loss": loss.detach(), **found}, owners
