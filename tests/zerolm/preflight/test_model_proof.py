"""Models that are legal JSON, but no causal language models, compared with transformers alone."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.launching import LLAMA, ROOT, write_json
from tests.model_families.sweep import FAMILIES
from tests.model_families.toy_configs import toy_config
from tests.zerolm.preflight.preflight_inputs import refusal, write_inputs
from zerolm.common.errors import ConfigError, Findings
from zerolm.model.architecture import meta_model, num_experts, parameter_shapes
from zerolm.model.model import Model
from zerolm.preflight import model_proof
from zerolm.preflight.small_copy import small_copies

MISTRAL = {**LLAMA, "model_type": "mistral"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {
    **{**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
    **{"norm_topk_prob": True, "moe_intermediate_size": 32, "head_dim": 16},
}
# Of transformers 5.23: CPM-Ant takes the whole row for a prompt, and ProphetNet mixes up positions.
NOT_CAUSAL = {"cpmant", "prophetnet", "xlm", "xlnet"}
ONE_ROW = 24


def proven(values, folder) -> Findings:
    write_json(folder / "m.json", values)
    found = Findings([])
    model_proof.check(Model.load(str(folder / "m.json")), ONE_ROW, found)
    strip = f"{folder}/m.json: "
    return Findings(
        [line.removeprefix(strip) for line in found.problems],
        [line.removeprefix(strip) for line in found.notices],
    )


def changes(values, kernel, place=16):
    """Return how far the logits move with the token at `place`, by transformers alone."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[values["model_type"]](
        **{key: value for key, value in values.items() if key != "model_type"}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(8, 500, (1, ONE_ROW))
    other = ids.clone()
    other[0, place] += 1
    with torch.no_grad():
        before, after = (model(input_ids=each, use_cache=False).logits for each in (ids, other))
    return (after - before)[0].abs().amax(-1)


@pytest.mark.parametrize(("window", "is_refused"), [(0, True), (-1, True), (1, True), (2, False)])
def test_windows_that_hide_the_token_before_are_refused(window, is_refused, tmp_path):
    values = {**MISTRAL, "sliding_window": window}
    sdpa, eager = (changes(values, kernel) for kernel in ("sdpa", "eager"))
    assert (float(sdpa[17]) == 0) == is_refused
    assert (float(eager[:16].max()) > 1e-4) == (window < 1)
    problems = proven(values, tmp_path).problems
    assert len(problems) == is_refused
    for problem in problems:
        assert problem.startswith(f"sliding_window: {window}: with sdpa ")
        assert problem.endswith("Use 4096.")
        assert ("see later tokens" in problem) == (window < 1)


def test_a_window_of_nothing_in_some_layers_is_refused(tmp_path):
    layers = ["sliding_attention", "full_attention"]
    values = {**toy_config("gemma3_text"), "sliding_window": 0, "layer_types": layers}
    assert proven(values, tmp_path).problems[0].startswith("sliding_window: 0: with eager ")


@pytest.mark.parametrize("family", ["bert", "megatron-bert", "xlnet", "cpmant", "prophetnet"])
def test_models_that_see_the_future_are_refused(family, tmp_path):
    values = toy_config(family)
    if "is_decoder" in values:
        values["is_decoder"] = False
    assert float(changes(values, "eager", place=2)[:2].max()) > 1e-4
    (problem,) = proven(values, tmp_path).problems
    assert "positions see later tokens" in problem
    assert problem.startswith("is_decoder: false: ") == (
        "is_decoder" in values and "bert" in family
    )


@pytest.mark.parametrize(
    ("rope", "line"),
    [
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta: 0: with sdpa and eager logits are "
         "not finite. Use 10000.0."),
        ({"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}, "factor: 0.0: with sdpa and "
         "eager logits are not finite. Use 1.0."),
    ],
)  # fmt: skip
def test_the_key_at_fault_is_named_and_no_other_kind_of_positions(rope, line, tmp_path):
    """Falcon with `alibi` computes no rotary embeddings, so it would not show their fault."""
    values = {**toy_config("falcon"), "rope_parameters": rope}
    assert proven(values, tmp_path).problems == [f"rope_parameters.{line}"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {**QWEN, "num_experts_per_tok": 1},
            "num_experts_per_tok: 1: no gradient reaches model.layers.*.mlp.gate.weight, so "
            "training does not change them. Use 2, or norm_topk_prob false",
        ),
        (
            {**MIXTRAL, "num_experts_per_tok": 1, "output_router_logits": True},
            "num_experts_per_tok: 1: no gradient reaches model.layers.*.mlp.gate.weight, so "
            "training does not change them. Use 2",
        ),
        (
            {**toy_config("llama4_text"), "layer_types": ["chunked_attention"] * 2},
            "attention_chunk_size: 8: 2 of 23 positions do not see the previous token. Use 8192",
        ),
        ({**LLAMA, "intermediate_size": 0}, "no gradient reaches model.layers.*.mlp.down_proj"),
        (
            {**LLAMA, "attention_dropout": 1.0},
            "attention_dropout: 1.0: with the initial weights no",
        ),
        ({**LLAMA, "initializer_range": 1.0}, "initializer_range: 1.0: the first loss of a small"),
        (toy_config("opt"), "no gradient reaches model.decoder.layers.*.self_attn.k_proj.bias, so"),
    ],
)
def test_parameters_without_a_gradient_are_named(values, line, tmp_path):
    found = proven(values, tmp_path)
    assert not found.problems
    assert found.notices[0].startswith(line)


def test_a_router_of_one_normalised_expert_gets_no_gradient_from_transformers():
    """What the notice says, by plain transformers: rounding is all that reaches the router."""
    norms = {}
    for chosen in (1, 2):
        torch.manual_seed(0)
        values = {key: value for key, value in QWEN.items() if key != "model_type"}
        config = CONFIG_MAPPING["qwen3_moe"](**{**values, "num_experts_per_tok": chosen})
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(8, 500, (4, ONE_ROW))
        model(input_ids=ids, labels=ids).loss.backward()
        norms[chosen] = float(model.model.layers[0].mlp.gate.weight.grad.norm())
    assert norms[1] < 1e-4 * norms[2]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({**QWEN, "num_experts_per_tok": 0}, "num_experts_per_tok: 0: no gradient reaches model."),
        ({**LLAMA, "rope_theta": 0.0}, "rope_parameters.rope_theta: 0.0: with sdpa and eager logi"),
        (
            {**LLAMA, "attention_dropout": 2.0},
            "attention_dropout: 2.0: the model cannot be compute",
        ),
        ({**LLAMA, "rms_norm_eps": 1e9}, "rms_norm_eps: 1000000000.0: no gradient reaches model."),
        ({**LLAMA, "vocab_size": 1}, "with sdpa and eager no position sees its own token"),
    ],
)
def test_models_that_cannot_learn_are_refused(values, line, tmp_path):
    (problem,) = proven(values, tmp_path).problems
    assert problem.startswith(line)


def test_values_that_only_fail_in_a_forward_pass_are_refused(tmp_path):
    """Also in a model that is too large to be computed here."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 3.0}
    values = {
        **toy_config("phi"),
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    (problem,) = proven({**values, "rope_parameters": rotary}, tmp_path).problems
    assert problem.startswith("rope_parameters.partial_rotary_factor: 3.0: the model cannot be co")


def test_check_refuses_and_names_the_file(tmp_path):
    base = write_inputs(tmp_path)
    write_json(base / "blind.json", {**MISTRAL, "sliding_window": 0})
    (problem,) = refusal(base, " --model_config blind.json", WORLD_SIZE="1")
    assert problem.startswith(f"{base}/blind.json: sliding_window: 0: ")


def test_random_state_and_threads_are_as_before(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    proven({**LLAMA, "vocab_size": 400}, tmp_path)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads


SHIPPED = sorted(path.name for path in (ROOT / "model_configs").glob("*.json"))
QUICK = {"llama-70b.json", "mixtral-8x7b.json", "gpt2.json"}


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in SHIPPED],
)
def test_shipped_configs_are_proven(name):
    found = Findings([])
    model_proof.check(Model.load(str(ROOT / "model_configs" / name)), 2048, found)
    assert found == Findings([])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_families_are_proven_or_refused(tmp_path):
    """Those that no config can make causal are refused, others are right but for named parts."""
    refused, unproven = set(), set()
    for family in FAMILIES:
        try:
            found = proven(toy_config(family), tmp_path)
        except ConfigError:
            continue
        refused |= {family} if found.problems else set()
        unproven |= {family for line in found.notices if "not proven" in line}
    assert refused == NOT_CAUSAL
    assert unproven <= {"reformer"}


# Large configs, with the sizes of published files

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
MLA = {
    "hidden_size": 7168, "moe_intermediate_size": 2048, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "vocab_size": 129280, "num_hidden_layers": 61, "rope_scaling": YARN,
    "norm_topk_prob": True,
}  # fmt: skip
LONGROPE = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "pad_token_id": None,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.1] * 48},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        pytest.param("deepseek_v3", MLA, "", marks=pytest.mark.soak),
        ("deepseek_v3", {**MLA, "num_experts_per_tok": 1}, "num_experts_per_tok: 1: no gradient"),
        pytest.param("phi3", {**LONGROPE, "sliding_window": 2047}, "", marks=pytest.mark.soak),
        ("phi3", {**LONGROPE, "sliding_window": 0}, "sliding_window: 0: with sdpa no position"),
        pytest.param("mamba2", {}, "", marks=pytest.mark.soak),
    ],
)
def test_large_models_are_proven_by_a_narrow_copy(family, values, expected):
    found = Findings([])
    model_proof.check(Model.from_config(CONFIG_MAPPING[family](**values)), ONE_ROW, found)
    lines = [*found.problems, *found.notices]
    assert (not expected and not lines) or any(expected in line for line in lines), lines


STUB = """
def causal_conv1d_fn(*arguments, **more):
    raise RuntimeError("Expected x.is_cuda() to be true, but got false.")
causal_conv1d_update = causal_conv1d_fn
"""
PROVE = """
import json, sys
from zerolm.common.errors import Findings
from zerolm.model.model import Model
from zerolm.preflight import model_proof
found = Findings([])
model_proof.check(Model.load(sys.argv[1]), 24, found)
import causal_conv1d
print(json.dumps([found.problems, found.notices]))
"""


def test_kernels_that_need_a_gpu_refuse_no_model(tmp_path):
    """transformers takes those of installed packages for tensors on a CPU, too."""
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text(STUB)
    config = write_json(tmp_path / "m.json", toy_config("lfm2"))
    done = subprocess.run(
        [sys.executable, "-c", PROVE, config], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[], []]


# What the small copies keep

DEEPSEEK = CONFIG_MAPPING["deepseek_v3"]()  # 671B
GEMMA = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=48, sliding_window=1024)
LLAMA_70B = CONFIG_MAPPING["llama"](
    hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)


@pytest.mark.parametrize("config", [DEEPSEEK, GEMMA, LLAMA_70B], ids=lambda one: one.model_type)
def test_small_copies_have_each_kind_of_layer_and_few_parameters(config):
    small = next(small_copies(config, parameter_shapes(config))).config
    shapes = parameter_shapes(small)
    assert sum(math.prod(shape) for shape in shapes.values()) < 2_000_000
    kinds, full = (
        {type(module).__name__ for module in meta_model(each).modules()} for each in (small, config)
    )
    assert kinds == full
    for key in ("sliding_window", "rms_norm_eps", "rope_parameters", "hidden_act"):
        assert getattr(small, key, None) == getattr(config, key, None)
    heads = config.num_attention_heads / config.num_key_value_heads
    assert min(4, heads) == small.num_attention_heads / small.num_key_value_heads


def test_small_copies_keep_the_experts_of_a_token_and_all_kinds_of_attention():
    small = next(small_copies(DEEPSEEK, parameter_shapes(DEEPSEEK))).config
    assert num_experts(small) == (16, 8)
    assert (small.n_group, small.topk_group, small.num_hidden_layers) == (8, 4, 4)
    small = next(small_copies(GEMMA, parameter_shapes(GEMMA))).config
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
