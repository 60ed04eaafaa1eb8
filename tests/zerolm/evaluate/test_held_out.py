"""Loss and bits per byte of a model directory, against a computation by hand on the text."""

import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tests.launching import LLAMA
from tests.texts import VOCABULARY, paragraphs, write_text_shards, write_tokenizer
from zerolm.__main__ import main
from zerolm.common.errors import ConfigError
from zerolm.evaluate.exported_model import evaluate_export
from zerolm.evaluate.validation import validation_loss
from zerolm.parts.settings import RunSettings

SEQ_LEN, SEQUENCES = 32, 12


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a directory with a model that has its tokenizer, and shards of that tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tmp_path_factory.mktemp("exported")
    tokenizer = write_tokenizer(base / "tokenizer")
    write_text_shards(base / "shards", tokenizer)
    config = {**LLAMA, "vocab_size": VOCABULARY + 8, "initializer_range": 0.3}
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    for file in tokenizer.iterdir():
        (base / "model" / file.name).write_bytes(file.read_bytes())
    return base


def by_hand(base, masked: bool) -> tuple[float, float, list[tuple[int, float]]]:
    """Return mean nats and bits per byte of the first windows, from the text's own offsets.

    And the position of each token with its loss.
    """
    from transformers import AutoModelForCausalLM

    backend = Tokenizer.from_file(str(base / "tokenizer" / "tokenizer.json"))
    stream: list[tuple[int, int]] = []  # id, bytes
    for text in paragraphs()[:200]:
        encoding = backend.encode(text)
        taken = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            begin = max(start, taken)  # the tokens of a character share its offsets
            stream.append((token, len(text[begin:end].encode())))
            taken = end
        stream.append((0, 0))
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype="float32").eval()
    nats = count = text_nats = num_bytes = 0
    losses_at = []
    for number in range(SEQUENCES):
        window = stream[number * SEQ_LEN : (number + 1) * SEQ_LEN + 1]
        ids = [token for token, _ in window]
        pieces = [(0, SEQ_LEN)]
        if masked:
            ends = [at + 1 for at, token in enumerate(ids[:-1]) if token == 0]
            pieces = [*zip([0, *ends], [*ends, SEQ_LEN], strict=True)]
        for first, last in pieces:
            if first == last:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([ids[first:last]])).logits[0].double()
            losses = -logits.log_softmax(-1)
            for at in range(first, last):
                token, size = window[at + 1]
                if masked and ids[at] == 0:
                    continue
                loss = float(losses[at - first, token])
                nats, count = nats + loss, count + 1
                losses_at.append((at, loss))
                text_nats, num_bytes = text_nats + loss * (token != 0), num_bytes + size
    return nats / count, text_nats / math.log(2) / num_bytes, losses_at


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_bits_per_byte_equal_those_by_hand(base, tmp_path, masked) -> None:
    mask = ["--document_mask"] if masked else []
    argv = ["evaluate", base / "model", "--val_data", base / "shards", "--seq_len", SEQ_LEN]
    argv += ["--eval_tokens", SEQ_LEN * SEQUENCES + 5, "--output", tmp_path / "out.json", *mask]
    assert main([str(word) for word in argv]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    loss, bits, losses_at = by_hand(base, masked)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert main([str(word) for word in [*argv, "--loss_by_position"]]) == 0
    more = json.loads((tmp_path / "out.json").read_text())["figures"]
    for part, start in {"first": 0, "middle": 12, "last": 24}.items():
        expected = [each for at, each in losses_at if start <= at < start + 8]
        assert more.pop(f"loss_at_{part}_quarter") == pytest.approx(np.mean(expected), rel=1e-6)
    assert more == found, "the same bits with and without the losses by position"


def test_losses_by_position_are_those_of_each_source(base) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32).eval()
    torch.manual_seed(1)
    batches = []
    for sources in ([0, 1], [1, 1]):
        ids, targets = torch.randint(VOCABULARY, (2, 2, 20))
        targets[0, :7] = -100
        batches.append({"input_ids": ids, "targets": targets, "sources": torch.tensor(sources)})
    found = validation_loss(model, batches, ["web", "code"], by_position=True)
    losses = {name: torch.full((20, 4), torch.nan) for name in ("web", "code", "")}
    for number, batch in enumerate(batches):
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits
        each = functional.cross_entropy(logits.mT, batch["targets"], reduction="none")
        each[batch["targets"] < 0] = torch.nan
        for row, source in enumerate(batch["sources"].tolist()):
            for name in ("", ("web", "code")[source]):
                losses[name][:, 2 * number + row] = each[row]
    for name, of_name in losses.items():
        for part, start in {"first": 0, "middle": 7, "last": 15}.items():
            key = "/".join(filter(None, (name, f"loss_at_{part}_quarter")))
            expected = float(of_name[start : start + 5].nanmean())
            assert np.isnan(expected) or found.pop(key) == pytest.approx(expected, rel=1e-5), key
    assert not any("quarter" in key for key in found), "no loss of a quarter without a target"


def test_every_problem_of_the_shards_is_reported(base, tmp_path) -> None:
    from data_prep.tokenizer.bpe import BpeOptions, train_bpe

    train_bpe(paragraphs()[:50], BpeOptions(400), tmp_path / "other", progress=False)
    write_text_shards(tmp_path / "shards", tmp_path / "other")
    without = write_text_shards(tmp_path / "without", base / "tokenizer")
    for file in (without / "tokenizer").iterdir():
        file.unlink()
    (without / "tokenizer").rmdir()
    paths = [str(tmp_path / "shards"), str(without), str(tmp_path / "none")]
    with pytest.raises(ConfigError) as caught:
        evaluate_export(base / "model", RunSettings(val_data=tuple(paths), seq_len=65))
    problems = caught.value.problems
    assert len(problems) == 4
    for start, part in zip(
        problems, ("--seq_len 65", "not produced by the tokenizer", "no such", "none"), strict=True
    ):
        assert part in start
    packed = RunSettings(val_data=(str(base / "shards"),), seq_len=64, packing="best_fit")
    with pytest.raises(ConfigError, match="packing best_fit with --seq_len 64 needs it"):
        evaluate_export(base / "model", packed)


def test_vocabularies_compare_without_special_tokens(base, tmp_path) -> None:
    from zerolm.shards.tokenizer import gives_equal_ids

    tokenizer = Tokenizer.from_file(str(base / "tokenizer" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert gives_equal_ids(base / "tokenizer", tmp_path)
    tokenizer.add_tokens(["quux"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert not gives_equal_ids(base / "tokenizer", tmp_path)


def test_documents_of_the_training_data_are_refused_where_it_is_named(base, tmp_path) -> None:
    from data_prep.__main__ import main as data

    words = ["split", base / "shards", "--output", tmp_path, "--parts", "train=0.5,val=0.5"]
    assert data([str(word) for word in words]) == 0

    def lines(training: object, validation: object) -> list[str]:
        given = {"data": (str(training),)} if training else {}
        settings = RunSettings(
            val_data=(str(validation),), seq_len=SEQ_LEN, eval_tokens=SEQ_LEN, **given
        )
        printed: list[str] = []
        evaluate_export(base / "model", settings, print_line=lambda line: printed.append(str(line)))
        return printed

    note = "note: not compared with the training data. Give its shards by --data"
    assert note in lines(None, tmp_path / "val")
    assert note not in lines(tmp_path / "train", tmp_path / "val")
    for training in (base / "shards", tmp_path / "val", f"{base / 'shards'}=0.7"):
        with pytest.raises(ConfigError, match="they would not be held out"):
            lines(training, tmp_path / "val")
