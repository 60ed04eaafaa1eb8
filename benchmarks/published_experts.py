"""Compares plans of divided experts with published throughputs that no cost was fitted to.

    python -m benchmarks.published_experts > benchmarks/results/published_experts.md

Each row is planned as `zerolm plan` does, with the published devices, batch, micro-batch and
recomputation, and with what `--search` finds for the same batch. Routers of the published runs are
replaced by even ones, so plans assume even ones too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.tables import table
from launch.estimate.collectives import COLLECTIVE_EFFICIENCY
from launch.estimate.estimate import Assumptions, Estimate, estimate
from launch.estimate.expert_exchange import exchange_seconds
from launch.estimate.planned_run import plan_run
from launch.estimate.search import Candidate, profile_of, search
from launch.estimate.step_time import COSTS, StepTime, step_time
from zerolm.common.values import shown_bytes
from zerolm.config.settings import Recompute
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import exchange, hardware

HOST = 8
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "GPT-OSS 20B": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "tie_word_embeddings": False,
    },
    "Nemotron 3 Nano 30B-A3B": {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688,
        "intermediate_size": 1856, "layers_block_type": [LAYERS[each] for each in NANO],
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "max_position_embeddings": 262144, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "n_shared_experts": 1, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
AUTOMODEL = (
    "[AutoModel](https://github.com/NVIDIA-NeMo/Automodel/blob/36044ad3d/docs/"
    "performance-summary.mdx)"
)
BRIDGE = (
    "[Megatron-Bridge](https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987df/docs/"
    "performance-summary-archive.md)"
)
NATIVE = "transformers 5 (below)"
LINKS = (50, 200, 400, 3200)  # Gbit/s of a host
BATCHES = (256, 1024)  # sequences of a step


@dataclass(frozen=True)
class Published:
    """A reported throughput on H100s, in sequences of `seq_len` tokens.

    Attributes:
        batch: sequences of a step; `micro` of a rank's micro-batch.
        rates: tokens per second and device, lowest and highest of the releases.
        degree: number of ranks over which its experts are divided; 1: ZeRO-3 (FSDP).
        what: what the source says of it beyond that.
    """

    source: str
    model: str
    devices: int
    degree: int
    batch: int
    micro: int
    recompute: Recompute
    rates: tuple[int, ...]
    what: str
    seq_len: int = 4096


ROWS = (
    Published(AUTOMODEL, "Qwen3-30B-A3B", 8, 8, 512, 4, True, (11842, 12040), "bf16, DeepEP, TE"),
    Published(AUTOMODEL, "Nemotron 3 Nano 30B-A3B", 8, 8, 512, 4, True, (16789,),
              "bf16, DeepEP, TE"),
    Published(AUTOMODEL, "GPT-OSS 20B", 8, 8, 256, 2, False, (13058,), "bf16, DeepEP, TE, "
              "FlexAttention"),
    Published(BRIDGE, "Qwen3-30B-A3B", 16, 8, 1024, 1, False, (8826, 8960),
              "fp8, its experts over 16"),
    Published(BRIDGE, "Qwen3-30B-A3B", 16, 8, 512, 2, False, (5113, 9058),
              "fp8, two pipeline stages"),
    Published(BRIDGE, "Nemotron 3 Nano 30B-A3B", 16, 8, 1024, 1, True, (14336, 14890), "fp8",
              8192),
    Published(NATIVE, "Qwen3-30B-A3B", 8, 1, 8, 1, True, (3075,), "bf16, FSDP2; batch assumed"),
    Published(NATIVE, "Nemotron 3 Nano 30B-A3B", 8, 1, 8, 1, True, (4583,),
              "bf16, FSDP2; batch assumed"),
)  # fmt: skip


def document() -> str:
    """Return the text of benchmarks/results/published_experts.md."""
    models = {name: Model.from_config(config_of(values), name) for name, values in MODELS.items()}
    rows, kernels = [], []
    for each in ROWS:
        model = models[each.model]
        found = plan(each, model)
        memory = shown_bytes(found.memory.used) + ("" if found.memory.fits else ", does not fit")
        rows.append(
            [
                each.source,
                each.model,
                each.devices,
                f"{each.batch} x {each.seq_len}",
                f"{each.micro}{', recomputed' if each.recompute else ''}",
                each.what,
                " to ".join(f"{rate:,}" for rate in each.rates),
                f"{rate(found):,.0f}",
                errors(rate(found), each),
                memory,
                shown(chosen(searched(each, model))),
            ]
        )
        if each.degree > 1:
            seconds = [step.seconds for step in with_other_kernels(found)]
            rates = [each.batch * each.seq_len / each.devices / one for one in seconds]
            kernels.append(
                [
                    each.model,
                    each.devices,
                    f"{max(each.rates):,}",
                    *(f"{one:,.0f} ({errors(one, each)})" for one in rates),
                ]
            )
    head = [
        "source", "model", "H100", "batch", "micro-batch", "with", "published", "planned",
        "error", "memory of a device", "`--search`, same batch",
    ]  # fmt: skip
    steps = [
        "model", "H100", "published", "planned", "fused element-wise operations",
        "also experts as fast as other products", "also a hidden exchange",
    ]  # fmt: skip
    return DOCUMENT.format(
        published=table(head, rows),
        kernels=table(steps, kernels),
        links=links(models["Qwen3-30B-A3B"]),
    )


def config_of(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


def assumed(imbalance: float = 1.0) -> Assumptions:
    return Assumptions(2.2e-5, 600, 2e9, imbalance)


def settings_of(each: Published, **more: Any) -> RunSettings:
    tokens = each.batch * each.seq_len
    return RunSettings(
        seq_len=each.seq_len, batch_tokens=tokens, total_tokens=tokens,
        explicit=frozenset({"batch_tokens", "micro_batch_size"}), **more,
    )  # fmt: skip


def plan(each: Published, model: Model) -> Estimate:
    """Return the estimate of a row as published."""
    device = hardware.load("H100", {})
    divided = each.degree > 1
    settings = settings_of(
        each, micro_batch_size=each.micro, gradient_checkpointing=each.recompute,
        expert_parallel=each.degree if divided else None,
    )  # fmt: skip
    profile = profile_of(1 if divided else 3, "none", device)
    run = plan_run(model, profile, settings, device, each.devices, HOST, rank_imbalance=1.0)
    return estimate(run, assumed())


def with_other_kernels(found: Estimate) -> list[StepTime]:
    """Return the step as planned, with fused element-wise operations, then also with experts'
    products as fast as others, and then also with nothing waiting for the exchange.
    """
    run = found.run
    fused = replace(COSTS, eager_passes=COSTS.compiled_passes)
    equal = replace(fused, experts=1.0)
    steps = [step_time(run, costs=costs) for costs in (COSTS, fused, equal)]
    hidden = exchange_seconds(run, COLLECTIVE_EFFICIENCY)
    return [*steps, replace(steps[-1], exposed=max(0.0, steps[-1].exposed - hidden))]


def searched(each: Published, model: Model) -> Sequence[Candidate]:
    settings, device = settings_of(each), hardware.load("H100", {})
    return search(model, settings, device, each.devices, HOST, assumed())


def chosen(candidates: Sequence[Candidate]) -> Candidate | None:
    return next((each for each in candidates if each.rejected is None), None)


def rate(found: Estimate) -> float:
    return found.tokens_per_second / found.run.devices


def errors(planned: float, each: Published) -> str:
    found = [planned / published - 1 for published in each.rates]
    return " to ".join(dict.fromkeys(f"{error:+.0%}" for error in found))


def shown(best: Candidate | None) -> str:
    if best is None or best.found is None:
        return "nothing fits"
    settings = best.found.run.settings
    again = {False: "", True: ", recomputed"}.get(settings.gradient_checkpointing, ", selective")
    return f"{rate(best.found):,.0f}: {best.profile.name}, {settings.micro_batch_size}{again}"


def links(model: Model) -> str:
    """Return a table of what `--search` chooses by the links between hosts, and on one host."""
    rows = []
    for devices, gigabits, batch in [
        *((64, gigabits, batch) for batch in BATCHES for gigabits in LINKS), (8, None, BATCHES[0])
    ]:  # fmt: skip
        row = Published("", "", devices, 8, batch, 1, False, (), "")
        changed = {} if gigabits is None else {"inter_node": gigabits / 8 * 1e9 / HOST}
        device = hardware.load("H200" if gigabits is None else "H100", changed)
        settings = settings_of(row)
        found = search(model, settings, device, devices, HOST, assumed(exchange.IMBALANCE))
        exact = [each for each in found if each.rejected is None and "quant" not in name_of(each)]
        divided, gathered, inside = (
            min(filter(is_one, exact), key=lambda one: one.step_seconds, default=None)
            for is_one in (
                lambda one: "experts over" in name_of(one),
                lambda one: re.match(r"ZeRO-3(?! \+ (hpZ|experts))", name_of(one)),
                lambda one: "hpZ" in name_of(one),
            )
        )
        best = exact[0].profile.name if exact else "nothing fits"
        place = "8 H200, one host" if gigabits is None else f"64 H100, {gigabits:,} Gbit/s a host"
        rows.append(
            [
                place,
                f"{batch:,}",
                shown(divided),
                shown(gathered),
                faster(divided, gathered),
                shown(inside) if gigabits else "",
                faster(divided, inside),
                best,
            ]
        )
    head = [
        "devices", "sequences a step", "divided experts", "ZeRO-3", "times as fast",
        "ZeRO-3 with hpZ", "times as fast", "`--search` chooses",
    ]  # fmt: skip
    return table(head, rows)


def name_of(candidate: Candidate) -> str:
    return candidate.profile.name


def faster(one: Candidate | None, other: Candidate | None) -> str:
    return f"{other.step_seconds / one.step_seconds:.2f}" if one and other else ""


DOCUMENT = """# Divided experts: published throughputs, and the choice by links

Tokens per second and H100 that others have reported for mixtures, and what `zerolm plan` predicts
for the same devices, batch, micro-batch and recomputation. No cost of the plan was fitted to them.
`python -m benchmarks.published_experts` prints this page.

{published}

The last column is the best profile that fits, with its micro-batch.

- AutoModel keeps weights and Adam's moments in bf16, without float32 masters (`torch.optim.Adam`),
  and routes evenly by construction (`fake_balanced_gate`); these plans assume even routing too.
  With zerolm's float32 states a 30B does not fit on eight H100 beside its activations, unless the
  optimizer is on the host: the planned rates of such rows only say how fast the step would be.
- Megatron-Bridge's rates are those of its releases 26.02 to 26.06. `--fp8` is refused with divided
  experts, and so is an exchange between hosts: the plan is of bf16 and groups of eight.
- The rows of transformers 5 are its own modules with FSDP2, from NVIDIA's post "Accelerating
  Transformers Fine-Tuning with NVIDIA NeMo AutoModel" of June 2026, read in a
  [copy](https://wpnews.pro/news/accelerating-transformers-fine-tuning-with-nvidia-nemo-automodel.txt).
  It does not say how many micro-batches a step has; one is assumed. zerolm runs the same modules.

## What explains the rest

The same rows with parts of the step replaced, each column with those before it: element-wise
operations as those of a compiled model (Transformer Engine fuses norms, rotary embeddings and
activations); experts' products as fast as other products (the plan takes 1.9 times the time, as
measured of `torch._grouped_mm`); and no wait for the exchange (DeepEP sends a token once to each
rank, and overlaps). In parentheses the error.

{kernels}

- Qwen3-30B-A3B in bf16 is explained within 7%. Of the 38% that the plan is slower, 8 are
  element-wise operations, 11 the experts' products and 24 the exchange, which nothing hides here.
- GPT-OSS is predicted within 8% as it is. Why AutoModel's kernels gain less for it is not known.
- Megatron-Bridge on two hosts is as fast as the plan: its exchange crosses hosts, the plan's does
  not.
- Nemotron: where `mamba_ssm` is not installed, transformers traces the scan of Mamba-2 as plain
  PyTorch, and the plan takes its many element-wise operations for those of the step. A machine
  with the kernel is faster than its plan.

## Divided experts or ZeRO-3

Qwen3-30B-A3B in sequences of 4,096, each profile with its fastest micro-batch and recomputation
that fit, in tokens per second and device; the busiest rank's experts get 1.2 times the mean. ZeRO++
with quantized messages, which changes the curve, is left out.

{links}

Divided experts win where links are slow and micro-batches small: with 4 sequences a device and step
up to 400 Gbit/s a host, with 16 at 50. With more, ZeRO-3 sends its weights once for many tokens,
and hpZ sends them inside hosts for all but the first pass; the exchange grows with the tokens.
"""


if __name__ == "__main__":
    print(document(), end="")
