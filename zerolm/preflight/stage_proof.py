"""Check on a small copy that cutting a model into pipeline stages changes no bit.

For `pipeline.stages`. The copy has all layers, if it can be computed, and is cut where the run cuts
the model. Its stages run one after another in this process, and get each other's hidden states and
gradients. The loss and the gradient of every parameter must have the bits of a whole copy, so no
list of model types is needed. The stages' parts of a router loss must add up to the model's own,
and so must their gradients. Hidden states must have the shape and precision that stages will
expect, and training must draw no random numbers. `model_proof` must have found no problem.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerolm.common.errors import reason
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile, block
from zerolm.ds_config.topology import STAGES_KEY
from zerolm.model.architecture import ConfigKey, experts_per_token, router_loss_coefficient
from zerolm.model.model import Model
from zerolm.plan import stage_share
from zerolm.plan.exchange import num_layers
from zerolm.preflight.model_proof import computable_copy, kernels, trial_tokens, was_proven
from zerolm.preflight.small_copy import narrow_config, with_depth
from zerolm.run_dir.records import find_run_json

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Largest difference of the router loss or a gradient of it, relative to the largest in its tensor:
# the stages sum in another order.
TOLERANCE = 1e-4
STAGES = 3  # of a copy with fewer layers, at most, so that one is neither first nor last
USE = "Use ZeRO-3 instead of the block"


def problems(model: Model, settings: Settings, profile: Profile, found: Any) -> list[str]:
    """Return why the model cannot be cut, unless the run's record says that it can."""
    if profile.stages == 1 or found.problems:
        return []
    layers = layers_of(model, settings, profile)
    if not settings.check and was_proven(model, settings) and layers == proven_layers(settings):
        return []
    from zerolm.preflight.observed_model import quiet  # imports torch

    with quiet():
        text = _wrong(model, settings, profile, layers)
    where = f"{profile.name}: {STAGES_KEY}: {profile.stages}"
    return [f"{where}: {model.path}: {model.config.model_type}: {text}. {USE}."] if text else []


def layers_of(model: Model, settings: Settings, profile: Profile) -> tuple[int, ...]:
    """Return the number of blocks of each stage, as the plan will have it."""
    known = stage_share.with_layers(profile, model, settings.seq_len or 1, profile.stages)
    return known.stage_layers


def proven_layers(settings: Settings) -> tuple[int, ...]:
    """Return the numbers of blocks of the stages in the run's record, which were proven then."""
    record = (find_run_json(settings.run_dir) if settings.run_dir else None) or {}
    return Profile.parse(block(record, "ds_config")).stage_layers


def _wrong(model: Model, settings: Settings, profile: Profile, layers: tuple[int, ...]) -> str:
    """Return why the model cannot be cut, or nothing."""
    small, tokens = computable_copy(ConfigKey.of(model.config), trial_tokens(settings.seq_len))
    try:
        deep = _deep_copy(model.config, tokens)
        small, layers = (small, ()) if deep is None else (deep, layers)
        if found := differences(small, tokens, min(STAGES, profile.stages), layers):
            names, largest = ", ".join([*found][:4]), max(found.values())
            return f"cut into stages, {names} of a small copy differ by {largest:.1e}"
        why = _unlike_sent(small, tokens, profile)
    except Exception as error:  # any class: a model's own code may not run cut
        why = f"cannot be computed ({reason(error)})"
    return why and f"a small copy cut into stages {why}"


def _deep_copy(config: "PretrainedConfig", tokens: int) -> "PretrainedConfig | None":
    """Return the config of a narrow copy with all layers; None if it cannot be computed whole."""
    from zerolm.preflight.observed_model import build_with_large_weights

    try:
        narrow = narrow_config(config)
        if narrow is not None:
            whole = build_with_large_weights(narrow, kernels(narrow)[0]).eval()
            of_whole(whole, batch_of(whole, tokens))
    except Exception:  # any class; the shorter copy runs, so it is tried instead
        return None
    return narrow


def _unlike_sent(config: "PretrainedConfig", tokens: int, profile: Profile) -> str:
    """Return how what stages send differs from what they will expect, or what else a run would do
    otherwise than a whole model.
    """
    import torch

    from zerolm.model.forward import hidden_states, token_losses
    from zerolm.model.stages import passed
    from zerolm.preflight.observed_model import build

    whole = build(config, kernels(config)[0]).train()
    batch, before = batch_of(whole, tokens), torch.random.get_rng_state()
    dtype = torch.bfloat16 if profile.precision == "bf16" else torch.float32
    with torch.no_grad():
        token_losses(whole, batch)
        if not torch.equal(before, torch.random.get_rng_state()):
            return "draws other random numbers than a whole model"
        sent = hidden_states(stages_of(whole, 2)[0].to(dtype), batch, None)
    shape, expected = passed(config).state(config, dtype)
    if tuple(sent.shape[2:]) == shape and sent.dtype == expected:
        return ""
    return f"sends {sent.dtype} of shape {tuple(sent.shape)}, not {expected} of {shape} per token"


def differences(
    config: "PretrainedConfig", tokens: int, stages: int = STAGES, layers: Sequence[int] = ()
) -> dict[str, float]:
    """Return {parameter, or "loss": difference} of a cut from a whole model, where a bit differs,
    relative to the largest value; infinity for a parameter that no stage or several have.

    Args:
        tokens: in a row.
        stages: number of stages; a copy with fewer layers gets more.
        layers: number of blocks of each stage; if empty, they are divided evenly.
    """
    import torch

    from zerolm.preflight.observed_model import build_with_large_weights

    config = deep_enough(config, stages)
    whole = build_with_large_weights(config, kernels(config)[0]).eval()
    batch = batch_of(whole, tokens)
    models = stages_of(whole, stages, layers)
    with torch.enable_grad():
        expected = of_whole(whole, batch)
        found, owners = in_stages(models, batch)
    wrong = {}
    for name, values in expected.items():
        got = found.get(name)
        if got is None or got.shape != values.shape:
            wrong[name] = float("inf")
        elif not torch.equal(got, values):
            wrong[name] = _apart(got, values)
    if not wrong and router_loss_coefficient(config):
        with torch.enable_grad():
            expected = of_whole(whole, batch, of_routers=True)
            found, _ = in_stages(models, batch, of_routers=True)
        apart = {name: _apart(found[name], values) for name, values in expected.items()}
        wrong = {f"router {name}": each for name, each in apart.items() if not each <= TOLERANCE}
    shared = {name for name, count in owners.items() if count > 1}
    tied = bool(models[0].zerolm_stage.shared is not None)
    if len(shared) > tied or set(owners) - set(expected):
        wrong |= dict.fromkeys(shared | (set(owners) - set(expected)), float("inf"))
    return wrong


def _apart(got: "torch.Tensor", expected: "torch.Tensor") -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def deep_enough(config: "PretrainedConfig", stages: int) -> "PretrainedConfig":
    """Return a config with a layer for each stage, or more."""
    depth = config.get_text_config().num_hidden_layers
    return config if depth >= stages else with_depth(config, stages)


def stages_of(whole: Any, stages: int, layers: Sequence[int] = ()) -> list[Any]:
    """Return copies of a model, cut into stages: evenly, or with these numbers of blocks."""
    from zerolm.model.stages import cut, passed

    even = stage_share.divide([1.0] * whole.config.get_text_config().num_hidden_layers, stages)
    layers = list(layers) or even
    returned, models = passed(whole.config).values, []
    for index in range(len(layers)):
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


def of_whole(
    model: Any, batch: dict[str, "torch.Tensor"], of_routers: bool = False
) -> dict[str, "torch.Tensor"]:
    """Return the loss of a batch, and the gradient of each parameter.

    Args:
        of_routers: return the model's router loss instead.
    """
    from zerolm.model.forward import token_losses

    model.zero_grad()
    losses, auxiliary = token_losses(model, batch)
    loss: Any = auxiliary if of_routers else losses.sum()
    assert loss is not None, "the model returns no router loss"
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
    stages: list[Any], batch: dict[str, "torch.Tensor"], of_routers: bool = False
) -> tuple[dict[str, "torch.Tensor"], dict[str, int]]:
    """Return the same of a model's stages, and the number of stages that have each parameter."""
    import torch

    from zerolm.model.forward import hidden_states, token_losses

    received: torch.Tensor | None = None
    outputs: list[Any] = []
    passes = []
    for stage in stages[:-1]:
        stage.zero_grad()
        sent = hidden_states(stage, batch, received, outputs.append)
        passes.append((received, sent))
        received = sent.detach().requires_grad_()
    stages[-1].zero_grad()
    loss = token_losses(stages[-1], batch, outputs.append, received)[0].sum()
    parts: list[Any] = [loss, *([0.0] * len(passes))]  # of the last stage, and those before it
    if of_routers:
        parts = _router_losses(stages, outputs)[::-1]
        parts[0] = parts[0] + 0.0 * loss
    parts[0].backward()
    for part, (before, sent) in zip(parts[1:], passes[::-1], strict=True):
        assert received is not None and received.grad is not None
        ((sent * received.grad).sum() + part).backward()
        received = before
    found: dict[str, torch.Tensor] = {}
    owners: dict[str, int] = {"loss": 1}
    for stage in reversed(stages):
        for name, own in gradients(stage).items():
            found[name] = found[name] + own if name in found else own
            owners[name] = owners.get(name, 0) + 1
    found["loss"] = torch.stack([torch.as_tensor(part).detach() for part in parts]).sum()
    return found, owners


def _router_losses(stages: list[Any], outputs: list[Any]) -> list[Any]:
    """Return each stage's part of the model's router loss, zero for a stage without routers."""
    from zerolm.model.loss import pooled_balance_loss, pooled_choices

    config = stages[0].config
    coefficient, top_k = router_loss_coefficient(config) or 0.0, experts_per_token(config) or 1
    logits = [each.router_logits for each in outputs]
    for stage, own in zip(stages, logits, strict=True):  # a run numbers routers by these layers
        if len(own) != (count := num_layers(dict(stage.named_parameters()))):
            raise ValueError(f"{count} layers with experts return {len(own)} router logits")
    found = [pooled_choices(each, top_k) if each else None for each in logits]
    total: Any = sum(each[0] for each in found if each is not None)
    return [
        0.0 if each is None else coefficient * pooled_balance_loss(each[1], total) for each in found
    ]
