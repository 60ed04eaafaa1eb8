"""`varlen`, torch's FlashAttention: what it gets, which models and devices it serves, and `auto`.

Its results by document are compared in test_document_mask.py. On a GPU the kernel itself runs.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zerolm.attention import varlen_on_cpu
from tests.zerolm.model.test_document_mask import CUT, build, gradients, logits_of, packed
from zerolm.attention import flash, varlen
from zerolm.attention.choice import choose_attention, dense_mask_notice, needs_mask
from zerolm.model.activation_checkpointing import checkpoint_kwargs
from zerolm.model.document_mask import boundary_arguments

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
BOUNDARIES = (0, 5, 6, 20, 40)


def config_of(family="llama", **more):
    return AutoConfig.for_model(family, **SIZES, **more)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (20, 20), (24, 16)])
def test_each_document_gets_the_attention_of_torch(window, groups, width, value_width):
    """Also with heads that the kernel does not take as they are: padded, or wider than values."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 20, size, requires_grad=True)
        for heads, size in ((4, width), (groups, width), (groups, value_width))
    )
    boundaries = torch.tensor(BOUNDARIES, dtype=torch.int32)
    output, _ = varlen.attend(
        varlen.torch_kernel(), torch.nn.Module(), query, key, value, None,
        sliding_window=window, is_causal=True, **boundary_arguments(boundaries, 20),
    )  # fmt: skip
    expected = torch.zeros(2, 20, 4, value_width)
    for row, start, end in ((0, 0, 5), (0, 5, 6), (0, 6, 20), (1, 0, 20)):
        place = torch.arange(end - start)
        distance = place[:, None] - place
        part = functional.scaled_dot_product_attention(
            *(each[row : row + 1, :, start:end] for each in (query, key, value)),
            attn_mask=(distance >= 0) & (distance < (window or 20)),
            enable_gqa=True,
        )
        expected[row, start:end] = part[0].transpose(0, 1)
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(output)
    ours, torchs = (
        torch.autograd.grad((each * weights).sum(), (query, key, value))
        for each in (output, expected)
    )
    torch.testing.assert_close(ours, torchs)


def test_queries_and_keys_in_float32_are_rounded_to_the_precision_of_values():
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    inputs = query, key, key.bfloat16()
    boundaries = boundary_arguments(torch.tensor([0, 8], dtype=torch.int32), 8)
    kernel = varlen.torch_kernel()
    output, _ = varlen.attend(kernel, torch.nn.Module(), *inputs, None, **boundaries)
    assert output.dtype == torch.bfloat16


def test_selective_checkpointing_keeps_the_output_and_changes_no_gradient():
    def gradients_of(**more):
        model, (batch, _) = build("llama", "varlen"), packed()
        if more:
            model.gradient_checkpointing_enable(more)
        varlen_on_cpu.LENGTHS.clear()
        return gradients(model, logits_of(model, batch).square().sum()), len(varlen_on_cpu.LENGTHS)

    plain, calls = gradients_of()
    selective, again = gradients_of(**checkpoint_kwargs("selective"))
    full, thrice = gradients_of(**checkpoint_kwargs(True))
    assert (calls, again, thrice) == (4, 4, 6)  # two layers, forward and backward
    for name, value in plain.items():
        assert torch.equal(value, selective[name]) and torch.equal(value, full[name])


def test_a_compiled_block_is_one_graph_for_any_number_of_documents():
    torch._dynamo.reset()
    model, graphs = build("llama", "varlen"), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    cuts = [[[24], [24]], CUT[:2], [[4, 20], [20, 1, 1, 1, 1]]]
    expected = [logits_of(model, packed(cut)[0]) for cut in cuts]
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    for cut, logits in zip(cuts, expected, strict=True):
        torch.testing.assert_close(logits_of(model, packed(cut)[0]), logits)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_without_boundaries_text_is_generated_as_by_sdpa():
    model, reference = build("mistral-sliding", "varlen"), build("mistral-sliding", "sdpa")
    ids = torch.randint(4, 60, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 3}
    expected = reference.eval().generate(ids, attention_mask=mask, **settings)
    assert torch.equal(model.eval().generate(ids, attention_mask=mask, **settings), expected)


@pytest.mark.parametrize(
    ("family", "more", "complaint"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 8}, None),
        ("llama", {"attention_dropout": 0.1}, "does not support dropout, but the model has 0.1."),
        ("llama", {"head_dim": 288}, "supports head dimensions up to 256, but the model has 288."),
        ("gemma2", {}, "does not support softcap."),
        ("gpt_oss", {"num_local_experts": 4}, "does not support s_aux."),
        ("llama4_text", {}, "does not support chunked_attention."),
        ("stablelm", {}, "receives no document boundaries from the model."),
        ("openai-gpt", {}, "needs a model with the attention functions of transformers"),
        ("mamba", {}, "does not support linear_attention."),
    ],
)
def test_models_whose_attention_it_would_not_compute_are_refused(family, more, complaint):
    found = varlen.model_problem(config_of(family, **more))
    assert (found is None) == (complaint is None), found
    assert complaint is None or found.startswith(complaint)


def test_devices_without_the_kernel_are_refused(monkeypatch):
    def problem(dtype=torch.bfloat16):
        return varlen.device_problem("cuda", dtype, 64)

    assert varlen.device_problem("cpu", torch.bfloat16, 64).startswith("needs a CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert problem(torch.float32).startswith("needs bf16 or fp16, but this run is in float32.")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert problem().startswith("needs compute capability 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert problem().startswith("needs an NVIDIA GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda query: query)  # 2.10
    assert problem().startswith("needs torch 2.11")


def test_a_trial_on_the_device_finds_a_kernel_that_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cpu, attend = torch.device("cpu"), partial(varlen.attend, varlen.torch_kernel(), None)
    assert flash.trial_problem(attend, cpu, torch.bfloat16, 20) is None

    def fails(*_, **__):
        raise RuntimeError("no kernel image is available\nCompile with ...")

    found = flash.trial_problem(fails, cpu, torch.bfloat16, 20)
    assert found == "does not run here (no kernel image is available). Use auto."


WINDOW = {"sliding_window": 64}


@pytest.mark.parametrize(
    ("installed", "family", "more", "seq_len", "masked", "expected"),
    [
        ((), "llama", {}, 128, True, "varlen"),
        ((), "llama", {}, 128, False, "sdpa"),  # needs no mask
        ((2,), "llama", {}, 128, True, "varlen"),
        ((2, 3), "llama", {}, 128, True, "flash_attention_3"),
        ((2,), "llama", {"attention_dropout": 0.1}, 128, True, "flash_attention_2"),
        ((), "llama", {"attention_dropout": 0.1}, 128, True, "sdpa"),
        ((), "mistral", WINDOW, 128, False, "varlen"),
        ((), "mistral", WINDOW, 64, False, "sdpa"),  # the window contains the row
        ((), "mistral", WINDOW, 64, True, "varlen"),
        ((2, 3), "stablelm", {}, 128, True, "flash_attention_3"),
        ((), "stablelm", {}, 128, True, "sdpa"),
        ((), "gpt_oss", {"num_local_experts": 4}, 128, True, "eager"),
    ],
)
def test_auto_takes_the_fastest_kernel_that_supports_the_model(
    monkeypatch, installed, family, more, seq_len, masked, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash, "_is_installed", installed.__contains__)
    for module in (flash, varlen):
        monkeypatch.setattr(module, "trial_problem", lambda *_: None)
    config, rows = config_of(family, **more), {"seq_len": seq_len, "document_mask": masked}
    chosen = choose_attention(config, "auto", "cuda", torch.bfloat16, **rows)
    assert chosen == expected
    notice = dense_mask_notice(config, chosen, "cuda", torch.bfloat16)
    needs = needs_mask(config, **rows)
    assert not needs or (notice is not None) == (chosen in ("sdpa", "eager")), notice


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("width", [20, 64, 128])
def test_the_kernel_of_the_gpu_computes_what_the_reference_does(window, width):
    """In bf16, against the reference in float32, with documents of 1 to 512 tokens."""
    torch.manual_seed(0)
    lengths = [1, 200, 311, 512, *[1] * 12, 500]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = [torch.randn(3, heads, 512, width).bfloat16() for heads in (4, 2, 2)]
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [each.to(device, dtype).requires_grad_() for each in inputs]
        arguments = boundary_arguments(boundaries.to(device), 512)
        module, kernel = torch.nn.Module(), varlen.torch_kernel()
        output, _ = varlen.attend(kernel, module, *given, None, sliding_window=window, **arguments)
        # The loss of one document: gradients of all others are exactly 0.
        grads = torch.autograd.grad(output.flatten(0, 1)[201:512].float().square().sum(), given)
        results.append([each.detach().float().cpu() for each in (output, *grads)])
    for ours, reference in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0.05, atol=0.05)
    for grad in results[1][1:]:
        flat = grad.transpose(1, 2).flatten(0, 1)
        assert flat[201:512].abs().sum() > 0 and not flat[:201].any() and not flat[512:].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_the_gpu_has_the_losses_of_sdpa_with_a_mask():
    batch = {name: value.cuda() for name, value in packed()[0].items()}
    config = config_of(intermediate_size=128, num_key_value_heads=2, max_position_embeddings=64)
    varlen.register()
    states, logits = None, {}
    for kernel in ("sdpa", "varlen"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
        states = states or model.state_dict()
        model.load_state_dict(states)
        logits[kernel] = logits_of(model.bfloat16().cuda(), batch).float()
    torch.testing.assert_close(logits["varlen"], logits["sdpa"], rtol=0.02, atol=0.02)
