"""The derived figures that a run prints when it starts and records in run.json."""

from zerolm import evaluate, features
from zerolm.common.values import shown_bytes
from zerolm.data.epochs import times
from zerolm.distributed.device import ABSENT
from zerolm.ds_config import scheduler
from zerolm.optim.schedule import SCHEDULES
from zerolm.plan import exchange, memory, stage_share
from zerolm.plan.peak_flops import TF32
from zerolm.plan.plan import Plan
from zerolm.plan.rank_share import config_of_rank
from zerolm.run_dir.records import lineage


def figures(plan: Plan) -> dict[str, str]:
    """Return {name: text} for a plan's derived figures."""
    settings, model, profile = plan.settings, plan.model, plan.ds
    kept = settings.kept_bytes()
    states = memory.model_states(model.shapes, profile, plan.layout, kept_bytes=kept)
    chunk = settings.loss_chunk_tokens
    second = ""
    if states.secondary:
        second = (
            f" (including {shown_bytes(states.secondary)} for hpZ's second copy of the weights)"
        )
    activations = memory.activation_bytes(
        config_of_rank(model.config, plan.layout),
        settings.seq_len // plan.layout.sequence,
        profile.precision,
        settings.gradient_checkpointing,
        settings.micro_batch_size,
        chunk,
        settings.compile,
    )
    activations += exchange.memory_bytes(
        model.config, model.shapes, plan.layout, settings.micro_batch_size * settings.seq_len,
        profile.weight_bytes, bool(settings.gradient_checkpointing),
    )  # fmt: skip
    per_rank = (
        f"{shown_bytes(states.device)} of model states on the device{second}, "
        f"{shown_bytes(states.host)} on the host, about {shown_bytes(activations)} of activations"
    )
    if plan.layout.stages > 1:
        per_rank = _stage_memory(plan, kept)
    lines = {
        "model": f"{model.config.model_type}, {model.num_parameters:,} parameters",
        **({"branch": _branch_line(plan)} if plan.branch else {}),
        "profile": f"ZeRO-{profile.zero_stage}, {_precision(plan)}, optimizer offload "
        f"{profile.optimizer_offload}",
        "devices": ", ".join(filter(None, (_devices(plan), plan.layout.describe()))),
        "batch": f"{settings.batch_tokens:,} tokens = {plan.batch_schedule.batch_sequences:,} "
        f"sequences of {settings.seq_len:,}",
        "accumulation": f"{profile.accumulation} x micro-batch {settings.micro_batch_size} x "
        f"{plan.layout.replicas} {'rank(s)' if plan.layout.replica_size == 1 else 'replica(s)'}",
        "steps": f"{plan.total_steps:,} for {settings.total_tokens:,} tokens",
        "tokens per parameter": f"{settings.total_tokens / model.num_parameters:.3g}",
        "learning rate": _learning_rate_line(plan),
        "FLOPs per token": f"{plan.flops_per_token:.4g}",
        "FLOPs of the run": f"{plan.flops_per_token * settings.total_tokens:.4g}",
        **_stage_lines(plan),
        "memory per rank": per_rank,
        "epochs": ", ".join(
            f"{name} {times(epochs)}"
            for name, epochs in zip(plan.source_names, epochs_of(plan), strict=True)
        ),
        "data fingerprint": plan.data_fingerprint[:16],
        "checkpoints": f"every {settings.checkpoint_interval} steps, "
        f"{settings.checkpoint_keep} kept",
        "checkpoint size": shown_bytes(
            memory.checkpoint_bytes(
                model.shapes, profile, kept_bytes=kept, experts=plan.layout.experts
            )
        ),
    }
    if plan.initial is not None:
        taken = ", with the optimizer states" if settings.init_optimizer else ""
        lines["initial weights"] = plan.initial.describe(model.vocab_size) + taken
    lines |= evaluate.summary(plan)
    sizes = {
        name: source.head.get("text_bytes", 0) / source.num_tokens
        for name, source in zip(plan.source_names, plan.sources, strict=True)
    }
    if all(sizes.values()):
        lines["bytes per token"] = ", ".join(f"{name} {size:.3g}" for name, size in sizes.items())
    if settings.batch_ramp_start:
        lines["batch ramp"] = (
            f"from {settings.batch_ramp_start:,} tokens a step, growing over the first "
            f"{settings.batch_ramp_tokens:,} tokens"
        )
    return lines | features.summary(plan)


def _stage_lines(plan: Plan) -> dict[str, str]:
    """Return the division of the blocks, and the time that stages wait for each other."""
    if plan.layout.stages == 1:
        return {}
    layers = plan.ds.stage_layers
    costs = stage_share.shares(*stage_share.block_costs(plan.model, plan.settings.seq_len), layers)
    count = plan.ds.accumulation or 1
    idle = (len(layers) - 1) / (count + len(layers) - 1)
    return {
        "stages": f"{', '.join(map(str, layers))} blocks, at "
        f"{', '.join(f'{cost:.2f}' for cost in costs)} of the mean cost; idle for {idle:.1%} of a "
        f"step with {count} micro-batches"
    }


def _stage_memory(plan: Plan, kept: int) -> str:
    settings = plan.settings
    found = memory.activations_of(
        plan.model.config, settings.seq_len, plan.ds.precision,
        chunk_tokens=settings.loss_chunk_tokens,
    )  # fmt: skip
    used = memory.stage_bytes(
        plan.model.config, plan.model.shapes, plan.ds, plan.layout, found,
        settings.gradient_checkpointing, settings.seq_len, settings.micro_batch_size,
        plan.ds.accumulation or 1, kept,
    )  # fmt: skip
    return f"by stage, about {', '.join(map(shown_bytes, used))}"


def _branch_line(plan: Plan) -> str:
    assert plan.branch is not None
    tokens = plan.settings.total_tokens - plan.branch["tokens"]
    return f"of {lineage(plan.branch)}, {tokens:,} tokens from there to the end"


def _precision(plan: Plan) -> str:
    weights, products = plan.ds.precision, plan.ds.compute_precision
    if plan.matmul_precision == TF32:
        return f"{weights}, matrix products in TF32"
    return weights if products == weights else f"{weights} weights, {products} arithmetic"


def _devices(plan: Plan) -> str:
    if plan.device != ABSENT:
        return f"{plan.world_size} x {plan.device}"
    return f"{plan.world_size} x {plan.device_name}, not on this machine"


def _learning_rate_line(plan: Plan) -> str:
    settings = plan.settings
    if plan.learning_rate is None:
        return scheduler.description(plan.ds, settings.learning_rate, plan.total_steps)
    line = f"{settings.schedule}, peak {settings.learning_rate:g}"
    if SCHEDULES[plan.learning_rate.kind].uses_minimum:
        line += f" to {plan.learning_rate.minimum:g}"
    line += f", warm-up {settings.warmup_tokens:,} tokens"
    return line + (f", decay {settings.decay_tokens:,}" if settings.decay_tokens else "")


def epochs_of(plan: Plan) -> list[float]:
    order = plan.order()
    return (order.counts(plan.total_sequences) / order.num_windows).tolist()
