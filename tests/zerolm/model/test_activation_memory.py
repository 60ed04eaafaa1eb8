"""Activation memory traced on the meta device equals what torch saves on the CPU."""

import gc
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launching import LAUNCH_SECONDS, LLAMA, ROOT, environment, free_port
from tests.zerolm.model.live_bytes import LiveBytes
from zerolm.config.settings import SELECTIVE
from zerolm.distributed import layout
from zerolm.model import activation_memory
from zerolm.model.activation_checkpointing import checkpoint_kwargs
from zerolm.model.architecture import decoder_blocks
from zerolm.model.compile import remove_output_recorders
from zerolm.model.forward import token_losses
from zerolm.plan import memory
from zerolm.plan.rank_share import config_of_rank

SEQ_LEN, VOCABULARY = 128, 1000
SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
}
GATED = {"intermediate_size": 224, "num_key_value_heads": 2}
FAMILIES = {
    "llama": GATED,
    "mistral": GATED,
    "qwen3": {**GATED, "head_dim": 32},
    "mixtral": {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {"intermediate_size": 384},
    "gpt2": {"n_positions": 256, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}
SOAKED = ("mistral", "qwen3", "gpt_neox")
EACH_FAMILY = [
    pytest.param(name, marks=pytest.mark.soak if name in SOAKED else ()) for name in FAMILIES
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def saved_bytes(config, precision, attention, checkpointing, backend=None):
    """Count the bytes that autograd saves for one sequence on the CPU, without weights.

    Args:
        backend: of torch.compile, for the blocks.
    """
    model = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[precision], attn_implementation=attention
    )
    model.train().config.use_cache = False
    if checkpointing:  # the reentrant kind saves through the hooks that count here
        model.gradient_checkpointing_enable({"use_reentrant": True})
    for block in decoder_blocks(model) if backend else ():
        remove_output_recorders(model, block)
        block.forward = torch.compile(block.forward, backend=backend)
    kept = list(model.parameters())
    seen = {one.untyped_storage()._cdata for one in kept}
    total = 0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(tensor)
            total += storage.nbytes()
        return tensor

    ids = torch.randint(0, VOCABULARY, (1, SEQ_LEN))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        losses, _ = token_losses(model, {"input_ids": ids, "targets": ids})
    assert losses.requires_grad
    return total


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_saved_bytes_equal_those_of_torch(family, precision):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    for attention in ("sdpa", "eager"):
        traced = activation_memory.trace(config, SEQ_LEN, precision, eager=attention == "eager")
        for checkpointing in (False, True):
            counted = saved_bytes(config, precision, attention, checkpointing)
            error = traced.saved(checkpointing) / counted - 1
            print(f"{family} {precision} {attention} {checkpointing}: {counted}, {error:+.2%}")
            assert abs(error) < 0.10


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES if name != "llama"),
    ],
)
def test_compiled_blocks_save_the_predicted_bytes(family):
    """With kernels that inductor compiles for this CPU, which chooses what is saved."""
    torch._dynamo.reset()
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    counters = {name: dict(counts) for name, counts in torch._dynamo.utils.counters.items()}
    traced = activation_memory.trace(config, SEQ_LEN, "bf16", eager=False, compiled=True)
    assert {name: dict(each) for name, each in torch._dynamo.utils.counters.items()} == counters
    counted = saved_bytes(config, "bf16", "sdpa", False, "inductor")
    plain = activation_memory.trace(config, SEQ_LEN, "bf16", eager=False)
    blocks = counted - (plain.saved(False) - plain.layers)
    print(f"{family}: {blocks} in blocks, {traced.layers / blocks - 1:+.2%}; "
          f"{blocks / plain.layers:.2f} of uncompiled ones")  # fmt: skip
    assert abs(traced.layers / blocks - 1) < 0.10


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_selective_checkpointing_saves_the_predicted_bytes_and_keeps_gradients(family, attention):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    traced = activation_memory.trace(config, SEQ_LEN, "bf16", eager=attention == "eager")
    assert traced.inputs < traced.selective < 0.7 * traced.layers
    ids = torch.randint(0, VOCABULARY, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, SELECTIVE):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
        model.train().config.use_cache = False
        if recompute:
            model.gradient_checkpointing_enable(checkpoint_kwargs(recompute))
        with LiveBytes([*model.parameters(), ids]) as live:
            losses, _ = token_losses(model, {"input_ids": ids, "targets": ids})
            gc.collect()
            counted = sum(live.sizes.values())
        losses.sum().backward()
        gradients.append([one.grad for one in model.parameters()])
        error = traced.saved(recompute) / counted - 1
        print(f"{family} {attention} {recompute}: {counted} live, {error:+.2%}")
        assert abs(error) < 0.10
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("checkpointing", [False, True, SELECTIVE])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("vocabulary", [1000, 20_000])
def test_the_predicted_peak_equals_that_of_live_tensors(vocabulary, precision, checkpointing):
    """Forward and backward on the CPU, counting every storage while it is alive."""
    config = AutoConfig.for_model("llama", **{**SIZES, **GATED, "vocab_size": vocabulary})
    model = AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[precision], attn_implementation="sdpa"
    )
    model.train().config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(checkpoint_kwargs(checkpointing))
    for one in model.parameters():
        one.grad = torch.zeros_like(one)  # gradients are counted elsewhere
    ids = torch.randint(0, vocabulary, (1, SEQ_LEN))
    known = [*model.parameters(), *(one.grad for one in model.parameters()), ids]
    with LiveBytes(known) as live:
        losses, _ = token_losses(model, {"input_ids": ids, "targets": ids})
        losses.sum().backward()
    predicted = activation_memory.trace(config, SEQ_LEN, precision, eager=False).peak(checkpointing)
    error = predicted / live.peak - 1
    print(f"{vocabulary} {precision} {checkpointing}: {live.peak} counted, {error:+.2%}")
    assert abs(error) < 0.05


def test_a_model_that_cannot_be_traced_is_estimated(monkeypatch):
    config = AutoConfig.for_model("llama", **SIZES, **GATED)
    exact = memory.activation_bytes(config, SEQ_LEN, "bf16", False)

    def fails(*words, **more):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(activation_memory, "trace", fails)
    assert memory.activation_bytes(config, SEQ_LEN, "bf16", False) == pytest.approx(exact, rel=0.3)


def test_tracing_does_not_change_transformers():
    from transformers.integrations import moe

    before = moe._grouped_mm
    config = AutoConfig.for_model("mixtral", **SIZES, **FAMILIES["mixtral"])
    activation_memory.trace(config, SEQ_LEN, "fp32", eager=False)
    assert (
        moe._grouped_mm is before
        and config._attn_implementation != activation_memory.META_ATTENTION
    )


@pytest.mark.soak
def test_saved_bytes_of_sharded_matrices_equal_those_of_two_autotp_ranks():
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
    words += [str(free_port()), "-m", "tests.zerolm.model.autotp_activations_worker"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=LAUNCH_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    counted = int(re.search(r"counted=(\d+)", done.stdout)[1])
    config = AutoConfig.for_model(**LLAMA)
    own = config_of_rank(config, layout.Layout(2, tensor=2))
    part, whole = (
        activation_memory.trace(one, 64, "bf16", eager=False).saved(False) for one in (own, config)
    )
    print(f"{counted} counted, the part {part / counted - 1:+.2%}, all {whole / counted - 1:+.2%}")
    assert abs(part / counted - 1) < 0.01 < whole / counted - 1
