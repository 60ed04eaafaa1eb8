"""Tensor and sequence parallelism give the curve, metrics and weights of a run without them.

The reference is plain PyTorch in one process, or data parallelism for what that does not have:
separate documents, and validation.
"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.end_to_end import plain_pytorch, run_digest
from tests.end_to_end.recipe import (
    BATCH,
    SEED,
    SEQ_LEN,
    STEP_TOKENS,
    STEPS,
    WARMUP_TOKENS,
    profile,
    recipe,
)
from tests.end_to_end.test_parity import assert_equal_to_reference, check_health, check_noise
from tests.launching import LLAMA, rows, run_ranks, write_json
from zerolm.__main__ import main
from zerolm.train.step import seed_step

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}
QWEN3 = {
    **LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16,
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {
    **LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
MORE = ("--gradient_checkpointing",)
CHUNKS = ("--loss_chunk_tokens", 16)

# form, ranks, model, ZeRO stage, bf16, further flags
RUNS = {
    "tensor-2-zero1": (TENSOR, 2, LLAMA, 1, False, ()),
    "tensor-2-zero2-bf16": (TENSOR, 2, LLAMA, 2, True, ()),
    "tensor-2-zero1-bf16": (TENSOR, 2, LLAMA, 1, True, ()),
    "tensor-2x2-zero1": (TENSOR, 4, LLAMA, 1, False, MORE),
    "tensor-2x2-zero2": (TENSOR, 4, LLAMA, 2, False, ()),
    "tensor-2-tied": (TENSOR, 2, TIED, 2, False, ()),
    "tensor-2-qwen2": (TENSOR, 2, QWEN2, 2, False, ()),
    "tensor-2-qwen3": (TENSOR, 2, QWEN3, 2, False, ()),
    "tensor-2-mistral": (TENSOR, 2, MISTRAL, 1, False, ()),
    "sequence-2-zero1": (SEQUENCE, 2, LLAMA, 1, False, ()),
    "sequence-2-zero2": (SEQUENCE, 2, LLAMA, 2, False, CHUNKS),
    "sequence-2-zero3": (SEQUENCE, 2, LLAMA, 3, False, MORE),
    "sequence-2-zero2-bf16": (SEQUENCE, 2, LLAMA, 2, True, ()),
    "sequence-2-zero3-bf16": (SEQUENCE, 2, LLAMA, 3, True, ()),
    "sequence-2x2-zero2": (SEQUENCE, 4, LLAMA, 2, False, ()),
    "sequence-2x2-zero3": (SEQUENCE, 4, LLAMA, 3, False, MORE),
    "sequence-2-tied": (SEQUENCE, 2, TIED, 3, False, ()),
    "sequence-2-qwen2": (SEQUENCE, 2, QWEN2, 2, False, ()),
    "sequence-2-qwen3": (SEQUENCE, 2, QWEN3, 2, False, ()),
    "sequence-2-mistral": (SEQUENCE, 2, MISTRAL, 2, False, ()),
}
CASES = [pytest.param(*RUNS[name], id=name, marks=pytest.mark.soak) for name in RUNS]


def run_flags(tmp_path, form, config, corpus, stage, bf16, micro, *more):
    ds = json.loads(profile(tmp_path / "plain.json", stage, bf16).read_text())
    json_file = write_json(tmp_path / "ds.json", {**ds, **form})
    model = write_json(tmp_path / "model.json", config)
    flags = recipe(model, corpus, tmp_path / "run", json_file, STEPS, micro)
    flags += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    return [*flags, *more]


@pytest.fixture(scope="session")
def reference(corpus):
    known: dict[str, list[plain_pytorch.Step]] = {}

    def curve(config, bf16: bool) -> list[plain_pytorch.Step]:
        key = json.dumps([config, bf16])
        if key not in known:
            known[key] = plain_pytorch.train(config, corpus, bf16=bf16)
        return known[key]

    return curve


def check_run(run_dir, curve, form, bf16) -> None:
    losses = np.array([step.loss for step in curve])
    found = np.array(list(rows(run_dir, "train/loss").values()))
    assert len(found) == STEPS
    print(f"train/loss: at most {np.abs(found / losses - 1).max():.1e} from plain PyTorch")
    np.testing.assert_allclose(found, losses, rtol=5e-3 if bf16 else 1e-5)
    assert_equal_to_reference(
        run_dir, "train/grad_norm", [step.grad_norm for step in curve], 5e-2 if bf16 else 1e-4
    )
    check_health(run_dir, curve, bf16)
    if form is TENSOR:
        check_noise(run_dir, curve, 2, bf16)
    else:
        assert rows(run_dir, "train/noise_scale_tokens") == {}
    by_source = rows(run_dir, "data/counting/loss")
    assert by_source == rows(run_dir, "train/loss")
    tokens = rows(run_dir, "data/counting/tokens")
    assert tokens == {step: step * STEP_TOKENS for step in range(1, STEPS + 1)}


def test_a_tensor_parallel_run_equals_plain_pytorch(tmp_path, corpus, reference) -> None:
    """Its curve, its metrics, and the model that it exports."""
    flags = run_flags(tmp_path, TENSOR, LLAMA, corpus, 2, False, 2)
    done = run_ranks(2, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 x cpu, 1 data parallel x 2 tensor parallel" in done.stdout
    check_run(tmp_path / "run", reference(LLAMA, False), TENSOR, False)
    out = tmp_path / "model"
    assert main(["export", str(tmp_path / "run"), str(out), "--precision", "fp32"]) == 0
    weights = AutoModelForCausalLM.from_pretrained(out).state_dict()
    squares = sum(float(value.double().square().sum()) for value in weights.values())
    norm = reference(LLAMA, False)[-1].param_norms[""]
    assert squares**0.5 == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("form", "ranks", "config", "stage", "bf16", "more"), CASES)
def test_curve_and_health_equal_plain_pytorch(
    tmp_path, corpus, reference, form, ranks, config, stage, bf16, more
) -> None:
    done = run_ranks(ranks, *run_flags(tmp_path, form, config, corpus, stage, bf16, 2, *more))
    assert done.returncode == 0, done.stdout[-4000:]
    check_run(tmp_path / "run", reference(config, bf16), form, bf16)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "stage", "bf16"),
    [
        (TENSOR, 1, True), (TENSOR, 2, True),
        (SEQUENCE, 1, False), (SEQUENCE, 2, True), (SEQUENCE, 3, True),
    ],
    ids=["tensor-1", "tensor-2", "sequence-1-fp32", "sequence-2", "sequence-3"],
)  # fmt: skip
def test_a_killed_parallel_run_equals_an_uninterrupted_one(
    tmp_path, corpus, form, stage, bf16
) -> None:
    """Attention dropout included. bf16 at stage 1 with sequence parallelism is refused."""
    dropping = {**LLAMA, "attention_dropout": 0.1}
    found = {}
    for name, more in (("uninterrupted", {}), ("killed", {"FAULT": "step.begin:1:14:kill"})):
        (tmp_path / name).mkdir()
        flags = run_flags(tmp_path / name, form, dropping, corpus, stage, bf16, 2)
        flags += ["--checkpoint_interval", 6]
        done = run_ranks(2, *flags, **more)
        if more:
            assert done.returncode != 0
            done = run_ranks(2, *flags)
            assert "resume:" in done.stdout, done.stdout[-3000:]
        assert done.returncode == 0, done.stdout[-4000:]
        found[name] = run_digest.digest(tmp_path / name / "run")
    assert run_digest.differences(found["killed"], found["uninterrupted"]) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((SEQUENCE, 2, 2), ({}, 2, 3)),
        (({}, 2, 2), (SEQUENCE, 2, 1)),
        ((SEQUENCE, 2, 3), ({}, 1, 2)),
    ],
    ids=["parallel-then-not", "not-then-parallel", "parallel-then-one-rank"],
)  # fmt: skip
def test_sequence_parallelism_may_change_when_a_run_resumes(
    tmp_path, corpus, reference, first, then
) -> None:
    """Checkpoints do not depend on it. A part is (form of parallelism, ranks, ZeRO stage)."""
    form, ranks, stage = first
    flags = run_flags(tmp_path, form, LLAMA, corpus, stage, False, 2)
    flags += ["--checkpoint_interval", 5]  # the save of step 10 waits for that of step 5
    done = run_ranks(ranks, *flags, FAULT="step.begin:0:12:kill")
    assert done.returncode != 0
    form, ranks, stage = then
    flags = run_flags(tmp_path, form, LLAMA, corpus, stage, False, 2)
    done = run_ranks(ranks, *flags, "--checkpoint_interval", 5)
    assert done.returncode == 0 and "resume:" in done.stdout, done.stdout[-4000:]
    losses = list(rows(tmp_path / "run", "train/loss").values())
    expected = [step.loss for step in reference(LLAMA, False)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.soak
def test_tensor_parallel_checkpoints_cannot_be_resharded(tmp_path, corpus) -> None:
    flags = run_flags(tmp_path, TENSOR, LLAMA, corpus, 2, False, 2)
    assert run_ranks(2, *flags).returncode == 0
    before = sorted((tmp_path / "run").rglob("*"))
    for form, ranks in (({}, 1), ({}, 2), (TENSOR, 4), (SEQUENCE, 2)):
        done = run_ranks(ranks, *run_flags(tmp_path, form, LLAMA, corpus, 2, False, 2))
        assert done.returncode == 2, done.stdout[-3000:]
        assert "tensor_parallel.autotp_size: 2" in done.stdout
        assert "tensor parallelism that it was written with" in done.stdout
        assert "Traceback" not in done.stdout
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.soak
def test_tensor_parallelism_with_documents_and_validation_equals_data_parallelism(
    tmp_path, corpus, held_out
) -> None:
    """With a document mask, gradient checkpointing and validation."""
    more = ["--document_mask", *MORE, "--val_data", held_out, "--eval_interval", 10]
    found = {}
    for name, form in (("plain", {}), ("parallel", TENSOR)):
        (tmp_path / name).mkdir()
        flags = run_flags(tmp_path / name, form, LLAMA, corpus, 2, False, 2)
        done = run_ranks(2, *flags, *more)
        assert done.returncode == 0, done.stdout[-4000:]
        found[name] = {
            key: np.array(list(rows(tmp_path / name / "run", key).values()))
            for key in ("train/loss", "train/grad_norm", "eval/loss", "train/param_norm")
        }
    for key, values in found["plain"].items():
        np.testing.assert_allclose(found["parallel"][key], values, rtol=1e-4, err_msg=key)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("form", "stage"), [(TENSOR, 1), (SEQUENCE, 3)], ids=["tensor", "sequence"]
)
def test_validation_and_export_equal_those_of_data_parallelism(
    tmp_path, corpus, held_out, form, stage
) -> None:
    """The exported weights, and their loss in transformers, which the run itself measured, too."""
    more = ["--val_data", held_out, "--eval_interval", 10]
    found, weights = {}, {}
    for name, keys in (("plain", {}), ("parallel", form)):
        (tmp_path / name).mkdir()
        flags = run_flags(tmp_path / name, keys, LLAMA, corpus, stage, False, 2)
        done = run_ranks(2, *flags, *more)
        assert done.returncode == 0, done.stdout[-4000:]
        found[name] = list(rows(tmp_path / name / "run", "eval/loss").values())
        out = tmp_path / name / "model"
        assert main(["export", str(tmp_path / name / "run"), str(out), "--precision", "fp32"]) == 0
        model = AutoModelForCausalLM.from_pretrained(out)
        weights[name] = model.state_dict()
        assert held_out_loss(model, held_out) == pytest.approx(found[name][-1], rel=1e-5)
    np.testing.assert_allclose(found["parallel"], found["plain"], rtol=1e-5)
    assert list(weights["parallel"]) == list(weights["plain"])
    for name, value in weights["plain"].items():
        assert torch.allclose(weights["parallel"][name], value, rtol=1e-3, atol=1e-5), name


def held_out_loss(model, held_out) -> float:
    """Return the mean loss of a transformers model over all windows."""
    tokens = plain_pytorch.read_tokens(held_out)
    starts = range(0, len(tokens) - SEQ_LEN, SEQ_LEN)
    batch = torch.from_numpy(np.stack([tokens[at : at + SEQ_LEN + 1] for at in starts]))
    with torch.no_grad():
        logits = model(input_ids=batch[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()


@pytest.mark.soak
@pytest.mark.parametrize("form", [TENSOR, SEQUENCE], ids=["tensor", "sequence"])
def test_attention_dropout_of_a_head_is_drawn_by_its_rank(tmp_path, corpus, form) -> None:
    """The reference draws the dropout of each half of the heads from its own generator."""
    dropping = {**LLAMA, "attention_dropout": 0.1}
    done = run_ranks(2, *run_flags(tmp_path, form, dropping, corpus, 2, False, 2))
    assert done.returncode == 0, done.stdout[-4000:]
    register_two_ranks(calls_of_a_step=BATCH // 2 * LLAMA["num_hidden_layers"])
    config = {**dropping, "attn_implementation": "two_ranks"}
    curve = plain_pytorch.train(config, corpus)
    assert_equal_to_reference(tmp_path / "run", "train/loss", [step.loss for step in curve], 1e-5)
    assert_equal_to_reference(
        tmp_path / "run", "train/grad_norm", [step.grad_norm for step in curve], 1e-4
    )


def register_two_ranks(calls_of_a_step: int) -> None:
    """Register an attention that computes the heads of two ranks one after the other."""
    states, calls = [torch.get_rng_state()] * 2, 0

    def attend(module, query, key, value, attention_mask, **more):
        nonlocal calls
        step, call = divmod(calls, calls_of_a_step)
        calls += 1
        outputs = []
        for rank in range(2):
            torch.set_rng_state(states[rank])
            if call == 0:
                seed_step(SEED, step * BATCH, rank)
            heads = (tensor.chunk(2, dim=1)[rank] for tensor in (query, key, value))
            outputs.append(sdpa_attention_forward(module, *heads, attention_mask, **more)[0])
            states[rank] = torch.get_rng_state()
        return torch.cat(outputs, dim=2), None

    ALL_ATTENTION_FUNCTIONS.register("two_ranks", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("two_ranks", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
