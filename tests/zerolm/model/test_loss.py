import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.launching import LLAMA
from zerolm.model.forward import token_losses
from zerolm.model.loss import (
    IGNORED,
    balance_loss,
    choice_shares,
    cross_entropies,
    router_z_loss,
    sums_by_source,
)


@pytest.fixture(params=["sdpa", "eager"])
def model(request) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=request.param)


def test_the_mean_token_loss_equals_hugging_faces_loss(model) -> None:
    ids = torch.randint(0, 512, (3, 17))
    losses, auxiliary = token_losses(model, {"input_ids": ids[:, :-1], "targets": ids[:, 1:]})
    assert losses.shape == (3, 16) and auxiliary is None
    torch.testing.assert_close(losses.mean(), model(input_ids=ids, labels=ids).loss)


def test_tokens_of_other_documents_do_not_change_losses(model) -> None:
    first, second = torch.randint(0, 512, (1, 9)), torch.randint(0, 512, (1, 7))
    packed = {
        "input_ids": torch.cat([first, second], 1),
        "targets": torch.randint(0, 512, (1, 16)),
        "document_ids": torch.tensor([[0] * 9 + [1] * 7]),
        "position_ids": torch.cat([torch.arange(9), torch.arange(7)])[None],
    }
    together, _ = token_losses(model, packed)
    alone, _ = token_losses(model, {"input_ids": second, "targets": packed["targets"][:, 9:]})
    torch.testing.assert_close(together[:, 9:], alone, rtol=1e-5, atol=1e-6)
    packed["input_ids"] = torch.cat([torch.randint(0, 512, (1, 9)), second], 1)
    changed, _ = token_losses(model, packed)
    assert torch.equal(together[:, 9:], changed[:, 9:])


MIXTURES = {
    "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.02},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 16, "aux_loss_coef": 0.03},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0,
    },
}  # fmt: skip


def mixture_of(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, output_router_logits=True,
        **MIXTURES[family],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_routers_auxiliary_loss_equals_hugging_faces(family) -> None:
    mixture = mixture_of(family)
    ids = torch.randint(0, 64, (2, 9))
    batch = {"input_ids": ids, "targets": torch.cat([ids[:, 1:], ids[:, :1]], 1)}
    losses, auxiliary = token_losses(mixture, batch)
    assert auxiliary > 0
    ours = losses[:, :-1].mean() + auxiliary
    outputs = mixture(input_ids=ids, labels=ids, output_router_logits=True)
    torch.testing.assert_close(ours, outputs.loss)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_routers_auxiliary_loss_covers_all_documents_of_a_row(family) -> None:
    """In a model without attention to other tokens it does not depend on the documents."""
    mixture = mixture_of(family)
    for name, parameter in mixture.named_parameters():
        if "attn" in name or "attention" in name:
            torch.nn.init.zeros_(parameter)
    ids = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "targets": ids}
    _, whole = token_losses(mixture, batch)
    documents = {
        "document_ids": torch.tensor([[0] * 9 + [1] * 7] * 2),
        "position_ids": torch.cat([torch.arange(9), torch.arange(7)])[None].repeat(2, 1),
    }
    _, apart = token_losses(mixture, batch | documents)
    torch.testing.assert_close(apart, whole)


def test_sums_by_source_exclude_ignored_targets() -> None:
    targets = torch.tensor([[1, IGNORED], [2, 3], [IGNORED, IGNORED]])
    losses = torch.tensor([[1.0, 0.0], [2.0, 3.0], [0.0, 0.0]])
    batch = {"targets": targets, "sources": torch.tensor([1, 0, 1])}
    sums = sums_by_source(losses, batch, 3)
    assert sums.tolist() == [[5.0, 1.0, 0.0], [2.0, 1.0, 0.0]]


def test_sums_of_text_leave_out_special_tokens_and_the_space_before_a_document() -> None:
    # ids: 0 EOS, 1 "▁a", 2 "bc"
    table = torch.tensor([[0, 2, 2], [0, 1, 2]])
    batch = {
        "input_ids": torch.tensor([[1, 2, 0, 1], [0, 2, 1, 0]]),
        "targets": torch.tensor([[2, 0, 1, 2], [1, IGNORED, 1, IGNORED]]),
        "sources": torch.tensor([0, 1]),
    }
    losses = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 0.0, 32.0, 0.0]])
    sums = sums_by_source(losses, batch, 2, table)
    assert sums.tolist() == [[15.0, 48.0], [4.0, 2.0], [13.0, 48.0], [5.0, 3.0]]
    assert sums_by_source(losses, batch, 2, table[:1])[3].tolist() == [6.0, 4.0]
    assert sums_by_source(losses, batch, 2).tolist() == sums[:2].tolist()


def test_the_balance_loss_of_one_router_and_its_own_loads_is_that_of_transformers() -> None:
    """And the parts of two micro-batches add up to it, with the gradient."""
    torch.manual_seed(0)
    logits = torch.randn(40, 8, requires_grad=True)
    loads = torch.bincount(logits.topk(3, -1).indices.flatten(), minlength=8).tolist()
    expected = load_balancing_loss_func((logits,), num_experts=8, top_k=3)
    [gradient] = torch.autograd.grad(expected, logits)
    parts = [
        balance_loss([part], choice_shares([part], [loads], 3), 40)
        for part in logits.split([10, 30])
    ]
    torch.testing.assert_close(sum(parts), expected)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), logits)[0], gradient)
    # With equal loads, as before the first step, nothing is out of balance.
    before = balance_loss([logits] * 2, choice_shares([logits] * 2, [], 3), 40)
    torch.testing.assert_close(before, torch.tensor(3.0))
    assert torch.autograd.grad(before, logits)[0].abs().max() < 1e-7


def test_the_router_z_loss_is_the_mean_square_of_the_log_of_summed_exponentials() -> None:
    routers = [torch.randn(6, 4), torch.randn(6, 4) + 3]
    squares = [[sum(row.exp()).log() ** 2 for row in logits] for logits in routers]
    parts = [router_z_loss([logits[n : n + 2] for logits in routers], 6) for n in (0, 2, 4)]
    torch.testing.assert_close(sum(parts), torch.tensor(squares).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_loss_has_torchs_values_and_gradients_and_saves_only_the_logits(dtype):
    torch._dynamo.reset()
    compiled = torch.compile(cross_entropies, backend="aot_eager", fullgraph=True)
    logits = (torch.randn(2, 9, 300, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    targets = torch.randint(0, 300, (2, 9))
    targets[0, :3] = IGNORED
    weights, saved = torch.rand(2, 9), []

    def results(function):
        leaf = logits.clone().requires_grad_()
        losses = function(leaf, targets)
        (losses * weights).sum().backward()
        return losses.detach(), leaf.grad

    expected = results(cross_entropies)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: saved.append(one) or one, lambda x: x
    ):
        found = results(compiled)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=1e-6)
    assert not found[0][0, :3].any() and not found[1][0, :3].any()
    assert sum(one.nbytes for one in saved) < logits.nbytes + 40 * targets.numel()
    torch._dynamo.reset()
