"""`ChunkedHead` gives the losses and gradients of the original head."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zerolm.model.live_bytes import LiveBytes
from zerolm.model import activation_memory, chunked_loss
from zerolm.model.forward import token_losses
from zerolm.model.loss import IGNORED, squared_log_partitions

VOCABULARY = 1000
SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}
GATED = {"intermediate_size": 224, "num_key_value_heads": 4}
FAMILIES = {
    "llama": GATED,
    "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},  # tied
    "phi": {**GATED, "resid_pdrop": 0.0},  # with a bias
    "mixtral": {**GATED, "num_local_experts": 4, "output_router_logits": True},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


def model_of(family, dtype=torch.float32, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    return model.train()


def batch_of(rows=2, length=64, vocabulary=VOCABULARY):
    torch.manual_seed(1)
    ids, targets = torch.randint(0, vocabulary, (2, rows, length))
    targets[0, 5:9] = IGNORED
    return {"input_ids": ids, "targets": targets}


def losses_and_gradients(model, precision):
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        losses, auxiliary = token_losses(model, batch_of())
    weights = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)  # each token has its own
    (losses * weights).sum().add(0 if auxiliary is None else auxiliary).backward()
    return losses, auxiliary, [one.grad for one in model.parameters()]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_those_without_chunks(family, precision) -> None:
    plain = model_of(family, DTYPES[precision])
    chunked = copy.deepcopy(plain)
    chunked_loss.install(chunked, 50)  # 128 tokens: the last chunk is not whole
    expected, auxiliary, gradients = losses_and_gradients(plain, precision)
    found, same, others = losses_and_gradients(chunked, precision)
    assert found.dtype == torch.float32 and not found[0, 5:9].any()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (auxiliary is None) == (same is None) and (auxiliary is None or auxiliary == same)
    tolerance = 3e-6 if precision == "fp32" else 1e-2
    for one, other in zip(gradients, others, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() <= tolerance * one.norm()


def test_the_gradient_equals_finite_differences() -> None:
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 3), (5, 3), (5,))
    )
    targets = torch.tensor([0, 4, IGNORED, 2, 2, 1, IGNORED])

    def losses(hidden, weight, bias):
        arguments = (hidden, weight, bias, targets, 3, IGNORED, False)
        return chunked_loss._ChunkedLosses.apply(*arguments)[:, 0]

    plain = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(hidden, weight, bias), targets, reduction="none"
    )
    expected = torch.autograd.grad(plain.square().sum(), (hidden, weight, bias))
    found = torch.autograd.grad(losses(hidden, weight, bias).square().sum(), (hidden, weight, bias))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "phi"])
def test_squared_log_partitions_equal_those_of_all_logits(family, precision) -> None:
    """Against torch's logsumexp, which the loss does not use; losses and squares weighted."""
    plain, batch = model_of(family, DTYPES[precision]), batch_of()
    chunked = copy.deepcopy(plain)
    chunked_loss.install(chunked, 50, squares=True)
    counted = batch["targets"] != IGNORED
    logits = plain(input_ids=batch["input_ids"]).logits.float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), reduction="none"
    ).view_as(batch["targets"])
    squares = torch.logsumexp(logits, -1) ** 2 * counted
    weights = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)
    (losses * weights + 0.01 * squares / weights).sum().backward()
    for model in (chunked, copy.deepcopy(plain)):
        model.zero_grad()
        outputs = []
        found, _ = token_losses(model, batch, outputs.append)
        found_squares = squared_log_partitions(model, outputs[0], batch, found)
        (found * weights + 0.01 * found_squares / weights).sum().backward()
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_squares, squares, rtol=2e-6, atol=1e-6)
        tolerance = 3e-6 if precision == "fp32" else 2e-2  # from float32, torch's is 1.6e-2
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= tolerance * one.grad.norm()


def test_other_calls_return_the_logits_of_the_original_head() -> None:
    plain = model_of("llama")
    chunked = copy.deepcopy(plain)
    chunked_loss.install(chunked, 50)
    ids = batch_of()["input_ids"]
    assert torch.equal(plain(input_ids=ids).logits, chunked(input_ids=ids).logits)
    token_losses(chunked, batch_of())
    assert torch.equal(plain(input_ids=ids).logits, chunked(input_ids=ids).logits)
    assert list(plain.state_dict()) == list(chunked.state_dict())


@pytest.mark.soak
def test_a_compiled_model_has_the_same_losses() -> None:
    model = model_of("llama")
    chunked_loss.install(model, 50)
    expected, _ = token_losses(model, batch_of())
    model.compile(backend="aot_eager")
    found, _ = token_losses(model, batch_of())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert model.get_output_embeddings().weight.grad.norm() > 0


@pytest.mark.parametrize(("precision", "chunk"), [("fp32", 16), ("bf16", 64)])
def test_the_peak_memory_equals_the_prediction(precision, chunk) -> None:
    rows, length, vocabulary = 4, 128, 20_000
    model = model_of("llama", DTYPES[precision], vocab_size=vocabulary)
    config = copy.deepcopy(model.config)
    chunked_loss.install(model, chunk)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)  # gradients are counted elsewhere
    batch = batch_of(rows, length, vocabulary)
    known = [*model.parameters(), *(one.grad for one in model.parameters()), *batch.values()]
    with LiveBytes(known) as live:
        token_losses(model, batch)[0].sum().backward()
    traced = activation_memory.trace(config, length, precision, eager=False)
    predicted = traced.chunked(chunk, config, precision).peak(False, rows)
    print(f"{precision} {chunk}: {live.peak} counted, {predicted / live.peak - 1:+.2%}")
    assert abs(predicted / live.peak - 1) < 0.05
    assert live.peak < 0.5 * traced.peak(False, rows)
