"""When ZeRO-3 gathers blocks at once, and how much it gathers ahead then."""

import pytest
from transformers import AutoConfig

from tests import ROOT
from tests.model_families.toy_configs import toy_config
from tests.zerolm.ds_config.ds_cases import USER, resolved
from zerolm.ds_config.gathering import gathers_blocks, leaf_problems
from zerolm.ds_config.profile import Profile
from zerolm.model.architecture import meta_model

MODELS = {  # hidden size, and the values of a block's parameters
    "8b": (4096, [4096**2, 4096 * 1024, 4096 * 1024, 4096**2, *[4096 * 14336] * 3, 4096, 4096]),
    "70b": (8192, [8192**2, 8192 * 1024, 8192 * 1024, 8192**2, *[8192 * 28672] * 3, 8192, 8192]),
}


@pytest.mark.parametrize(
    ("model", "ranks", "at_once"),
    [("8b", 1, False), ("8b", 64, False), ("8b", 512, True), ("70b", 512, False)],
)
def test_blocks_are_gathered_at_once_where_latency_costs_more(model, ranks, at_once) -> None:
    hidden, block = MODELS[model]
    profile = Profile.read(ROOT / "ds_configs/zero3.json")

    def gathers(profile: Profile = profile, compiled: bool = False) -> bool:
        return gathers_blocks(profile, block, hidden_size=hidden, ranks=ranks, compiled=compiled)

    assert gathers() == at_once
    assert gathers(compiled=True)
    named = {"stage": 3, "leaf_module": {"classes": ["LlamaMLP"]}}
    assert not gathers(Profile.parse({"zero_optimization": named}, "ds.json"))
    other = Profile.read(ROOT / "ds_configs/zero2.json")
    assert not gathers(other) and not gathers(other, compiled=True)
    assert not gathers_blocks(profile, [], hidden_size=hidden, ranks=ranks, compiled=False)


def test_the_automatic_bucket_is_a_block_that_is_gathered_at_once() -> None:
    def bucket(**more) -> int:
        return resolved(USER, **more)["zero_optimization"]["stage3_prefetch_bucket_size"]

    hidden, block = MODELS["8b"]
    assert bucket(hidden_size=hidden) == int(0.9 * hidden**2)
    assert bucket(hidden_size=hidden, gathered_block=block) == sum(block) - 2 * hidden


def toy_model(family):
    return meta_model(AutoConfig.for_model(**toy_config(family)))


def problems_of(model, **zero) -> list[str]:
    profile = Profile.parse({"zero_optimization": {"stage": 3, **zero}}, "z.json")
    return leaf_problems(profile, model)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [("classes", ["MixtralDecoderLayer"], ["MixtralModel"]),
     ("names", ["model.layers.0", "model.embed_tokens"], ["model"]),
     ("name_suffixes", [".mlp", "lm_head"], ["del"])],
)  # fmt: skip
def test_a_leaf_module_that_contains_the_embeddings_is_refused(key, good, bad) -> None:
    assert problems_of(toy_model("mixtral"), leaf_module={key: good}) == []
    [problem] = problems_of(toy_model("mixtral"), leaf_module={key: bad})
    assert problem.startswith("z.json: zero_optimization.leaf_module: ")
    assert "makes MixtralModel a leaf module" in problem
