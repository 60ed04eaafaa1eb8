"""Which models each FlashAttention version can train on which GPU, tested without a GPU."""

import pytest
import torch
from transformers import AutoConfig, GptOssForCausalLM
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX

from zerolm.attention import choice, flash
from zerolm.common.errors import ConfigError

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
HOPPER, BLACKWELL, CONSUMER = 9, 10, 12


def config_of(family="llama", **more):
    return AutoConfig.for_model(family, **SIZES, **more)


def test_supported_gpus_are_those_with_a_backward_pass():
    for version, cards in {2: [8, 9, 10, 12], 3: [9], 4: [9, 10, 11, 12]}.items():
        good = [card for card in range(7, 14) if not flash.gpu_problem(version, card)]
        assert set(cards) <= set(good) and 7 not in good
        assert version == 2 or good == cards
        known = FLASH_ATTENTION_COMPATIBILITY_MATRIX[version].get("cuda_min_major_version", 8)
        assert min(good) >= known


@pytest.mark.parametrize(
    ("version", "family", "more", "card", "complaint"),
    [
        (2, "llama", {"attention_dropout": 0.1}, HOPPER, None),
        (
            3,
            "llama",
            {"attention_dropout": 0.1},
            HOPPER,
            "not support dropout, but the model has attention",
        ),
        (
            4,
            "gpt2",
            {"attn_pdrop": 0.1},
            BLACKWELL,
            "not support dropout, but the model has attn_pdrop",
        ),
        (2, "llama", {"head_dim": 320}, HOPPER, "up to 256"),
        (4, "llama", {"head_dim": 60}, HOPPER, "multiples of 8"),
        (4, "llama", {"head_dim": 192}, HOPPER, None),
        (4, "llama", {"head_dim": 192}, BLACKWELL, "up to 128, and 256, on this GPU"),
        (4, "llama", {"head_dim": 256}, BLACKWELL, None),
        (4, "llama", {"head_dim": 256}, CONSUMER, "up to 128 on this GPU"),
        (4, "gemma2", {"head_dim": 256}, BLACKWELL, "attn_logit_softcapping"),
        (4, "gemma2", {"head_dim": 256}, HOPPER, None),
        (4, "deepseek_v3", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}, BLACKWELL, "192"),
        (2, "gpt_oss", {}, HOPPER, "not among the kernels of GptOssForCausalLM"),
        (4, "gpt_oss", {}, HOPPER, None),
    ],
)
def test_models_that_a_kernel_does_not_support_are_refused(
    version, family, more, card, complaint
) -> None:
    found = flash.model_problem(config_of(family, **more), f"flash_attention_{version}", card)
    assert (complaint is None) == (found is None), found
    assert complaint is None or complaint in found


def test_auto_skips_a_kernel_without_dropout(monkeypatch):
    """On Hopper with all three packages auto would take version 3 without the check."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash, "_is_installed", lambda version: True)
    monkeypatch.setattr(flash, "trial_problem", lambda *_: None)

    def auto(**more):
        return choice.choose_attention(config_of(**more), "auto", "cuda", torch.bfloat16)

    assert auto() == "flash_attention_3"
    assert auto(attention_dropout=0.1) == "flash_attention_2"
    assert GptOssForCausalLM._compatible_flash_implementations


def test_auto_skips_an_installed_package_that_fails_and_says_why(monkeypatch):
    """The metadata of a wheel for another torch is in order; its import, or the kernel, fails."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(flash, "_is_installed", lambda version: True)
    monkeypatch.setattr(torch, "device", lambda kind, device=torch.device: device("cpu"))

    def load(name):
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10\nmore")

    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", load)
    given = config_of(), "cuda", torch.bfloat16
    chosen = choice.choose_attention(given[0], "auto", *given[1:])
    assert chosen == "sdpa"
    notice = choice.failed_kernels_notice(given[0], chosen, *given[1:], masked=False)
    reason = "does not run here (flash_attn_2_cuda.so: undefined symbol: _ZN3c10)"
    assert notice == (
        f"attention: sdpa, since flash_attention_3 {reason}, flash_attention_2 {reason}"
    )
    with pytest.raises(ConfigError, match="'flash_attention_2' does not run here"):
        choice.choose_attention(given[0], "flash_attention_2", *given[1:])
