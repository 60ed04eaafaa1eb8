"""Compares plans of pipeline stages with published throughputs that no cost was fitted to.

    python -m benchmarks.published_stages > benchmarks/results/published_stages.md

Each row is planned with the published stages, blocks of each, batch and micro-batch: as `zerolm
plan` does for the modules of transformers, and with the fused kernels that Megatron-LM has.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from benchmarks.published_runs.rows import kept_bytes
from benchmarks.tables import table
from launch.estimate.estimate import device_memory
from launch.estimate.pipeline import transfer_seconds
from launch.estimate.planned_run import PlannedRun, plan_run
from launch.estimate.search import profile_of
from launch.estimate.step_time import COSTS, Costs, step_time
from zerolm.ds_config.profile import Profile
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import hardware

FUSED = dataclasses.replace(COSTS, eager_passes=COSTS.compiled_passes)
SCORE_BYTES = 4  # of a head and pair of positions: 16-bit scores, before and after the softmax
HOST = 8


def gpt(width: int, blocks: int, heads: int) -> dict[str, Any]:
    """Return a config like GPT-3; its vocabulary is that of the published parameters."""
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": blocks, "n_head": heads,
        "vocab_size": 32000, "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


MODELS = {
    "GPT 1.5B": gpt(2304, 22, 24),
    "GPT 6.2B": gpt(4096, 30, 32),
    "GPT 14.6B": gpt(5120, 46, 40),
    "GPT 28.3B": gpt(6144, 62, 48),
    "Llama 2 13B": {
        "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
        "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
}  # fmt: skip
ZERO_BUBBLE = (
    "[Zero Bubble](https://github.com/sail-sg/zero-bubble-pipeline-parallelism/blob/3a91d0c8/"
    "paper.pdf)"
)
NEMO = (
    "[NeMo 24.07](https://github.com/NVIDIA/NeMo/blob/070a0bb1/docs/source/performance/"
    "performance_summary.md)"
)


@dataclass(frozen=True)
class Published:
    """A reported throughput of pipeline stages.

    Attributes:
        count: micro-batches of a replica in a step.
        rate: tokens per second and device; `interleaved`: with a chunk for each block; 0: not told.
        memory: bytes of the device that uses most; 0: not told.
        layers: number of blocks of each stage; empty: as a plan divides them.
        fp8: with its products in fp8, which zerolm refuses with stages.
    """

    source: str
    model: str
    device: str
    devices: int
    stages: int
    count: int
    micro: int
    seq_len: int
    rate: float
    interleaved: float = 0.0
    memory: float = 0.0
    layers: tuple[int, ...] = ()
    fp8: bool = False
    eager: bool = False


def _zero_bubble() -> list[Published]:
    """Return the rows of tables 4 and 6: 1F1B of Megatron-LM, one replica of A100 with 80 GB."""
    found = []
    for model, stages, micro, counts, rates, interleaved, memory in (
        ("GPT 1.5B", 8, 6, (24, 32, 64), (11.8, 12.5, 13.6), (13.1, 13.4, 13.9), 30),
        ("GPT 6.2B", 8, 3, (24, 32, 64), (3.50, 3.70, 4.03), (4.01, 4.08, 4.19), 39),
        ("GPT 14.6B", 16, 1, (48, 64, 128), (1.40, 1.49, 1.64), (1.54, 1.59, 1.66), 32),
        ("GPT 28.3B", 32, 1, (96, 128, 256), (0.76, 0.80, 0.88), (0.82, 0.85, 0.90), 43),
        ("GPT 6.2B", 16, 6, (48, 64, 128), (3.38, 3.57, 3.91), (), 61),
        ("GPT 14.6B", 24, 2, (72, 96, 192), (1.52, 1.61, 1.76), (), 44),
        ("GPT 28.3B", 32, 2, (96, 128, 256), (0.82, 0.87, 0.95), (), 69),
    ):
        inside = (MODELS[model]["n_layer"] + 2) // stages
        layers = (inside - 1, *[inside] * (stages - 2), inside - 1)
        for place, count in enumerate(counts):
            found.append(
                Published(
                    ZERO_BUBBLE, model, "A100-80GB", stages, stages, count, micro, 1024,
                    1024 * rates[place], 1024 * interleaved[place] if interleaved else 0.0,
                    memory * 1e9, layers, eager=True,
                )
            )  # fmt: skip
    return found


ROWS = (
    *_zero_bubble(),
    Published(NEMO, "Llama 2 13B", "H100", 16, 4, 32, 1, 4096, 8646, fp8=True),
)  # fmt: skip
# Model, devices, layout, figure, source, and why there is no plan.
OTHERS = (
    ("Llama 3 405B", "8,192 H100", "tensor 8, 16 stages", "430 TFLOP/s",
     "[Llama 3](https://arxiv.org/abs/2407.21783), table 4",
     "tensor and stages; 128 stages in place of both are more than its 126 blocks"),
    ("Llama 3 405B", "16,384 H100", "tensor 8, 16 stages", "400 TFLOP/s", "the same", "the same"),
    ("Llama 3 70B", "64 H100", "tensor 4, 8 stages", "1,602 to 1,621 tokens/s in fp8",
     "[Megatron-Bridge](https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/0a25f911/docs/"
     "performance-summary-archive.md)", "tensor and stages; fp8"),
    ("Llama 3.1 405B", "1,024 H100", "tensor 8, 8 stages, context 2", "292 to 311 tokens/s in fp8",
     "the same", "tensor, stages and context; fp8"),
    ("Llama 3 70B", "64 GB300", "4 stages, 5 chunks each", "4,596 tokens/s in MXFP8",
     "the same", "hardware.json has no GB300, and zerolm no MXFP8"),
    ("Llama 2 70B", "64 H100", "tensor 4, 4 stages", "1,707 tokens/s in fp8", NEMO,
     "tensor and stages; fp8"),
    ("GPT 39B to 1T", "512 to 3,072 A100", "tensor 8, 2 to 64 stages", "",
     "[Megatron-LM](https://github.com/NVIDIA/Megatron-LM/blob/79a3bb6b/examples/sc21/"
     "run_table_1.sh), table 1 of arXiv 2104.04473",
     "tensor and stages; its rates were not seen in a copy"),
    ("Llama 3 70B", "64 H100", "FSDP, context 2", "867 tokens/s",
     "[AutoModel](https://github.com/NVIDIA-NeMo/Automodel/blob/2861c414/docs/"
     "performance-summary.mdx)", "no stages, nor in its other dense rows"),
)  # fmt: skip


@cache
def model_of(name: str) -> Model:
    from transformers import AutoConfig

    return Model.from_config(AutoConfig.for_model(**MODELS[name]), name)


@cache
def plan(row: Published) -> PlannedRun:
    """Return a row as published."""
    device = hardware.load(row.device, {})
    block: dict[str, Any] = {"stages": row.stages}
    if row.layers:
        block["layers"] = list(row.layers)
    profile = profile_of(1, "none", device)
    profile = Profile.parse({**profile.json, "pipeline": block}, profile.name)
    tokens = row.count * row.micro * row.devices // row.stages * row.seq_len
    settings = RunSettings(
        seq_len=row.seq_len, batch_tokens=tokens, total_tokens=tokens, micro_batch_size=row.micro,
        explicit=frozenset({"batch_tokens", "micro_batch_size"}),
        attn_implementation="eager" if row.eager else "auto",
    )  # fmt: skip
    return plan_run(model_of(row.model), profile, settings, device, row.devices, HOST)


def rate(row: Published, costs: Costs = COSTS, kept: float | None = None) -> float:
    """Return planned tokens per second and device."""
    run = plan(row)
    if row.fp8:  # as if it were supported
        settings = dataclasses.replace(run.settings, fp8=True)
        run = dataclasses.replace(run, settings=settings, fp8_share=1.0)
    seconds = step_time(run, costs=costs, kept_bytes=kept).seconds
    return run.settings.batch_tokens / seconds / run.devices


def fused_rate(row: Published) -> float:
    """Return the rate with Megatron-LM's kernels, and attention scores where it keeps them."""
    model = model_of(row.model)
    kept = kept_bytes(model)
    if row.eager:
        text = model.config.get_text_config()
        scores = text.num_attention_heads * row.seq_len * text.num_hidden_layers
        kept += SCORE_BYTES * scores
    return rate(row, FUSED, kept)


def document() -> str:
    """Return the text of benchmarks/results/published_stages.md."""
    rows, memories = [], []
    for row in ROWS:
        planned, fused = rate(row), fused_rate(row)
        used = device_memory(plan(row)).used
        if row.memory:
            memories.append(row.memory / used)
        steps = row.count + row.stages - 1
        rows.append(
            [
                row.source,
                row.model,
                f"{row.devices} {row.device}",
                row.stages,
                f"{row.count} x {row.micro} x {row.seq_len}",
                f"{(row.stages - 1) / steps:.1%}",
                f"{row.rate:,.0f}{' in fp8' if row.fp8 else ''}",
                f"{planned:,.0f}",
                f"{planned / row.rate - 1:+.0%}",
                f"{fused:,.0f}",
                f"{fused / row.rate - 1:+.0%}",
                f"{row.interleaved / row.rate:.3f}" if row.interleaved else "",
                f"{row.memory / 1e9:.0f}" if row.memory else "",
                f"{used / 1e9:.0f}",
            ]
        )
    head = [
        "source", "model", "devices", "stages", "micro-batches", "idle", "published", "planned",
        "error", "with fused kernels", "error", "interleaved, of 1F1B's rate", "GB published",
        "planned",
    ]  # fmt: skip
    same = [row for row in ROWS if not row.fp8]
    few, many = ROWS[0], ROWS[2]
    widest = plan(max(ROWS, key=lambda row: row.devices))
    return DOCUMENT.format(
        rows=table(head, rows),
        others=table(["model", "devices", "layout", "reported", "source", "why"], OTHERS),
        plain=summary([rate(row) / row.rate - 1 for row in same]),
        fused=summary([fused_rate(row) / row.rate - 1 for row in same]),
        published_loss=1 - few.rate / many.rate,
        planned_loss=1 - rate(few) / rate(many),
        links=transfer_seconds(widest) / step_time(widest).seconds,
        memory=spread(memories),
    )


def summary(errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"median {median(sizes):.1%}, largest {sizes[-1]:.0%}"


def spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f} times, the median {median(ratios):.2f}"


DOCUMENT = """# Pipeline stages: published throughputs

Tokens per second and device that others have reported for dense models in pipeline stages, and what
`zerolm plan` predicts for the same stages, blocks of each, batch and micro-batch. No cost of the
plan was fitted to them. `python -m benchmarks.published_stages` prints this page.

{rows}

- Errors as `zerolm plan` computes: {plain}; with fused kernels: {fused}; of the rows in 16 bits.
- Zero Bubble's rows are 1F1B of Megatron-LM in fp16, tables 3, 4 and 6: one replica, no tensor
  parallelism, 8 to 32 A100 with 80 GB in hosts of eight, linked by RoCE of unknown bandwidth (the
  plan has 200 Gbit/s a device). The first and last stage have a block less. A vocabulary of 32,000
  makes the published parameters. Attention keeps its scores: fused, it would need far less memory
  than published.
- Fused kernels: with Megatron-LM's activations (Korthikanti et al. 2022) and the element-wise
  passes of compiled blocks. The plan for the modules of transformers is closer, so Megatron-LM of
  2023 was slower than that, or waited for what the plan leaves out.
- Throughput falls with fewer micro-batches as the plan says: from 64 to 24 of the 1.5B by
  {published_loss:.1%}, planned {planned_loss:.1%}. Links hardly count here: the plan has
  {links:.1%} of a step for transfers on 32 devices.
- Memory of the stage that uses most: reported {memory} of what is planned.
- NeMo's row is in fp8, which zerolm refuses with stages; it is planned as if it were not. It also
  has ten chunks of layers a stage, with which it is idle for 0.9% of a step instead of 8.6%. The
  page's fine-tuning row (8 H100, 4 stages: 9,741) packs texts of unknown lengths.
- Interleaved: 1F1B with a chunk for each block beside 1F1B, both as published, on the same devices.

## Not planned

Mostly because of tensor parallelism inside each stage.

{others}
"""


if __name__ == "__main__":
    print(document(), end="")
