"""Samples: tokens are drawn as in transformers, and texts depend on their seed only."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from tests.launching import LLAMA, VOCABULARY
from tests.texts import write_tokenizer
from zerolm.common.errors import ConfigError
from zerolm.evaluate.samples import num_points_passed, read_prompts, sample_seed
from zerolm.evaluate.sampling import (
    Prompt,
    SamplingOptions,
    continuation,
    generate,
    streamed_text,
    token_probabilities,
)
from zerolm.evaluate.text_coder import TextCoder, prompt_ids


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.9), (1, 0.1)])
def test_token_probabilities_equal_those_of_transformers(temperature, top_k, top_p) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = 3 * torch.randn(300, generator=generator, dtype=torch.float64)
        scores = logits[None] / temperature
        ids = torch.zeros(1, 1, dtype=torch.int64)
        if top_k:
            scores = TopKLogitsWarper(top_k)(ids, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(ids, scores)
        found = token_probabilities(logits, SamplingOptions(temperature, top_k, top_p))
        torch.testing.assert_close(found, scores[0].softmax(-1))
    assert token_probabilities(logits, SamplingOptions(0.0)).argmax() == logits.argmax()


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf")])
def test_probabilities_are_valid_for_a_diverged_model(worst) -> None:
    logits = torch.zeros(9)
    logits[4] = worst
    for options in (SamplingOptions(0.8, 3, 0.9), SamplingOptions(1.0), SamplingOptions(0.0)):
        for case in (logits, torch.full((9,), worst)):
            probabilities = token_probabilities(case, options)
            assert probabilities.isfinite().all() and probabilities.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings",
    [
        LLAMA,
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    ],
    ids=lambda settings: settings["model_type"],
)
def test_greedy_text_equals_that_of_transformers(settings) -> None:
    torch.manual_seed(2)
    more = {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings | more)).eval()
    prompts = [[5, 6, 7], [9], [400, 3, 2, 1, 8, 30]]
    found = generate(model, [Prompt(ids, 15) for ids in prompts], lambda new: False, device="cpu")
    for ids, new in zip(prompts, found, strict=True):
        inputs = torch.tensor([ids])
        theirs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=15, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        assert new == theirs[0, len(ids) :].tolist()


def test_the_older_name_of_a_cache_is_not_read_where_the_newer_one_is() -> None:
    """It warns, since transformers 5.24."""

    class Outputs:
        logits, cache = torch.eye(5)[None], "state"

        @property
        def past_key_values(self) -> None:
            raise AssertionError("deprecated")

    calls: list[dict] = []
    texts = continuation(lambda **given: calls.append(given) or Outputs(), Prompt([1, 2], 3), "cpu")
    assert len([next(texts) for _ in range(3)]) == 3
    assert [call.get("cache") for call in calls] == [None, "state", "state"]
    assert [call["input_ids"].shape[1] for call in calls] == [2, 1, 1]


def test_a_text_depends_only_on_its_own_seed() -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).eval()
    prompts = [
        Prompt([5, 6], 10, SamplingOptions(1.0), sample_seed(0, 7, number)) for number in range(3)
    ]
    before = torch.get_rng_state()
    together = generate(model, prompts, lambda new: len(new) == 8, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    alone = [generate(model, [p], lambda new: len(new) == 8, device="cpu")[0] for p in prompts]
    assert together == alone and len(set(map(tuple, together))) == 3
    assert all(len(new) == 8 for new in together)


def test_samples_are_due_after_each_doubling_and_at_the_end() -> None:
    total, step = 1 << 20, 1000
    due = [
        tokens
        for tokens in range(step, total + step, step)
        if num_points_passed(tokens, total, None) > num_points_passed(tokens - step, total, None)
    ]
    assert due == [-(-(total >> halvings) // step) * step for halvings in range(10, -1, -1)]
    counts = [num_points_passed(tokens, 1000, 300) for tokens in range(0, 1100, 100)]
    due = [100 * at for at in range(1, 11) if counts[at] > counts[at - 1]]
    assert due == [300, 600, 900, 1000]


def test_prompts_are_read_from_lines_or_json_lines(tmp_path) -> None:
    (tmp_path / "lines.txt").write_text("One day\n\n  two\n")
    assert read_prompts(tmp_path / "lines.txt") == ["One day", "  two"]
    (tmp_path / "some.jsonl").write_text('{"prompt": "a\\nb"}\n{"prompt": ""}\n')
    assert read_prompts(tmp_path / "some.jsonl") == ["a\nb", ""]
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=r"wrong.jsonl:2: .*prompt"):
        read_prompts(tmp_path / "wrong.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "lfs.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:7\n")
    with pytest.raises(ConfigError, match=r"lfs\.txt: is a pointer of Git LFS"):
        read_prompts(tmp_path / "lfs.txt")


# -------------------------------------------------------------------------------------------------
# Text that is printed as it is generated


@pytest.fixture(scope="module")
def coder(tmp_path_factory) -> TextCoder:
    return TextCoder(write_tokenizer(tmp_path_factory.mktemp("sampling") / "tokenizer"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    settings = LLAMA | {
        "vocab_size": VOCABULARY, "initializer_range": 0.3, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()


def pieces(model, coder, text, length=20, temperature=0.0, seed=0) -> list[str]:
    prompt = Prompt(prompt_ids(coder, text), length, SamplingOptions(temperature), seed)
    return list(streamed_text(model, coder, prompt))


def test_the_pieces_of_a_text_are_that_of_transformers(model, coder) -> None:
    text = "The class statement"
    inputs = coder.tokenizer(text, return_tensors="pt")
    theirs = model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)
    ours = pieces(model, coder, text)
    assert len(ours) > 5
    assert text + "".join(ours) == coder.tokenizer.decode(theirs[0]).rstrip("\ufffd")


def test_a_piece_never_holds_a_part_of_a_character(coder) -> None:
    """A model that copies its prompt: tokens of single bytes make characters of four."""
    text = "\u00e9\U0001f40d\u6f22 end"
    ids = coder.encode(text)
    assert len(ids) > len(text)

    class Echo(torch.nn.Module):
        device, generation_config = "cpu", None
        config = AutoConfig.for_model(**LLAMA | {"vocab_size": VOCABULARY})

        def forward(self, input_ids, **_):
            place = input_ids.shape[1] - 1  # the prompt is one token
            logits = torch.zeros(1, 1, VOCABULARY)
            logits[0, 0, (ids + [coder.eos_id])[place]] = 1
            return type("Output", (), {"logits": logits})()

    ours = pieces(Echo(), coder, "a", 50)  # the EOS token ends it
    assert "".join(ours) == text and not any("\ufffd" in piece for piece in ours)


def test_a_text_ends_at_the_models_maximum(model, coder) -> None:
    ours = "".join(pieces(model, coder, "The", 1000))
    assert ours == "".join(pieces(model, coder, "The", 64 - len(coder.encode("The"))))
    with pytest.raises(ConfigError, match=r"the prompt has .* maximum is 64. Use a shorter one"):
        pieces(model, coder, "word " * 100)


def test_each_seed_gives_a_text_of_its_own_and_the_same_again(model, coder) -> None:
    first, second, again = (pieces(model, coder, "The class", 8, 1.0, seed) for seed in (0, 1, 1))
    assert second == again and first != second
