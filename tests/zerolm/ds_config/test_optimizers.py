"""Optimizers that are correct on ZeRO's shards, proved on torch's own; refusals give the reason."""

import copy
import types

import deepspeed
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zerolm.model.initialization_families import COMMON, FAMILIES
from zerolm.ds_config import muon, optimizers
from zerolm.ds_config.profile import Profile
from zerolm.engine.muon import describe, leaving_to_adamw
from zerolm.features.ema import Ema
from zerolm.features.feature import Case
from zerolm.features.qk_clip import QkClip
from zerolm.optim import custom
from zerolm.parts.settings import RunSettings

OTHER_KINDS = {"LBFGS", "SparseAdam", "Muon"}  # they refuse flat shards, or dense gradients


def stepped(kind: str, sharded: bool) -> torch.Tensor:
    """Return a matrix after three steps, on the full matrix or on two flat shards as ZeRO's."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 8, generator=generator)
    shards = list(matrix.flatten().chunk(2)) if sharded else [matrix]
    parameters = [nn.Parameter(shard.clone()) for shard in shards]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.01)
    for _ in range(3):
        gradient = torch.randn(6, 8, generator=generator)
        gradient[:3] *= 10  # so that the shards' norms differ
        gradients = gradient.flatten().chunk(2) if sharded else [gradient]
        for parameter, shard in zip(parameters, gradients, strict=True):
            parameter.grad = shard.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)


def test_refused_optimizers_are_those_whose_steps_differ_on_shards():
    elementwise = {
        kind: torch.allclose(stepped(kind, True), stepped(kind, False), rtol=1e-6, atol=1e-7)
        for kind in KINDS
        if kind not in OTHER_KINDS
    }
    assert {"AdamW", "NAdam", "SGD", "Adafactor"} <= set(elementwise)
    assert [kind for kind, equal in elementwise.items() if not equal] == ["Adafactor"]
    assert "adafactor" in optimizers.NOT_ELEMENTWISE
    assert elementwise == {kind: custom.is_elementwise(kind, {}) for kind in elementwise}


def test_adafactor_on_shards_depends_on_the_world_size():
    """Its steps are scaled by the norms of a rank's shard, not of the parameter."""
    full, halves = stepped("Adafactor", False), stepped("Adafactor", True)
    start = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).flatten()
    assert (full - halves).norm() > 0.1 * (full - start).norm()
    parameter = nn.Parameter(torch.ones(48))
    optimizer = torch.optim.Adafactor([parameter])
    parameter.grad = torch.ones(48)
    optimizer.step()
    assert optimizer.state[parameter]["variance"].numel() == 48, "as much memory as without factors"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Adafactor", "norms of full parameters"),
        ("Lamb", "norms of the full parameter"),
        ("LBFGS", "calls the model several times"),
        ("SparseAdam", "sparse gradients"),
        ("SophiaG", "second backward pass"),
        ("sophia", "second backward pass"),
    ],
)
def test_a_refusal_names_the_reason_and_alternatives(kind, why):
    config = {"optimizer": {"type": kind}, "zero_allow_untested_optimizer": True}
    [problem] = optimizers.optimizer_problems(Profile.parse(config), on_gpu=True)
    assert problem.startswith(f"optimizer.type: {kind} ") and why in problem
    assert problem.endswith("Use AdamW, Muon or Lion.")


def test_all_problems_of_a_muon_config_are_reported_together():
    params = {"lr": "auto", "momentun": 0.9, "momentum": 1.0, "ns_method": "gramm", "muon_lr": -1}
    config = {
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": 3, "reduce_scatter": True},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR"},
    }
    found = "\n".join(muon.problems(Profile.parse(config)))
    for part in (
        "params.momentun: not a parameter of Muon, so DeepSpeed would ignore it. Did you mean",
        "params.momentum: 1.0 must be a number of at least 0 below 1",
        'params.ns_method: "gramm" must be one of gram, standard',
        "params.muon_lr: -1 must be a number of at least 0.",
        "params.muon_lr: -1, but DeepSpeed's schedulers set one learning rate",
        "gradient_clipping: 1.0 would shrink Muon's orthogonalized update",
        "zero_optimization.reduce_scatter: true does not work with Muon at stage 3",
    ):
        assert part in found, found
    fine = {"params": {"lr": "auto", "muon_lr": 0.02, "momentum": 0.95}, "type": "Muon"}
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"optimizer": fine, "gradient_clipping": 0, "zero_optimization": offload}
    assert optimizers.optimizer_problems(Profile.parse(config), on_gpu=False) == []


@pytest.mark.parametrize("family", ["gpt2", "llama-tied-padded", "gpt_neox", "mixtral"])
def test_muon_takes_the_matrices_and_no_table(family):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**COMMON, **FAMILIES[family]}))
    named = types.SimpleNamespace(optimizer_name="muon", optimizer_params={})
    with leaving_to_adamw(muon.not_matrices(model)):
        deepspeed.set_optimizer_flags(named, model)
    tables = {"wte.weight", "wpe.weight", "embed_tokens.weight", "embed_in.weight",
              "embed_out.weight", "lm_head.weight"}  # fmt: skip
    for name, parameter in model.named_parameters():
        is_table = any(name.endswith(table) for table in tables)
        assert parameter.use_muon == (parameter.ndim >= 2 and not is_table), name
        assert parameter.use_muon == muon.is_matrix(name, tuple(parameter.shape)), name
    values = sum(each.numel() for each in model.parameters() if each.use_muon)
    assert f"with {values:,} values; AdamW" in describe(model)


def test_muon_leaves_what_has_no_weight_decay_to_adamw():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    named = types.SimpleNamespace(optimizer_name="muon", optimizer_params={})
    with leaving_to_adamw(muon.not_matrices(model)):
        deepspeed.set_optimizer_flags(named, model)
    mixer = model.backbone.layers[0].mixer
    assert mixer.A_log.ndim == 2 and not mixer.A_log.use_muon
    assert mixer.in_proj.weight.use_muon and mixer.conv1d.weight.use_muon


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"zero_optimization": {"stage": 2}}, ""),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer on NVMe",
        ),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "the master weights of the JSON have 16 bits",
        ),
    ],
)
@pytest.mark.parametrize("flag", [{"ema_tokens": 1000}, {"qk_clip": 100.0}], ids=str)
def test_changes_of_masters_are_refused_unless_these_are_float32_in_memory(more, why, flag):
    profile = Profile.parse({"optimizer": {"type": "AdamW"}, **more}, "the JSON")

    def found(settings):
        case = Case(settings, AutoConfig.for_model("llama"), profile, 1, "cpu")
        return [*Ema.problems(case), *QkClip.problems(case)]

    assert [why in problem for problem in found(RunSettings(**flag))] == [True] * bool(why)
    assert not found(RunSettings())


def test_stacked_experts_are_refused_where_muon_supports_only_2d_tensors():
    shapes = {"experts.down_proj": (4, 8, 8), "gate.weight": (4, 8), "embed.weight": (9, 8)}
    config = {
        "optimizer": {"type": "Muon"},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    [problem] = muon.shape_problems(Profile.parse(config), shapes)
    assert "but experts.down_proj is [4, 8, 8]. Use stage 2 or 3." in problem
    other = copy.deepcopy(config)
    other["zero_optimization"]["stage"] = 2
    assert muon.shape_problems(Profile.parse(other), shapes) == []
    assert len(muon.notices(Profile.parse(other))) == 1
    assert not muon.notices(Profile.parse(config))
