"""Models built by 1 and 2 gloo processes, compared with plain torch and transformers."""

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import ROOT
from tests.launching import run_workers, write_json
from tests.model_families.toy_configs import toy_config
from tests.zerolm.model.initialization_families import (
    FAMILIES,
    SEED,
    family_config,
    plain_weights,
    sha256_of,
)
from zerolm.attention.choice import choose_attention
from zerolm.common.errors import ConfigError
from zerolm.engine.parameters import zero_padding
from zerolm.model import build, initialization
from zerolm.model.config_file import load_model_config

LAUNCH_TIMEOUT_SECONDS = 400  # the first launch on a machine compiles DeepSpeed's CPU collectives
# Fingerprints of float32 weights. A change of one would give every later run other weights.
GOLDEN = {"llama": "237721e25a6b4545", "gpt2": "4711879d6cb6db4a", "mixtral": "02419161c5ae00b5"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="world1", marks=pytest.mark.soak), pytest.param(2, id="world2")],
)
def world(request, tmp_path_factory):
    """The results of the ranks of a world, see `initialization_worker`."""
    result = tmp_path_factory.mktemp("world") / f"{request.param}.json"
    worker = Path(__file__).with_name("initialization_worker.py")
    run_workers(request.param, worker, result, timeout=LAUNCH_TIMEOUT_SECONDS, DS_ACCELERATOR="cpu")
    return json.loads(result.read_text())


def reference_hashes(family, dtype):
    weights = plain_weights(family_config(family), SEED, dtype)
    return {name: sha256_of(value) for name, value in weights.items()}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_are_bit_identical_to_plain_pytorch(world, family, precision):
    expected = reference_hashes(family, DTYPES[precision])
    for stage in (2, 3):
        built = world[f"{family} zero{stage} {precision}"]
        assert built["sha256"] == expected, f"stage {stage}"
        assert built["partitioned"] == (stage == 3)


def test_offloading_and_the_engine_do_not_change_initial_weights(world):
    expected = reference_hashes("llama", torch.bfloat16)
    assert world["llama zero3 bf16 offloaded"]["sha256"] == expected
    for family in ("llama", "gpt2"):
        expected = reference_hashes(family, torch.bfloat16)
        for stage in (1, 2, 3):
            assert world[f"{family} zero{stage} bf16 in engine"]["sha256"] == expected


def test_the_first_loss_is_equal_on_all_stages(world):
    for family, experts in (("llama", []), ("gpt2", []), ("ernie4_5_moe", [4])):
        engines = [world[f"{family} zero{stage} bf16 in engine"] for stage in (1, 2, 3)]
        assert engines[0]["loss"] == engines[1]["loss"] == engines[2]["loss"]
        assert [engine["experts"] for engine in engines] == [experts] * 3


@pytest.mark.parametrize("family", GOLDEN)
def test_initial_weights_are_those_of_every_earlier_version(family):
    model = build_alone(family_config(family), torch.float32)
    assert build.weights_fingerprint(model).startswith(GOLDEN[family])


@pytest.mark.parametrize("family", [*FAMILIES, "olmo_hybrid"])  # which draws with `rand_like`
def test_threads_compute_the_same_values_in_order(family, monkeypatch):
    values = toy_config(family) if family == "olmo_hybrid" else family_config(family).to_dict()
    config = AutoConfig.for_model(**values)
    expected = plain_weights(config, SEED, torch.bfloat16)
    weights = initialization.InitialWeights(config, SEED)
    units = [*range(len(weights.units)), 0]
    monkeypatch.setattr(initialization, "MAX_AHEAD_BYTES", 40_000)
    state = torch.get_rng_state()
    computed = list(weights.compute_all(units, torch.bfloat16, threads=4))
    assert torch.equal(state, torch.get_rng_state())
    assert [list(values) for values in computed] == [weights.units[unit] for unit in units]
    for name, value in (item for values in computed for item in values.items()):
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprint_is_equal_for_all_stages_and_world_sizes(world, family):
    for precision, dtype in DTYPES.items():
        config = family_config(family)
        alone = build_alone(config, dtype)
        expected = build.weights_fingerprint(alone)
        for stage in (2, 3):
            assert world[f"{family} zero{stage} {precision}"]["fingerprint"] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_equal_those_of_transformers_even_in_the_engine(world, family):
    for precision, dtype in DTYPES.items():
        plain = AutoModelForCausalLM.from_config(family_config(family), dtype=dtype)
        expected = {name: [str(b.dtype), sha256_of(b)] for name, b in plain.named_buffers()}
        built = {key: value for key, value in world.items() if key.startswith(f"{family} zero")}
        for key in [key for key in built if precision in key]:
            assert built[key]["buffers"] == expected, key


def test_rotary_tables_are_exact_in_float32_in_a_bf16_engine(world):
    head_dim = 32 // 4
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    expected = ["torch.float32", sha256_of(inv_freq)]
    keys = [f"llama zero{stage} bf16 in engine" for stage in (1, 2, 3)]
    for key in [*keys, "llama zero2 bf16 with buffer_dtype"]:
        assert world[key]["buffers"]["model.rotary_emb.inv_freq"] == expected, key


def test_the_check_passes_every_family_on_every_stage(world):
    for key, built in world.items():
        if " zero" in key and "bare" not in key:
            assert built["problems"] == [], key
            assert "all as the config implies" in built["report"]
            assert "\n" not in built["report"]


def test_the_check_refuses_a_bare_zero_init(world):
    problems = world["bare zero.Init"]["problems"]
    embedding = [
        line for line in problems if line.startswith("model.embed_tokens.weight: standard")
    ]
    assert len(embedding) == 1
    assert "the config implies 0.02" in embedding[0]
    assert any("q_proj" in line for line in problems)


def test_the_check_reports_one_ranks_problem_to_every_rank(world):
    rank = world["world size"] - 1
    problems = world["spoiled on the last rank"]
    assert problems
    assert all(line.startswith("model.norm.weight: ") for line in problems)
    if rank > 0:
        assert all(line.endswith(f" (on rank {rank})") for line in problems)


def test_building_does_not_change_the_random_generator(world):
    assert world["generator untouched"] is True


def build_alone(config, dtype=torch.float32, seed=SEED, **changes):
    settings = {
        "seed": seed,
        "dtype": dtype,
        "zero3_config": None,
        "attn_implementation": choose_attention(config, "auto", "cpu", dtype),
        "gradient_checkpointing": False,
        "device": "cpu",
    }
    return build.build_model(config, **{**settings, **changes})


def test_another_seed_gives_other_weights():
    config = family_config("llama")
    fingerprints = {build.weights_fingerprint(build_alone(config, seed=seed)) for seed in (0, 1, 1)}
    assert len(fingerprints) == 2


def test_the_fingerprint_changes_with_one_flipped_bit_or_two_swapped_values():
    model = build_alone(family_config("llama"), torch.bfloat16)
    before = build.weights_fingerprint(model)
    weight = model.lm_head.weight.data.view(-1)
    weight[7:8].view(torch.int16).bitwise_xor_(1)
    assert build.weights_fingerprint(model) != before
    weight[7:8].view(torch.int16).bitwise_xor_(1)
    assert build.weights_fingerprint(model) == before
    assert weight[100] != weight[101]
    weight[100:102] = weight[100:102].flip(0)
    assert build.weights_fingerprint(model) != before


def test_the_model_has_no_cache_and_the_config_does_not_change():
    config = family_config("llama")
    before = config.to_dict()
    model = build_alone(config, torch.bfloat16, gradient_checkpointing=True)
    assert config.to_dict() == before
    assert model.training and model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        *(("llama", 2), ("llama", -1), ("llama", 600), ("qwen2", 511), ("qwen3_moe", 3)),
        *((family, None) for family in ("gemma", "gemma3_text", "cohere", "opt", "ernie4_5")),
        *(("gemma3n_text", 1), ("phi3", None), ("youtu", 7), ("roc_bert", None)),
    ],
)
def test_every_row_of_the_embedding_is_trained(family, padding, tmp_path):
    values = toy_config(family)
    values.pop("pad_token_id", None)
    if padding is not None:
        values["pad_token_id"] = padding
    notices = []
    config = load_model_config(write_json(tmp_path / "config.json", values), notices)
    outside = padding in (-1, 600) or family == "phi3"  # by its default, 32000
    assert any(" is ignored: it is outside" in notice for notice in notices) == outside
    model = build_alone(config)
    assert build.check_initialization(model, config).problems == ()
    unpadded = AutoConfig.for_model(**{**values, "pad_token_id": None})
    plain = AutoModelForCausalLM.from_config(unpadded, attn_implementation="sdpa")
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(512).reshape(16, 32)
    ids = torch.cat([ids, ids.flip(1)])  # the last token of a row has no target
    for each in (model, plain.train()):
        torch.manual_seed(0)  # dropout
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    ours, theirs = (each.get_input_embeddings().weight for each in (model, plain))
    assert torch.equal(ours.grad, theirs.grad) and bool((ours.grad != 0).any(1).all())
    assert bool((ours != 0).any(1).all())


def test_gradient_checkpointing_does_not_change_gradients():
    ids = torch.arange(16).reshape(2, 8)
    gradients = []
    for checkpointing in (False, True, "selective"):
        model = build_alone(family_config("llama"), gradient_checkpointing=checkpointing)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found in gradients[1:]:
        assert all(map(torch.equal, gradients[0], found))


def spoil(model, name, change):
    with torch.no_grad():
        change(model.get_parameter(name))


@pytest.mark.parametrize(
    ("family", "name", "change", "complaint"),
    [
        ("llama", "model.norm.weight", lambda w: w.zero_(), "mean 0, but the config implies 1"),
        ("llama", "lm_head.weight", lambda w: w[3, 5].fill_(float("nan")), "not finite"),
        ("llama", "lm_head.weight", lambda w: w.mul_(1.2), "the config implies 0.02"),
        ("llama", "lm_head.weight", lambda w: w.add_(0.004), "the config implies 0 "),
        ("gpt2", "transformer.h.1.mlp.c_proj.weight", lambda w: w.mul_(2), "implies 0.01 "),
        ("gpt2", "transformer.h.1.mlp.c_fc.bias", lambda w: w[0].fill_(0.1), "implies 0 "),
        ("mixtral", "model.layers.0.mlp.experts.down_proj", lambda w: w[2].zero_(), "0.02"),
        ("gemma2", "model.norm.weight", lambda w: w.fill_(1), "mean 1, but the config implies 0"),
        ("mamba", "backbone.layers.1.mixer.A_log", lambda w: w.normal_(), "A_log: mean"),
    ],
)
def test_the_check_names_the_wrong_parameter(family, name, change, complaint):
    config = family_config(family)
    model = build_alone(config)
    spoil(model, name, change)
    report = build.check_initialization(model, config)
    assert report.problems
    assert all(problem.startswith(f"{name}: ") for problem in report.problems)
    assert any(complaint in problem for problem in report.problems), report.problems
    assert "wrong" in str(report)


def test_the_check_accepts_weights_drawn_by_transformers():
    torch.manual_seed(0)
    for family in FAMILIES:
        config = family_config(family)
        for dtype in DTYPES.values():
            plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
            report = build.check_initialization(plain, config)
            assert not report.problems, (family, report.problems)


def test_the_check_knows_that_an_encoder_inside_the_model_initialises_itself(tmp_path):
    write_json(tmp_path / "config.json", toy_config("phi4_multimodal"))
    config = AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert not build.check_initialization(plain, config).problems


def test_auto_attention_is_the_best_that_class_and_device_support():
    def choose(family):
        config = family_config(family)
        return choose_attention(config, "auto", "cpu", torch.bfloat16)

    assert choose("llama") == "sdpa"
    assert choose("mamba") == "eager"  # it has no attention to be fast at


@pytest.mark.parametrize(
    ("family", "requested", "complaint"),
    [
        ("llama", "flash_attention_2", "needs a CUDA device, but this run is on cpu. Use auto."),
        ("llama", "flash_attention_3", "needs a CUDA device"),
        ("llama", "flash", "must be one of auto, eager, sdpa"),
        ("mamba", "sdpa", "is not supported by MambaForCausalLM. Use eager."),
    ],
)
def test_unsupported_attention_is_refused(family, requested, complaint):
    with pytest.raises(ConfigError, match="--attn_implementation: ") as refusal:
        choose_attention(family_config(family), requested, "cpu", torch.bfloat16)
    assert complaint in str(refusal.value)
    assert len(refusal.value.problems) == 1


def test_parameters_that_only_the_constructor_draws_depend_on_the_seed_and_pass_the_check():
    config = AutoConfig.for_model("openai-gpt", n_layer=2, n_embd=64, n_head=2, vocab_size=64)
    first, again, other = (build_alone(config, seed=seed) for seed in (1, 1, 2))
    assert build.weights_fingerprint(first) == build.weights_fingerprint(again)
    name = "transformer.h.1.mlp.c_fc.weight"
    assert not first.get_parameter(name).equal(other.get_parameter(name))
    assert first.get_parameter(name).std().item() == pytest.approx(0.02, rel=0.05)
    assert not build.check_initialization(first, config).problems
    spoil(first, name, lambda w: w.mul_(1.5))
    (problem,) = build.check_initialization(first, config).problems
    assert name in problem


@pytest.mark.parametrize("family", ["llama-tied-padded", "gpt2", "modernbert-decoder"])
def test_the_documented_algorithm_gives_the_same_weights(family):
    text = (ROOT / "docs" / "initialization.md").read_text()
    recipe: dict = {}
    exec(text.split("```python\n")[1].split("```")[0], recipe)
    documented = recipe["initial_model"](family_config(family), SEED, torch.bfloat16)
    built = build_alone(family_config(family), torch.bfloat16)
    assert build.weights_fingerprint(documented) == build.weights_fingerprint(built)


@pytest.mark.parametrize(("rank", "kept"), [(0, 4), (1, 3), (2, 0)])
def test_the_padding_of_partitions_is_zero(rank, kept, monkeypatch):
    """Of 7 values on ranks with 4 places each; DeepSpeed leaves old memory in the others."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_numel, parameter.ds_tensor = 7, torch.full((4,), 9.0)
    parameter.ds_process_group, parameter.ds_shape = None, torch.Size([7])
    parameter.ds_tensor.ds_numel = 4
    parameter.ds_tensor.status = types.SimpleNamespace(name="AVAILABLE")
    model = torch.nn.Module()
    model.weight = parameter
    zero_padding(model)
    assert parameter.ds_tensor.tolist() == [9.0] * kept + [0.0] * (4 - kept)


def test_an_evaluation_does_not_change_the_weights_of_rwkv():
    """Its class halves weights of later layers in evaluation mode; losses are as in training."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "attention_hidden_size": 32}
    config = AutoConfig.for_model("rwkv", num_hidden_layers=4, rescale_every=2, **sizes)
    model = build.build_model(
        config,
        seed=SEED,
        dtype=torch.float32,
        zero3_config=None,
        attn_implementation="eager",
        gradient_checkpointing=False,
        device="cpu",
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = torch.arange(16)[None]
    trained = model(input_ids=ids).logits
    evaluated = model.eval()(input_ids=ids).logits
    assert torch.equal(trained, evaluated) and config.rescale_every == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
