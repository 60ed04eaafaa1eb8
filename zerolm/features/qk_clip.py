"""`--qk_clip`: bound the attention logits by scaling down query and key weights after each step."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zerolm.common.values import shown_bytes
from zerolm.config.flag import real
from zerolm.features.feature import Batch, Case, Feature, Row, RunParts, StepInputs
from zerolm.run_dir.metrics import Metric, Panel

LARGEST = "train/max_attention_logit"


class QkClip(Feature):
    """Measures each head's largest attention logit, and clips the weights of its projections.

    zerolm/model/attention_logits.py measures, and zerolm/engine/qk_clip.py clips.
    """

    name = "qk_clip"
    SECTION = "Optimization"
    METRICS = (
        Metric(
            LARGEST,
            "",
            Panel(
                "Largest attention logit",
                smooth=True,
                about="Over all heads in a step's batch, before softmax; with `--qk_clip`.",
            ),
            "with `--qk_clip`: largest attention logit over all heads in the last step's batch",
        ),
        Metric(
            f"{LARGEST}/<block>",
            "",
            Panel("Largest attention logit by block", many=True, ordered=True, smooth=True),
            "the same for one block",
        ),
        Metric(
            "train/clipped_heads",
            "heads",
            Panel("Clipped heads", smooth=True),
            "with `--qk_clip`: number of heads whose query and key weights the last step scaled "
            "down",
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        qk_clip: float = real(
            "model",
            "after each step, scale down the query and key weights of heads whose largest "
            "attention logit exceeds X; 100 is typical with Muon, 0: off",
            default=0.0,
            changes_curve=True,
            planned=True,
            not_with=dict.fromkeys(
                ("tensor", "sequence"), "no rank has the logits of all heads and tokens"
            ),
        )

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        settings = case.settings
        if not settings.qk_clip:
            return
        from zerolm.ds_config.optimizers import master_problems
        from zerolm.model import attention_logits

        where = f"{settings.where('qk_clip')}: {settings.qk_clip:g}"
        if why := attention_logits.unsupported_reason(case.config):
            yield f"{where}, but {why} ({settings.model_config}). Remove the flag."
        if settings.compile:
            yield (
                f"{where} is not supported together with --compile: the logits cannot be measured "
                f"in a compiled block. Remove one of the flags."
            )
        if settings.attn_implementation == "flex_attention":
            yield (
                f"{where} is not supported together with --attn_implementation flex_attention, "
                f"whose masks cannot be read. Use sdpa or auto."
            )
        yield from master_problems(case.profile, where, "clipped", "clipping")

    @classmethod
    def flops_per_token(cls, settings: Any, config: Any) -> float:
        """Return the FLOPs per training token for measuring attention logits."""
        if not settings.qk_clip:
            return 0.0
        from zerolm.model import attention_logits

        layers = attention_logits.attention_layers(config)
        return attention_logits.flops_per_token(layers, settings.seq_len)

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        settings = plan.settings
        if not settings.qk_clip:
            return {}
        from zerolm.model import attention_logits

        layers = attention_logits.attention_layers(plan.model.config)
        extra = cls.flops_per_token(settings, plan.model.config)
        values = attention_logits.block_values(
            layers, settings.micro_batch_size, settings.seq_len, plan.device
        )
        held = values * (4 if plan.ds.compute_precision == "fp32" else 2)
        heads = sum(one.num_heads for one in layers)
        return {
            "attention logits": f"at most about {settings.qk_clip:g} in each of {heads:,} heads, "
            f"by clipping weights; measuring them takes {extra:.3g} FLOPs per token "
            f"({extra / plan.flops_per_token:.1%} more), {shown_bytes(held)} at a time"
        }

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.qk_clip)

    def attach(self, run: RunParts) -> None:
        from zerolm.engine import qk_clip
        from zerolm.model.attention_logits import AttentionLogits, attention_layers

        self.layers = attention_layers(self.plan.model.config)
        self.measure = AttentionLogits(run.engine.module, self.layers, run.device)
        outputs = [layer.outputs for layer in self.layers]
        self.clip = qk_clip.QkClip(run.engine, self.settings.qk_clip, outputs)

    def begin(self, step: StepInputs) -> None:
        self.measure.begin()

    def forward(self, batch: Batch) -> AbstractContextManager[Any]:
        return self.measure.observing(batch)

    def update(self, result: Any) -> AbstractContextManager[Any]:
        self.largest = self.measure.largest()  # for each layer and head, over all ranks
        return self.clip.clipping(self.largest)

    def row(self, result: Any) -> Row:
        from zerolm.model.architecture import block_of

        of_blocks: dict[str, float] = {}
        for layer, logits in zip(self.layers, self.largest, strict=True):
            block = block_of(layer.name)
            of_blocks[block] = max(of_blocks.get(block, -math.inf), *logits)
        exceeding = sum(one > self.settings.qk_clip for logits in self.largest for one in logits)
        return {
            LARGEST: max(of_blocks.values()),
            **{f"{LARGEST}/{block}": each for block, each in of_blocks.items()},
            "train/clipped_heads": exceeding if result.applied else 0,
        }
