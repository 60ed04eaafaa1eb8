"""Compiled blocks: which blocks, how many graphs, and the refusals."""

import sys

import pytest
import torch
import transformers
from packaging.version import Version
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM

from tests.feature_problems import problems_of
from zerolm.common import machine
from zerolm.engine import zero3_hooks
from zerolm.model import compile
from zerolm.model.activation_checkpointing import checkpoint_kwargs
from zerolm.parts.parse import parse_settings
from zerolm.preflight.model_rules import matmul_problems

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": {"intermediate_size": 48},
    "gpt_neox": {"intermediate_size": 48},
    "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_key_value_heads": 4,
        "output_router_logits": True,  # recorded by hooks, at which a graph would break
        "router_aux_loss_coef": 0.5,
    },
}


CASES = [*((family, False) for family in FAMILIES), ("llama", True), ("mixtral", True)]


@pytest.mark.parametrize(
    ("product", "family", "checkpointing"),
    [
        *(("zero3", *case) for case in CASES),
        ("torch", *CASES[0]),
        *(pytest.param("torch", *case, marks=pytest.mark.soak) for case in CASES[1:]),
    ],
)
def test_one_graph_serves_all_blocks_and_keeps_gradients(
    product, family, checkpointing, monkeypatch
):
    if family == "mixtral" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("the grouped products of older transformers break the graph on a CPU")
    if product == "zero3":  # an autograd function, as zero.Init installs it
        from deepspeed.runtime.zero import linear

        monkeypatch.setattr(torch.nn.functional, "linear", linear.zero3_linear_wrap)
    compiled = torch.compile
    # Its tracing and its graphs of the backward pass, without code that takes long to compile.
    monkeypatch.setattr(torch, "compile", lambda call: compiled(call, backend="aot_eager"))
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(checkpoint_kwargs(checkpointing))
    ids = torch.randint(0, 64, (2, 16))
    names = [name for name, _ in model.named_parameters()]

    def step():
        model.zero_grad()
        output = model(input_ids=ids, labels=ids, use_cache=False)
        assert len(output.get("router_logits", "123")) == 3, "recorded once for each block"
        output.loss.backward()
        return output.loss.item(), [parameter.grad.clone() for parameter in model.parameters()]

    loss, gradients = step()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert "3 blocks" in compile.compile_blocks(model)
    found, others = step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compile.graph_break_notice() is None
    monkeypatch.setattr(compile, "MAX_GRAPHS", 1)
    assert "blocks run eagerly" in str(compile.graph_break_notice())
    assert [name for name, _ in model.named_parameters()] == names
    assert found == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)
    model.eval()
    with torch.no_grad(), compile.eager():
        model(input_ids=ids[:, :5], use_cache=False)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        compiled(lambda values: values + 1, backend="aot_eager")(ids)  # flex_attention's own
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_a_graph_does_not_depend_on_the_number_of_a_zero3_weight(monkeypatch):
    from deepspeed.runtime.zero import linear

    monkeypatch.setattr(linear, "is_zero_param", linear.is_zero_param)
    zero3_hooks.leave_partitions_out_of_graphs()
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for number, weight in enumerate(weights):
        weight.ds_id = number
    counter = CompileCounter()
    asks = torch.compile(lambda weight: weight + linear.is_zero_param(weight), backend=counter)
    for weight in weights:
        assert linear.is_zero_param(weight) and asks(weight).tolist() == [1.0, 1.0]
    assert counter.frame_count == 1 and not linear.is_zero_param(torch.ones(2))
    torch._dynamo.reset()


def test_tf32_is_refused_where_it_has_no_effect():
    settings, problems = parse_settings(
        ["--float32_matmul", "high", "--deepspeed_config", "d.json"]
    )
    assert problems == []
    assert matmul_problems(settings, "fp32", "cuda") == []
    assert matmul_problems(settings, "fp32", "absent") == []
    (problem,) = matmul_problems(settings, "fp32", "cpu")
    assert "--float32_matmul: high" in problem and "needs a GPU" in problem
    (problem,) = matmul_problems(settings, "bf16", "cuda")
    assert "d.json computes in bf16" in problem
    assert matmul_problems(parse_settings([])[0], "bf16", "cpu") == []


def test_models_that_cannot_be_compiled_are_refused_with_the_reason(monkeypatch):
    config = AutoConfig.for_model("llama", **SIZES, **FAMILIES["llama"])
    settings, problems = parse_settings(["--compile", "--gradient_checkpointing", "selective"])
    assert problems == []
    (problem,) = problems_of(settings, config)
    assert "selective" in problem and "Remove one" in problem
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    settings, _ = parse_settings(["--compile"])
    (problem,) = problems_of(settings, config, "cpu")
    assert "needs a C++ compiler" in problem and "--compile" in problem
    monkeypatch.setitem(sys.modules, "triton", None)  # installed or not
    assert "triton on a GPU, which cannot" in str(compile.unsupported_reason(config, "cuda"))
