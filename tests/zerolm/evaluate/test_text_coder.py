"""Text is tokenized as in lm-eval, with tokenizers of transformers and tiktoken."""

import pytest
import tiktoken
from transformers import AutoTokenizer

from data_prep.tokenizer.load import load_tokenizer
from tests.data_prep.templates import with_template
from tests.texts import VOCABULARY, paragraphs, write_tokenizer
from zerolm.common.errors import ConfigError
from zerolm.evaluate.likelihood import Row
from zerolm.evaluate.text_coder import TextCoder, max_length, prompt_ids


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("coder") / "tokenizer")


@pytest.fixture
def with_tiktoken(tmp_path, monkeypatch):
    """The copy that data_prep keeps of a tiny tiktoken encoding, with a gap in its ids."""
    encoding = tiktoken.Encoding(
        "tiny",
        pat_str=r"\w+|\W",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    load_tokenizer("tiktoken:tiny").write_copy(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("The class", " statement"), ("The class  ", " statement"), ("", "The class"), ("A", "b")],
)
def test_rows_equal_those_of_lm_eval(directory, context, continuation) -> None:
    from lm_eval.api.model import TemplateLM

    coder = TextCoder(directory)

    class Theirs(TemplateLM):
        eot_token_id = coder.eos_id
        loglikelihood_rolling = generate_until = None

        def tok_encode(self, string, add_special_tokens=None, **_):
            return AutoTokenizer.from_pretrained(directory).encode(string)

        def _loglikelihood_tokens(self, requests, **_):
            return requests

    request = type("Request", (), {"args": (context, continuation)})
    ((_, before, scored),) = Theirs().loglikelihood([request], disable_tqdm=True)
    assert coder.row(context, continuation) == Row(before + scored, len(scored))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_template_never_takes_the_place_of_an_answer(directory, tmp_path, before, after) -> None:
    """Its BOS precedes texts as it does in the shards, and its EOS is left out."""
    tokenizer = with_template(directory, tmp_path / "tokenizer", before, after)
    plain = AutoTokenizer.from_pretrained(directory)
    whole = AutoTokenizer.from_pretrained(tokenizer)
    context, answer = plain.encode("The class"), plain.encode(" statement")
    bos = [whole.bos_token_id]
    assert whole.encode("The class") == bos * before + context + [plain.eos_token_id] * after
    for given, expected in ((None, bos * before), ([], []), (bos, bos)):
        coder = TextCoder(tokenizer, plain.eos_token_id, given)
        row = coder.row("The class", " statement")
        assert row == Row([*expected, *context, *answer], len(answer))
        assert prompt_ids(coder, "The class") == [*expected, *context]
        assert prompt_ids(coder, "") == (expected or [plain.eos_token_id])
        assert coder.encode("<bos>The class") == [*bos, *context]  # no second one
        trained = expected or [plain.eos_token_id] if before else bos
        assert coder.row("", "The class") == Row([*trained, *context], len(context))


def test_decoding_restores_the_text_and_skips_unknown_ids(directory, with_tiktoken) -> None:
    for coder in (TextCoder(directory), TextCoder(with_tiktoken)):
        for text in (*paragraphs()[:20], "naïve – 雪"):
            ids = coder.encode(text)
            assert coder.decode(ids) == text
            outside = [*ids, VOCABULARY + 100, coder.eos_id]
            assert coder.decode(outside, special_tokens=False) == text
            assert coder.decode(outside) == text + "<|endoftext|>"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        TextCoder(tmp_path / "none")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        TextCoder(tmp_path)


def test_max_length_equals_that_of_lm_eval(directory) -> None:
    from lm_eval.models.utils import resolve_max_length
    from transformers import AutoConfig

    tokenizer = AutoTokenizer.from_pretrained(directory)
    for kind in ("llama", "gpt2", "mamba", "bloom", "mixtral"):
        config = AutoConfig.for_model(kind)
        assert max_length(config, tokenizer) == resolve_max_length(config, tokenizer)
    assert max_length(AutoConfig.for_model("mpt", max_seq_len=64), tokenizer) == 64
