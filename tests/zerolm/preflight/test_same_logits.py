"""Rows that depend on other rows, and kernels that compute another function."""

import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.launching import LLAMA, write_json
from tests.model_families.toy_configs import toy_config
from tests.zerolm.preflight.preflight_inputs import command, refusal, write_inputs
from zerolm.attention import flash, varlen
from zerolm.attention.stand_ins import runs_on_cpu
from zerolm.common.errors import Findings
from zerolm.model.model import Model
from zerolm.parts.parse import parse_settings
from zerolm.preflight import check, same_logits

LONGROPE = {
    **toy_config("phi3"), "original_max_position_embeddings": 16, "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    },
}  # fmt: skip
LAYERED = {
    **toy_config("gemma3_text"),
    "rope_parameters": {
        "full_attention": LONGROPE["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
}  # fmt: skip


def compared(values, folder, *flags) -> Findings:
    model = Model.load(str(write_json(folder / "m.json", values)))
    settings, problems = parse_settings(["--seq_len", "48", *flags])
    found = Findings(problems)
    same_logits.check(model, settings, found)
    return found


def row_changes(values, positions):
    """Return how far the last row's logits move with the first row, by transformers alone."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[values["model_type"]](
        **{key: value for key, value in values.items() if key != "model_type"}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(8, 500, positions.shape)
    with torch.no_grad():
        both, alone = (
            model(input_ids=ids[rows], position_ids=positions[rows], use_cache=False).logits[-1]
            for rows in (slice(None), slice(1, None))
        )
    return float((both - alone).abs().max())


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (LONGROPE, "rope_parameters.rope_type"),
        (LAYERED, "rope_parameters.full_attention.rope_type"),
    ],
    ids=["all layers", "some layers"],
)
def test_frequencies_of_the_longest_document_in_a_micro_batch_are_refused(values, key, tmp_path):
    short = torch.arange(12)
    assert row_changes(values, torch.stack([short + 4, short])) == 0
    assert row_changes(values, torch.stack([short + 5, short])) > 1e-3
    (problem,) = compared(values, tmp_path, "--document_mask").problems
    assert problem.startswith(f'{tmp_path}/m.json: {key}: "longrope": the frequencies depend')
    assert problem.endswith("Remove --document_mask, or use --seq_len 16 or less.")
    assert compared(values, tmp_path) == Findings([])
    assert compared(values, tmp_path, "--document_mask", "--seq_len", "16") == Findings([])


def test_dynamic_ntk_is_allowed_up_to_the_length_at_which_it_begins(tmp_path):
    dynamic = {
        **LLAMA, "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    }  # fmt: skip
    short = torch.arange(12)
    assert row_changes(dynamic, torch.stack([short + 4, short])) == 0
    assert row_changes(dynamic, torch.stack([short + 5, short])) > 1e-3
    base = write_inputs(tmp_path)
    write_json(base / "dynamic.json", dynamic)
    change = " --model_config dynamic.json --document_mask --seq_len "
    (problem,) = refusal(base, change + "32", WORLD_SIZE="1")
    assert "32 must not exceed the model's max_position_embeddings 16" in problem
    assert check.check(command(base, change + "16"), {"WORLD_SIZE": "1"}).settings.document_mask
    assert compared(dynamic, tmp_path, "--document_mask", "--seq_len", "16") == Findings([])


@pytest.mark.parametrize(("family", "key"), [("opt", "layerdrop"), ("bart", "decoder_layerdrop")])
def test_layers_skipped_at_random_are_a_notice_on_one_rank_and_refused_on_two(
    family, key, tmp_path
):
    """Two ranks of OPT ended in Gloo's error about sizes, with ZeRO-2 and with ZeRO-3."""
    base = write_inputs(tmp_path)
    write_json(base / "drop.json", {**toy_config(family), key: 0.5})
    (problem,) = refusal(base, " --model_config drop.json", WORLD_SIZE="2")
    assert problem.startswith(f"{base}/drop.json: {key}: 0.5: each rank would skip other layers")
    assert problem.endswith("Use 0.0, or one rank.")
    plan = check.check(command(base, " --model_config drop.json"), {"WORLD_SIZE": "1"})
    assert any(f"{key} is 0.5: dropout differs between" in line for line in plan.notices)


def test_a_model_that_normalises_over_the_rows_of_a_batch_is_refused(tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self, states):
        return self.weight * states * states.pow(2).mean((0, 2), keepdim=True).rsqrt()

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    (problem,) = compared(LLAMA, tmp_path).problems
    assert problem.startswith(f"{tmp_path}/m.json: the logits of a row change by ")
    assert problem.endswith("and the number of ranks. Use another model_type.")


@pytest.mark.parametrize(
    "values",
    [
        toy_config("phimoe"),
        {
            **{**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
            "router_jitter_noise": 0.3,
        },
    ],
    ids=["sampled experts", "jitter"],
)
def test_random_choices_in_training_are_a_notice(values, tmp_path):
    found = compared(values, tmp_path)
    assert not found.problems
    (notice,) = found.notices
    assert "in training, but not in evaluation, the logits of a row change by" in notice


@pytest.mark.parametrize("flags", [[], ["--document_mask"]], ids=["rows", "documents"])
@pytest.mark.parametrize(
    ("family", "kernel", "answer"),
    [
        ("gpt_oss", "flash_attention_2", "computes another function than eager"),
        ("gpt_oss", "flash_attention_3", "computes another function than eager"),
        ("gpt_oss", "flash_attention_4", ""),
        ("gpt_oss", "varlen", "computes another function than eager"),
        ("gpt_oss", "flex_attention", "not compared"),
        ("gemma2", "sdpa", "cannot compute rows"),
        ("gemma2", "flash_attention_2", ""),
        ("gemma2", "flex_attention", ""),
        ("bert", "flex_attention", ""),
        ("mistral", "varlen", ""),
        ("mistral", "eager", ""),
    ],
)
def test_kernels_chosen_by_hand_compute_the_same_or_are_named(
    family, kernel, answer, flags, tmp_path
):
    """Sinks, soft caps and windows; 4 is the only flash attention that takes sinks."""
    found = compared(toy_config(family), tmp_path, "--attn_implementation", kernel, *flags)
    lines = [*found.problems, *found.notices]
    assert len(lines) == bool(answer), lines
    for line in lines:
        assert line.startswith(f"command line: --attn_implementation: {kernel}")
        assert answer in line


def test_doge_with_flex_attention_is_another_model(tmp_path):
    (problem,) = compared(
        toy_config("doge"), tmp_path, "--attn_implementation", "flex_attention"
    ).problems
    assert "flex_attention computes another function than sdpa" in problem


def reference(query, key, value, seen, scale, softcap, sinks):
    """Return softmax attention of one head, query by query."""
    rows = []
    for place in range(len(query)):
        keys = [other for other in range(len(key)) if seen(place, other)]
        scores = [float(query[place] @ key[other]) * scale for other in keys]
        if softcap:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (math.exp(sinks) if sinks is not None else 0)
        rows.append(sum(w * value[other] for w, other in zip(weights, keys, strict=True)) / total)
    return torch.stack(rows)


@pytest.mark.parametrize("kernel", [*flash.VERSIONS, "varlen"])
def test_stand_ins_compute_attention_within_documents(kernel):
    from types import SimpleNamespace

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    softcap = 2.0 if kernel != "varlen" else None
    sinks = torch.randn(4) if kernel == "flash_attention_4" else None
    query, key = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    config = SimpleNamespace(_attn_implementation=kernel)
    more = {"softcap": softcap, "s_aux": sinks} if kernel != "varlen" else {}
    with runs_on_cpu(kernel):
        output, _ = ALL_ATTENTION_FUNCTIONS[kernel](
            SimpleNamespace(config=config, modules=None), query, key, key, None, scaling=0.3,
            sliding_window=3, cu_seq_lens_q=torch.tensor([0, 6, 10]).int(),
            cu_seq_lens_k=torch.tensor([0, 6, 10]).int(), max_length_q=10, max_length_k=10, **more,
        )  # fmt: skip
    for head in range(4):
        expected = reference(
            query[0, head], key[0, head // 2], key[0, head // 2],
            lambda place, other: place - 3 < other <= place and (place < 6) == (other < 6),
            0.3, softcap, None if sinks is None else float(sinks[head]),
        )  # fmt: skip
        torch.testing.assert_close(output[0, :, head], expected, rtol=1e-4, atol=1e-5)
    assert varlen.VARLEN in {*ALL_ATTENTION_FUNCTIONS}


def test_check_refuses_the_kernel_by_name(tmp_path):
    base = write_inputs(tmp_path)
    write_json(base / "gemma.json", toy_config("gemma2"))
    change = " --model_config gemma.json --attn_implementation sdpa"
    (problem,) = refusal(base, change, WORLD_SIZE="1")
    assert problem.startswith("command line: --attn_implementation: sdpa cannot compute rows")
