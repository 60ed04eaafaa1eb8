"""Experts divided over ranks give the curve, metrics, weights and files of whole experts.

The reference is plain PyTorch in one process, or ZeRO-1 with whole experts for what that does not
have: separate documents, the average of the weights, validation.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.end_to_end import plain_pytorch, run_digest, runs_in_one_process
from tests.end_to_end.recipe import (
    SEED,
    STEP_TOKENS,
    WARMUP_TOKENS,
    profile,
    recipe,
)
from tests.end_to_end.test_expert_balance import DEEPSEEK, MIXTRAL
from tests.end_to_end.whole_exports import require_whole
from tests.launching import LLAMA, rows, run_ranks, write_json
from zerolm.__main__ import main

STEPS, RATE, EXPERTS = 10, 0.02, 8
QWEN3 = {
    **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16,
    "num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "head_dim": 16,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
MODELS = {"mixtral": MIXTRAL, "qwen3": QWEN3, "deepseek": DEEPSEEK, "gpt-oss": GPT_OSS}
BALANCED = {"deepseek": ("--balance_rate", RATE)}
TIMES = re.compile(r"second|per_second|mfu|memory|_time|throughput|noise_scale|startup|rank_imb")


def flags(base: Path, corpus: Path, run: str, model: dict, stage: int, degree: int, *more,
          bf16: bool = False) -> list[object]:  # fmt: skip
    """Return pretrain.py's flags for a run in `base / run`; degree 1 is whole experts."""
    config = write_json(base / f"{model['model_type']}.json", model)
    json_file = profile(base / f"zero{stage}-{bf16}.json", stage, bf16)
    found = recipe(config, corpus, base / run, json_file, STEPS, 2)
    found += ["--warmup_tokens", WARMUP_TOKENS, "--schedule", "cosine", "--wandb", "off"]
    return [*found, *(["--expert_parallel", degree] if degree > 1 else []), *more]


def without_bias_decay(masters: dict[str, torch.Tensor], weight_decay: float):
    """gpt-oss has a bias for each expert, a matrix that does not decay."""
    decayed = [each for name, each in masters.items() if each.ndim >= 2 and "bias" not in name]
    others = [each for name, each in masters.items() if each.ndim < 2 or "bias" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}]
    groups += [{"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


@pytest.fixture(scope="session")
def reference(corpus):
    known: dict[str, list[plain_pytorch.Step]] = {}

    def curve(name: str, bf16: bool = False, source: Path | None = None):
        key = f"{name} {bf16} {source}"
        if key not in known:
            known[key] = plain_pytorch.train(
                MODELS[name], corpus, steps=STEPS, bf16=bf16, source=source,
                optimizer_of=without_bias_decay,
                balance_rate=RATE if name in BALANCED else None,
            )  # fmt: skip
        return known[key]

    return curve


def differences(run_dir: Path, curve: list[plain_pytorch.Step]) -> dict[str, float]:
    """Return the largest relative difference of each metric from plain PyTorch."""
    expected = {
        "train/loss": [step.loss for step in curve],
        "train/grad_norm": [step.grad_norm for step in curve],
        "train/param_norm": [step.param_norms[""] for step in curve],
        "train/update_ratio": [step.update_ratios[""] for step in curve],
    }
    found = {}
    for key, values in expected.items():
        ours = np.array([*rows(run_dir, key).values()])
        assert len(ours) == STEPS, key
        found[key] = float(np.abs(ours / np.array(values) - 1).max())
    return found


LIMITS = {
    False: {"train/loss": 1e-7, "train/grad_norm": 1e-5, "train/param_norm": 1e-6},
    True: {"train/loss": 5e-3, "train/grad_norm": 5e-2, "train/param_norm": 1e-3},
}


@pytest.mark.parametrize(
    ("ranks", "degree"),
    [
        (2, 2),
        pytest.param(4, 2, marks=pytest.mark.soak),
        pytest.param(4, 4, marks=pytest.mark.soak),
    ],
    ids=["2x1", "2x2", "4x1"],
)
def test_a_run_equals_plain_pytorch(tmp_path, corpus, reference, ranks, degree) -> None:
    """Losses, norms of gradients and weights; all families at ZeRO-3, one of them in bf16."""
    cases = [
        ("mixtral", 1, False), ("qwen3", 2, False), ("deepseek", 1, False), ("gpt-oss", 2, False),
        ("mixtral", 3, False), ("qwen3", 3, False), ("deepseek", 3, False), ("gpt-oss", 3, False),
        ("qwen3", 1, True), ("qwen3", 2, True), ("qwen3", 3, True),
    ]  # fmt: skip
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{name}-{stage}-{bf16}", MODELS[name], stage, degree,
                *BALANCED.get(name, ()), bf16=bf16,
            )
        }
        for name, stage, bf16 in cases
    ]  # fmt: skip
    printed = runs_in_one_process.launch(jobs, tmp_path, ranks)
    assert f"{ranks} data parallel, experts divided over {degree} ranks each" in printed
    for name, stage, bf16 in cases:
        curve = reference(name, bf16)
        found = differences(tmp_path / f"{name}-{stage}-{bf16}", curve)
        print(f"{name} ZeRO-{stage} {'bf16' if bf16 else 'fp32'}:", found)
        assert {key: each for key, each in found.items() if each > LIMITS[bf16].get(key, 1)} == {}
        if name == "mixtral" and ranks == degree:  # all ranks form one group
            loads = [step.routed.sum(0).reshape(2, degree, -1).sum(2) for step in curve]
            ratios = [float((each.max(1) / each.mean(1)).mean()) for each in loads]
            found = rows(tmp_path / f"{name}-{stage}-{bf16}", "router/rank_imbalance")
            np.testing.assert_allclose([*found.values()], ratios)


def muon(path: Path, stage: int, bf16: bool = False) -> Path:
    """Write a DeepSpeed config with Muon."""
    ds = json.loads(profile(path, stage, bf16).read_text())
    ds |= {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02}}, "gradient_clipping": 0.0}
    ds["zero_optimization"]["reduce_scatter"] = stage != 3
    return write_json(path, ds)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_muon_updates_divided_experts_like_whole_ones(tmp_path, corpus, name) -> None:
    """The matrices of gpt-oss's experts are (inputs, outputs). Newton-Schulz is in float32."""
    cases = [(2, 1), (1, 2), (2, 2), (3, 2)]
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"{stage}-{degree}", MODELS[name], stage, degree,
                "--deepspeed_config", muon(tmp_path / f"muon{stage}.json", stage),
            ),
            "exact": True,
        }
        for stage, degree in cases
    ]  # fmt: skip
    runs_in_one_process.launch(jobs, tmp_path)
    for key, limit in (("train/loss", 1e-7), ("train/param_norm", 1e-6)):
        whole, *divided = (
            np.array([*rows(tmp_path / f"{stage}-{degree}", key).values()])
            for stage, degree in cases
        )
        found = [float(np.abs(each / whole - 1).max()) for each in divided]
        print(key, found)
        assert len(whole) == STEPS and max(found) < limit
    for stage in (2, 3):
        run, out = tmp_path / f"{stage}-2", tmp_path / f"model-{stage}"
        assert main(["export", str(run), str(out), "--precision", "fp32"]) == 0


@pytest.mark.soak
def test_compiled_blocks_with_divided_experts_equal_plain_pytorch(
    tmp_path, corpus, reference
) -> None:
    cases = [("mixtral", 1, ("--gradient_checkpointing", "full")), ("gpt-oss", 3, ())]
    jobs = [
        {"flags": flags(tmp_path, corpus, name, MODELS[name], stage, 2, "--compile", *more)}
        for name, stage, more in cases
    ]
    printed = runs_in_one_process.launch(jobs, tmp_path)
    assert "compile: 2 blocks" in printed and "graph breaks" not in printed
    for name, _, _ in cases:
        found = differences(tmp_path / name, reference(name))
        print(name, found)
        assert {key: each for key, each in found.items() if each > LIMITS[False].get(key, 1)} == {}


def test_initial_weights_are_those_of_whole_experts(tmp_path, corpus) -> None:
    """The fingerprint is of all bits."""
    jobs = [
        {"flags": flags(tmp_path, corpus, f"{stage}-{degree}", GPT_OSS, stage, degree), "until": 1}
        for stage, degree in ((1, 1), (1, 2), (3, 2))
    ]
    printed = runs_in_one_process.launch(jobs, tmp_path)
    prints = re.findall("fingerprint ([0-9a-f]+)", printed)
    assert len(prints) == len(jobs) and len(set(prints)) == 1


FEATURES = (
    "--gradient_checkpointing", "full", "--ema_tokens", 4 * STEP_TOKENS, "--corruption_checks",
    "--replay_interval", 3, "--document_mask", "--z_loss", 0.01, "--eval_interval", 5,
    "--eval_tokens", 512,
)  # fmt: skip
OF_LOGITS = ("--global_router_loss", "--router_z_loss", 0.02)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mixtral", (*FEATURES, *OF_LOGITS)),
        ("deepseek", (*FEATURES[:1], "selective", *FEATURES[2:], "--balance_rate", RATE)),
        ("mixtral", ("--agc", 0.02, "--loss_chunk_tokens", 7, "--router_z_loss", 0.02)),
    ],
    ids=["mixtral", "deepseek", "agc"],
)
def test_all_metrics_with_features_are_those_of_whole_experts(
    tmp_path, corpus, held_out, name, more
) -> None:
    """All but times, sizes and the noise scale, which no rank can measure alone."""
    more = (*more, "--val_data", held_out)
    jobs = [
        {"flags": flags(tmp_path, corpus, f"zero{stage}", MODELS[name], stage, degree, *more)}
        for degree, stage in ((1, 1), (2, 2), (2, 3))
    ]
    runs_in_one_process.launch(jobs, tmp_path, 4)
    whole = metrics(tmp_path / "zero1")
    for run in ("zero2", "zero3"):
        divided = metrics(tmp_path / run)
        assert whole.keys() == divided.keys() and len(whole) > 12
        wrong = {
            key: (each, divided[key])
            for key, each in whole.items()
            if not np.allclose(each, divided[key], rtol=1e-6 if "loss" in key[1] else 1e-4)
        }
        assert not wrong, (run, wrong)
        assert "corrupt_step" not in (tmp_path / run / "events.jsonl").read_text()


def metrics(run_dir: Path) -> dict[tuple[int, str], float]:
    """Return {(step, key): value} of all numbers that do not depend on the machine."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            if isinstance(value, (int, float)) and not TIMES.search(key):
                found[row["step"], key] = value
    return found


@pytest.mark.soak
def test_ranks_whose_experts_get_no_token_take_the_same_steps(tmp_path, corpus) -> None:
    """A bias sends all tokens to the first two experts; the weights are read with `--init_from`."""
    model = plain_pytorch.initial_model({**DEEPSEEK, "n_group": 1, "topk_group": 1}, SEED)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.tensor([9.0, 9.0] + [0.0] * (len(bias) - 2)))
    source = tmp_path / "source"
    model.save_pretrained(source)
    jobs = [
        {
            "flags": flags(
                tmp_path, corpus, f"of-{stage}", {**DEEPSEEK, "n_group": 1, "topk_group": 1},
                stage, 4, "--init_from", source,
            )
        }
        for stage in (1, 2, 3)
    ]  # fmt: skip
    runs_in_one_process.launch(jobs, tmp_path, 4)
    curve = plain_pytorch.train(
        {**DEEPSEEK, "n_group": 1, "topk_group": 1}, corpus, steps=STEPS, source=source
    )
    for stage in (1, 2, 3):
        found = differences(tmp_path / f"of-{stage}", curve)
        print(found)
        assert found["train/loss"] < 3e-7 and found["train/grad_norm"] < 1e-5
        unused = rows(tmp_path / f"of-{stage}", "router/unused_experts")
        assert set(unused.values()) == {14 / 16}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("stage", "bf16", "more"),
    [
        (1, True, ()),
        (2, False, ("--memory_checkpoint_interval", 2)),
        (1, False, ()),
        (3, True, ()),
        (3, False, ("--memory_checkpoint_interval", 2)),
        (2, True, ("muon",)),
        (3, False, ("muon",)),
    ],
    ids=[
        "zero1-bf16",
        "zero2-memory",
        "zero1",
        "zero3-bf16",
        "zero3-memory",
        "zero2-bf16-muon",
        "zero3-muon",
    ],
)
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path, corpus, stage, bf16, more) -> None:
    found = {}
    for name, fault in (("uninterrupted", {}), ("killed", {"FAULT": "step.begin:1:9:kill"})):
        (tmp_path / name).mkdir()
        added = [each for each in more if each != "muon"]
        if "muon" in more:
            added += ["--deepspeed_config", muon(tmp_path / name / "muon.json", stage, bf16)]
        arguments = flags(
            tmp_path / name, corpus, "run", DEEPSEEK, stage, 2, *BALANCED["deepseek"], *added,
            "--checkpoint_interval", 3, bf16=bf16,
        )  # fmt: skip
        done = run_ranks(4, *arguments, **fault)
        if fault:
            assert done.returncode != 0
            done = run_ranks(4, *arguments)
            assert "resume:" in done.stdout, done.stdout[-3000:]
            assert "bit-identical to the saved one" in done.stdout
        assert done.returncode == 0, done.stdout[-4000:]
        found[name] = run_digest.digest(tmp_path / name / "run")
    assert run_digest.differences(found["killed"], found["uninterrupted"]) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["deepseek", "gpt-oss"])
def test_a_run_resumes_on_any_topology_and_its_exports_are_whole(
    tmp_path, corpus, reference, name
) -> None:
    """With divided and whole experts on 4, 2 and 1 ranks; exports have the engine's logits."""
    more = BALANCED.get(name, ())
    parts = [
        (4, 1, 2, 2), (4, 3, 2, 3), (4, 3, 1, 4), (4, 3, 4, 5), (4, 2, 4, 6), (1, 1, 1, 7),
        (2, 3, 2, 8), (2, 1, 2, STEPS),
    ]  # fmt: skip
    for number, (ranks, stage, degree, until) in enumerate(parts):
        arguments = flags(tmp_path, corpus, "run", MODELS[name], stage, degree, *more)
        printed = runs_in_one_process.launch(
            [{"flags": arguments, "until": until}], tmp_path, ranks
        )
        assert ("its states will be resharded" in printed) == (number > 0)
        out = tmp_path / f"model-{number}"
        assert main(["export", str(tmp_path / "run"), str(out), "--precision", "fp32"]) == 0
    curve = reference(name)
    found = differences(tmp_path / "run", curve)
    print(found)
    assert found["train/loss"] < 1e-6
    require_whole(tmp_path / "run", out, curve)
