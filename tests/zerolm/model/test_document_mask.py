"""A document gives the same logits and gradients in a packed row and alone: kernels x models.

The reference is transformers with the document alone, without mask and positions. The kernels of
flash attention and of varlen, which need a GPU, are replaced in the code paths of transformers and
torch by plain attention over the documents whose boundaries they get.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flash_attention

from tests.zerolm.attention import varlen_on_cpu
from tests.zerolm.train.host_reads import counting
from zerolm.attention import flash as flash_kernel
from zerolm.attention import mask_check
from zerolm.attention import varlen as varlen_kernel
from zerolm.common.errors import ConfigError
from zerolm.data.window_stream import number_documents
from zerolm.model.architecture import causal_lm_class
from zerolm.model.compile import compile_blocks
from zerolm.model.document_mask import (
    chunks_restart_at_documents,
    isolating_inputs,
    isolating_masks,
    layer_types,
    unsupported_reason,
)

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
SMALL = {"num_key_value_heads": 2, "intermediate_size": 48}
EXPERTS = {"num_key_value_heads": 2, "intermediate_size": 24}
ROUTED = {"output_router_logits": True, "sliding_window": None}
ROBERTA = {
    "intermediate_size": 48, "is_decoder": True, "pad_token_id": 3, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
MODELS = {
    "llama": ("llama", SMALL),
    "qwen3": ("qwen3", SMALL | {"head_dim": 8}),
    "mistral-sliding": ("mistral", SMALL | {"sliding_window": 5}),
    "gemma3-both": ("gemma3_text", SMALL | {
        "head_dim": 8, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "llama4-chunked": ("llama4_text", EXPERTS | {
        "head_dim": 8, "attention_chunk_size": 5, "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "pad_token_id": None,
    }),
    "gpt2": ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 48}),
    "mixtral": ("mixtral", EXPERTS | {"num_local_experts": 4, "sliding_window": None}),
    "olmoe": ("olmoe", EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2}),
    # Their router loss takes no mask of four dimensions.
    "mixtral-router": ("mixtral", EXPERTS | ROUTED | {"num_local_experts": 4}),
    "olmoe-router": ("olmoe", EXPERTS | ROUTED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe-router": ("qwen3_moe", EXPERTS | ROUTED | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
    }),
    "jetmoe-router": ("jetmoe", ROUTED | {
        "intermediate_size": 24, "num_key_value_heads": 2, "kv_channels": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    # They do not pass positions to the masks.
    "gpt_oss": ("gpt_oss", EXPERTS | {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "afmoe": ("afmoe", EXPERTS | {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "num_dense_layers": 1, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    # Their positions begin at the padding id + 1.
    **{family: (family, ROBERTA) for family in (
        "roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm",
        "data2vec-text",
    )},
    "xmod": ("xmod", ROBERTA | {"default_language": "en_XX", "languages": ["en_XX"]}),
}  # fmt: skip
# Without a kernel of flash attention, or with one of transformers' choice.
NOT_FLASH = ("llama4-chunked", "gpt_oss", "jetmoe-router")
MASKED = [(name, kernel) for name in MODELS for kernel in ("eager", "sdpa")]
MASKED.remove(("gpt_oss", "sdpa"))  # has no sdpa
# Lengths of the documents of each row; the last is filled up with documents of one EOS each.
CUT = [[7, 1, 12, 4], [3, 9, 12], [24]]
PADDED = [[24], [1, 19, 1, 1, 1, 1]]
EOS = 60
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def build(name, kernel):
    kind, more = MODELS[name]
    config = CONFIG_MAPPING[kind](**SIZES, **more)
    varlen_kernel.register()
    if kernel in FLASH:
        flash_kernel.register(kernel)
    torch.manual_seed(0)
    built = kernel if kernel in ("eager", "sdpa", "flex_attention") else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=built)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # as far from zero as trained weights, so that a leak is seen
            torch.nn.init.normal_(parameter, std=0.15)
    model.config._attn_implementation = kernel
    model.config.use_cache = False
    return model.train()


def packed(cut=CUT):
    """Return a micro-batch of rows of documents, each ending in EOS, and the documents."""
    generator = torch.Generator().manual_seed(1)
    rows, documents = [], []
    for number, lengths in enumerate(cut):
        start = 0
        rows.append([])
        for length in lengths:
            ids = torch.randint(0, EOS, (length,), generator=generator)
            ids[-1] = EOS
            rows[-1].append(ids)
            documents.append((number, start, ids))
            start += length
    rows[0][0][2] = 3  # RoBERTa's padding id, here an ordinary token
    input_ids = torch.stack([torch.cat(row) for row in rows])
    places, numbers, boundaries = number_documents((input_ids == EOS).numpy())
    batch = {
        "input_ids": input_ids,
        "position_ids": torch.from_numpy(places),
        "document_ids": torch.from_numpy(numbers),
        "boundaries": torch.from_numpy(boundaries).int(),
    }
    return batch, documents


def logits_of(model, batch):
    inputs = isolating_inputs(batch, model)
    with isolating_masks(batch, model):
        return model(input_ids=batch["input_ids"], use_cache=False, **inputs).logits


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        name: value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }


def compare(name, kernel, training=True):
    model = build(name, kernel)
    batch, documents = packed()
    together = logits_of(model, batch)
    alone = build(name, "eager")
    alone.load_state_dict(model.state_dict())
    losses, apart = [], []
    for row, start, ids in documents:
        one = alone(input_ids=ids[None], use_cache=False).logits[0]
        piece = together[row, start : start + len(ids)]
        torch.testing.assert_close(piece, one, rtol=1e-4, atol=2e-5)
        losses.append(functional.cross_entropy(piece[:-1], ids[1:], reduction="sum"))
        apart.append(functional.cross_entropy(one[:-1], ids[1:], reduction="sum"))
    if training:
        ours, theirs = gradients(model, sum(losses)), gradients(alone, sum(apart))
        assert ours.keys() == theirs.keys() and ours
        for each, value in theirs.items():
            scale = float(value.abs().max())
            torch.testing.assert_close(ours[each], value, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


@pytest.mark.parametrize(("name", "kernel"), MASKED)
def test_a_document_gives_the_same_results_alone_and_packed(name, kernel):
    if name == "llama4-chunked" and not chunks_restart_at_documents():  # transformers 5.17
        model = build(name, kernel)
        assert "each document's" in unsupported_reason(model.config, type(model), kernel)
        return
    compare(name, kernel)


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, window_size=(-1, -1), **more):
    """Plain attention over each document, with the interface of the varlen kernels."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q) and isinstance(max_seqlen_q, int)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and more["causal"]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = []
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end])
        scores = scores * (more["softmax_scale"] or q.shape[-1] ** -0.5)
        place = torch.arange(end - start)
        distance = place[:, None] - place[None]
        seen = distance >= 0
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v[start:end]))
    return torch.cat(out)


@pytest.fixture
def flash(monkeypatch):
    """Replace the flash attention kernels in transformers; return how often each was called."""
    calls = {"varlen": 0, "dense": 0}

    def ragged(*words, **more):
        calls["varlen"] += 1
        return varlen(*words, **more)

    def dense(q, k, v, **more):
        calls["dense"] += 1
        count, length = q.shape[:2]
        ends = torch.arange(0, count * length + 1, length, dtype=torch.int32)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        more |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length}
        return varlen(*flat, **more).view(q.shape)

    names = "deterministic softcap s_aux learnable_sink block_table page_table cache_seqlens"
    can = dict.fromkeys(names.split(), False)
    can |= dict.fromkeys(("dropout_p", "window_size", "max_seqlen_q", "max_seqlen_k"), True)

    def process(*words, **more):
        return flash_utils._process_flash_attention_kwargs(*words, supports_mapping=can, **more)

    def load(*_, **__):
        paged = hasattr(flash_utils, "_process_with_kvcache_kwargs_fn")  # not in 5.17
        return (dense, ragged, None, None, None), (process, None) if paged else process

    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", load)
    # Float32 is only for this comparison, so that it need not be cast for the kernel.
    monkeypatch.setattr(flash_attention, "get_target_dtype", lambda *_: None)
    return calls


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_FLASH])
def test_flash_attention_gets_the_document_boundaries(name, flash):
    compare(name, "flash_attention_2")
    assert flash == {"varlen": SIZES["num_hidden_layers"], "dense": 0}


@pytest.mark.parametrize("kernel", FLASH)
def test_each_flash_attention_version_gets_the_document_boundaries(kernel, flash, monkeypatch):
    compare("llama", kernel)
    assert flash["varlen"] and not flash["dense"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=kernel), modules=None)
    trial = partial(flash_kernel.attend, module), torch.device("cpu"), torch.float32, 8
    assert flash_kernel.trial_problem(*trial) is None and not flash["dense"]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_FLASH])
def test_varlen_gives_a_document_the_same_results_alone_and_packed(name):
    varlen_on_cpu.LENGTHS.clear()
    compare(name, "varlen")
    documents = [length for row in CUT for length in row]
    assert [documents] * 2 * SIZES["num_hidden_layers"] == varlen_on_cpu.LENGTHS


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flash_attention_2", "varlen"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("cut", [CUT, PADDED])
def test_the_loss_of_a_document_has_no_gradient_in_another(name, kernel, cut, flash):
    model = build(name, kernel)
    batch, documents = packed(cut)
    inputs = []
    model.get_input_embeddings().register_forward_hook(lambda *given: inputs.append(given[-1]))
    logits = logits_of(model, batch)
    for row, start, ids in documents:
        loss = logits[row, start : start + len(ids)].square().sum()
        gradient = torch.autograd.grad(loss, inputs[0], retain_graph=True)[0]
        assert gradient[row, start : start + len(ids)].abs().sum(-1).all()
        gradient[row, start : start + len(ids)] = 0
        assert not gradient.any()


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flash_attention_2", "varlen"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt2"])
@pytest.mark.parametrize("cut", [CUT, CUT[:1]])
def test_the_host_does_not_wait_for_the_device(name, kernel, documents, cut, flash, monkeypatch):
    def forward(query, *others):
        return query * 1, query.new_zeros(query.shape[1], len(query)), query.new_zeros(2)

    monkeypatch.setattr("tests.zerolm.model.test_document_mask.varlen", lambda q, *_, **__: q * 1)
    monkeypatch.setattr(varlen_on_cpu, "forward", forward)
    model, batch = build(name, kernel), packed(cut)[0]
    rows = batch if documents else {"input_ids": batch["input_ids"]}
    with counting() as found:
        logits_of(model, rows)
    kinds = {kind for kind, _ in found}
    assert kinds <= ({"copy"} if kernel == "eager" else set())  # of a 0, in transformers 5.17


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("cut", [CUT, CUT[:1]])
def test_flash_attention_in_compiled_blocks_is_one_graph(cut, documents, monkeypatch):
    """Transformers' function reads the number of its layer, and the positions of a single row."""

    def kernel(query, *_, **__):
        return query * 1

    kernels = kernel, kernel, None, None, None
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: kernels)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(flash_attention, "get_target_dtype", lambda *_: None)
    flash_utils.lazy_import_flash_attention("flash_attention_2")
    torch._dynamo.reset()
    model, graphs = build("llama", "flash_attention_2"), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    batch = packed(cut)[0]
    logits_of(model, batch if documents else {"input_ids": batch["input_ids"]})
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_positions_alone_do_not_isolate_rows_in_flash_attention(flash):
    """Boundaries must be passed: transformers derives them from the positions of one row only."""
    model = build("llama", "flash_attention_2")
    batch, _ = packed()
    right = logits_of(model, batch)
    wrong = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    assert flash["dense"] and not torch.allclose(right, wrong, atol=1e-2)
    assert "attention_mask" not in isolating_inputs(batch, model)


@pytest.mark.parametrize(("name", "kernel"), MASKED)
def test_without_the_mask_results_differ(name, kernel, monkeypatch):
    """Negative control: positions restart, but tokens attend to all earlier ones."""

    def open_inputs(batch, model):
        ones = torch.ones_like(batch["input_ids"])  # transformers#46634
        return {"position_ids": batch["position_ids"], "attention_mask": ones}

    monkeypatch.setitem(globals(), "isolating_inputs", open_inputs)
    monkeypatch.setitem(globals(), "isolating_masks", lambda batch, model: nullcontext())
    with pytest.raises(AssertionError, match="not close"):
        compare(name, kernel, training=False)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3-both", "gpt_neox"])
def test_flex_attention_separates_documents_in_the_forward_pass(name):
    """Flex attention has no backward pass on a CPU. Compiling would take a minute per shape."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        compare(name, "flex_attention", training=False)


def test_sliding_window_layers_are_distinguished_from_full_ones():
    assert layer_types(CONFIG_MAPPING["mistral"](sliding_window=None)) == {"full_attention"}
    assert layer_types(CONFIG_MAPPING["mistral"](sliding_window=9)) == {"sliding_attention"}
    both = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=6)
    assert layer_types(both) == {"sliding_attention", "full_attention"}


def check_mask(model, precision="fp32") -> str:
    settings = SimpleNamespace(seq_len=24, micro_batch_size=2)
    return mask_check.check(model, settings, precision, "cpu")


@pytest.mark.parametrize(
    "name", ["llama", "mistral-sliding", "mixtral", "mixtral-router", "gpt2", "roberta", "afmoe"]
)
def test_the_mask_check_passes_where_documents_are_separated(name):
    model = build(name, "sdpa")
    said = check_mask(model)
    assert said.startswith("documents are kept apart by sdpa: ") and model.training


def test_the_mask_check_compiles_only_what_has_a_mask(monkeypatch):
    torch._dynamo.reset()
    compiled, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend=backend))
    model = build("llama", "sdpa")
    compile_blocks(model)
    assert "kept apart" in check_mask(model)
    assert len(graphs) == 2  # blocks, loss
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_mask_check_refuses_a_kernel_that_ignores_documents(monkeypatch, precision):
    model = build("llama", "eager")
    if precision == "bf16":
        model.bfloat16()
    said = check_mask(model, precision)
    assert "kept apart by eager: losses are bit-identical" in said

    monkeypatch.setattr(
        "zerolm.model.forward.isolating_inputs", lambda *_: {"attention_mask": None}
    )
    monkeypatch.setattr("zerolm.model.forward.isolating_masks", lambda *_: nullcontext())
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda *_: None)
    with pytest.raises(ConfigError, match=r"--document_mask: with eager .* are not kept apart"):
        check_mask(model, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_mask_check_refuses_positions_that_begin_elsewhere(monkeypatch, precision):
    model = build("roberta", "sdpa")
    if precision == "bf16":
        model.bfloat16()
    check_mask(model, precision)
    monkeypatch.setattr(
        "zerolm.model.document_mask.model_positions", lambda batch, model: batch["position_ids"]
    )
    with pytest.raises(ConfigError, match="differ from those of the same document alone by"):
        check_mask(model, precision)


@pytest.mark.parametrize("family", ["blt", "doge", "openai-gpt"])
def test_models_that_no_mask_isolates_are_refused(family):
    config = CONFIG_MAPPING[family]()
    reason = unsupported_reason(config, causal_lm_class(config), "eager")
    assert reason.startswith(causal_lm_class(config).__name__)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_mask_check_refuses_a_single_leaking_layer(monkeypatch, precision):
    """The leak of one layer changes the losses by a quarter of the change without a mask."""
    monkeypatch.setitem(SIZES, "num_hidden_layers", 16)
    model = build("llama", "eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    if precision == "bf16":
        model.bfloat16()
    assert "losses are bit-identical" in check_mask(model, precision)

    def deaf(module, words, more):
        mask = more["attention_mask"]
        length = mask.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        plain = torch.zeros_like(mask).masked_fill(later, torch.finfo(mask.dtype).min)
        return words, {**more, "attention_mask": plain}

    model.model.layers[8].self_attn.register_forward_pre_hook(deaf, with_kwargs=True)
    with pytest.raises(ConfigError, match="are not kept apart"):
        check_mask(model, precision)


def test_the_mask_check_reports_a_model_without_attention_as_not_tested():
    model = build("llama", "eager")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    assert ": not tested, because the loss" in check_mask(model)


def test_the_mask_check_has_a_larger_tolerance_for_experts_in_16_bits():
    model = build("mixtral", "sdpa").bfloat16()
    said = check_mask(model, "bf16")
    assert said.startswith("documents are kept apart by sdpa: ") and "not tested" not in said
