"""Optimizers that are correct on ZeRO's shards, proved on torch's own; refusals give the reason."""

import copy
import types

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.muon import original_muon
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.model_families.toy_configs import toy_config
from tests.zerolm.model.initialization_families import COMMON, FAMILIES
from zerolm.distributed.layout import Layout
from zerolm.ds_config import muon, optimizers
from zerolm.ds_config.profile import Profile
from zerolm.engine.muon import describe, leaving_to_adamw, scale_by_layout
from zerolm.features.ema import Ema
from zerolm.features.feature import Case
from zerolm.features.qk_clip import QkClip
from zerolm.model.architecture import meta_model
from zerolm.optim.trial import LARGE, Trial
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
    assert elementwise == {kind: Trial(kind, {}, LARGE).is_elementwise(2) for kind in elementwise}


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
    assert mixer.in_proj.weight.use_muon and not mixer.conv1d.weight.use_muon
    for name, parameter in model.named_parameters():
        matrix = muon.is_matrix(name, tuple(parameter.shape)) and not name.endswith("A_log")
        assert parameter.use_muon == matrix, name


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
        case = Case(settings, AutoConfig.for_model("llama"), profile, Layout(1), "cpu")
        return [*Ema.problems(case), *QkClip.problems(case)]

    assert [why in problem for problem in found(RunSettings(**flag))] == [True] * bool(why)
    assert not found(RunSettings())


def toy_model(family):
    return meta_model(AutoConfig.for_model(**toy_config(family)))


def test_stacked_experts_are_refused_where_muon_supports_only_2d_tensors():
    config = {
        "optimizer": {"type": "Muon"},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    model = toy_model("mixtral")
    [problem] = muon.model_problems(Profile.parse(config), model)
    assert "gate_up_proj [4, 256, 64] of MixtralExperts. Use stage 2 or 3." in problem
    other = copy.deepcopy(config)
    other["zero_optimization"]["stage"] = 2
    assert muon.model_problems(Profile.parse(other), model) == []
    assert len(muon.notices(Profile.parse(other))) == 1
    assert not muon.notices(Profile.parse(config))


@pytest.mark.parametrize(
    ("family", "transposed"),
    [("llama", set()), ("falcon", set()), ("gpt2", {2}), ("openai-gpt", {2}), ("lfm2", set()),
     ("jamba", set()), ("mixtral", set()), ("qwen2_moe", set()), ("longcat_flash", set()),
     ("gpt_oss", {3}), ("aria_text", {3}), ("llama4_text", {3})],
)  # fmt: skip
def test_muon_knows_which_dimension_of_a_matrix_are_its_outputs(family, transposed):
    model = toy_model(family)
    known, hidden = muon.layouts(model), model.config.hidden_size
    assert muon.model_problems(Profile.parse({"optimizer": {"type": "Muon"}}), model) == []
    assert {len(shape) for shape in muon.transposed_shapes(model)} == transposed
    for name, is_transposed in known.items():  # what projects back to the residual stream
        shape = model.get_parameter(name).shape
        if "down_proj" in name or "mlp.c_proj" in name:
            assert shape[-1 if is_transposed else -2] == hidden, name
            assert shape[-2 if is_transposed else -1] != hidden, name


@pytest.mark.parametrize(
    ("family", "name"), [("dbrx", "ffn.experts.mlp.w1"), ("xlnet", "rel_attn.q")]
)
def test_a_matrix_of_an_unknown_layout_is_refused_with_muon(family, name):
    model = toy_model(family)
    [problem] = muon.model_problems(Profile.parse({"optimizer": {"type": "Muon"}}), model)
    assert "it is unknown which dimensions of" in problem and name in problem
    assert muon.model_problems(Profile.parse({"optimizer": {"type": "AdamW"}}), model) == []


class Mixed(nn.Module):
    """A GPT-2 block beside torch's linear layers."""

    def __init__(self, *linear: tuple[int, int]) -> None:
        super().__init__()
        self.conv = Conv1D(32, 8)
        self.linear = nn.ModuleList(nn.Linear(*each, bias=False) for each in linear)

    def get_input_embeddings(self) -> None:
        return None

    get_output_embeddings = get_input_embeddings


def test_a_model_with_both_layouts_is_scaled_for_each_matrix_or_refused():
    profile = Profile.parse({"optimizer": {"type": "Muon"}})
    model = Mixed((8, 32), (16, 16))
    assert muon.model_problems(profile, model) == []
    assert muon.transposed_shapes(model) == {(8, 32)}
    [problem] = muon.model_problems(profile, Mixed((8, 32), (32, 8)))
    assert "conv.weight [8, 32] of Conv1D is (inputs, outputs)" in problem
    assert "linear.1.weight [8, 32] of Linear is (outputs, inputs). Use AdamW." in problem


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (3, 8, 32), (3, 32, 8)], ids=str)
def test_muon_updates_a_transposed_matrix_like_the_matrix(monkeypatch, shape, method):
    original = original_muon.muon_update
    monkeypatch.setattr(original_muon, "muon_update", original)  # restores it
    scale_by_layout({shape})
    generator = torch.Generator().manual_seed(0)
    gradient, momentum = torch.randn(2, *shape, generator=generator)
    with torch.compiler.set_stance("force_eager"):
        expected = original(gradient.mT.clone(), momentum.mT.clone(), ns_method=method).mT
        found = original_muon.muon_update(gradient.clone(), momentum.clone(), ns_method=method)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        scale_by_layout(set())
        found = original_muon.muon_update(gradient.clone(), momentum.clone(), ns_method=method)
    largest = torch.linalg.matrix_norm(found, 2).max()
    assert (largest > 1.5) == (shape[-2] > shape[-1])  # DeepSpeed's: twice the step of tall ones


@pytest.mark.parametrize(
    "more",
    [{"zero_optimization": {"stage": 2, "parameter_alignment": True}},
     {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
      "data_types": {"grad_accum_dtype": "fp32"}}],
)  # fmt: skip
def test_heads_that_deepspeed_would_not_separate_are_refused(more):
    optimizer = {"type": "Muon", "params": {"per_head_muon": True}}
    [problem] = muon.problems(Profile.parse({"optimizer": optimizer, **more}))
    assert problem.startswith("optimizer.params.per_head_muon: true is ignored by DeepSpeed")
    stage_3 = {"optimizer": optimizer, "zero_optimization": {"stage": 3}}
    assert muon.problems(Profile.parse(stage_3)) == []
