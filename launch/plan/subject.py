"""What is planned: a model, a DeepSpeed config and settings, resolved as pretrain.py resolves them.

Every problem at once, as there; but nothing is looked at that a plan does not need: no data, no
machine. The rules and the defaults are those of zerolm.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launch.hardware import Hardware
from zerolm import budget, defaults, ds_config, loss_chunks, memory, parallel
from zerolm.architecture import (
    load_model_config,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
)
from zerolm.ds_resolve import resolve
from zerolm.ds_rules import rule_problems
from zerolm.errors import ConfigError
from zerolm.flops import flops_per_token
from zerolm.model_rules import max_positions
from zerolm.parallel_rules import model_problems
from zerolm.settings import Settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Model:
    """A model by its config, measured without memory."""

    config: "PretrainedConfig"
    path: str
    shapes: Mapping[str, tuple[int, ...]]
    num_parameters: int
    num_active_parameters: int

    @classmethod
    def load(cls, path: str) -> "Model":
        """Read a config.json. Raises ConfigError."""
        config = load_model_config(path)
        return cls.of(config, path)

    @classmethod
    def of(cls, config: "PretrainedConfig", path: str) -> "Model":
        shapes = parameter_shapes(config)
        active = num_active_parameters(config, shapes)
        return cls(config, path, shapes, num_parameters(shapes), active)


@dataclass(frozen=True)
class Subject:
    """What is planned, with nothing left open.

    Attributes:
        settings: with seq_len, total_tokens, batch_tokens and micro_batch_size filled in.
        ds: resolved.
        flops_per_token: that the model needs; recomputation is not in it.
        attention_flops: the part of them that grows with the sequence.
    """

    model: Model
    settings: Settings
    ds: dict[str, Any]
    hardware: Hardware
    devices: int
    devices_per_node: int
    flops_per_token: float
    attention_flops: float

    @property
    def stage(self) -> int:
        return ds_config.zero_stage(self.ds)

    @property
    def precision(self) -> str:
        return ds_config.precision(self.ds)

    @property
    def offload(self) -> tuple[str, str]:
        """Where optimizer states and weights are: `none`, `cpu` or `nvme` each."""
        optimizer, weights = ("optimizer", "param")
        return ds_config.offload_device(self.ds, optimizer), ds_config.offload_device(
            self.ds, weights
        )

    @property
    def layout(self) -> parallel.Layout:
        return parallel.layout_of(self.ds, self.devices)

    @property
    def held(self) -> tuple[Mapping[str, tuple[int, ...]], int]:
        """What a replica's device has of each parameter, and over how many ZeRO cuts that."""
        return parallel.held(self.model.shapes, self.ds, self.devices)

    @property
    def own_tokens(self) -> int:
        """Tokens of a sequence that a device computes."""
        return self.seq_len // self.layout.sequence

    @property
    def seq_len(self) -> int:
        assert self.settings.seq_len
        return self.settings.seq_len

    @property
    def micro_batch_size(self) -> int:
        assert self.settings.micro_batch_size
        return self.settings.micro_batch_size

    @property
    def batch_tokens(self) -> int:
        assert self.settings.batch_tokens
        return self.settings.batch_tokens

    @property
    def total_tokens(self) -> int:
        assert self.settings.total_tokens
        return self.settings.total_tokens

    @property
    def accumulation(self) -> int:
        return self.ds["gradient_accumulation_steps"]

    @property
    def num_nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)


def with_sizes(settings: Settings, model: Model, replicas: int) -> tuple[Settings, float, float]:
    """Fill in sequence length, tokens and batch: (settings, FLOPs per token, attention's).

    A batch that was not given is the default's, rounded to whole sequences on every replica.
    """
    if settings.seq_len is None:
        positions = max_positions(model.config) or defaults.SEQ_LEN
        settings = dataclasses.replace(settings, seq_len=min(defaults.SEQ_LEN, positions))
    assert settings.seq_len is not None
    flops = flops_per_token(model.config, model.shapes, settings.seq_len)
    attention = flops - flops_per_token(model.config, model.shapes, 0)
    given = settings.batch_tokens
    total = settings.total_tokens or defaults.TOKENS_PER_PARAMETER * model.num_parameters
    settings = dataclasses.replace(settings, total_tokens=total)
    settings = budget.fill_batch(settings, model.num_parameters, flops)
    if given is None:
        assert settings.batch_tokens is not None and settings.seq_len is not None
        micro = (settings.micro_batch_size or 1) * replicas * settings.seq_len
        rounded = max(1, math.ceil(settings.batch_tokens / micro)) * micro
        settings = dataclasses.replace(settings, batch_tokens=rounded)
    return settings, flops, attention


def resolve_subject(
    model: Model,
    raw_ds: Mapping[str, Any],
    name: str,
    settings: Settings,
    hardware: Hardware,
    devices: int,
    devices_per_node: int,
) -> Subject:
    """Resolve what is planned for so many devices.

    Args:
        name: of the DeepSpeed JSON, for messages.
        settings: as given; `micro_batch_size` None takes the most that fits.

    Raises:
        ConfigError: every problem, a line each.
    """
    problems = rule_problems(raw_ds, name, on_gpu=True, world_size=devices)
    layout = parallel.layout_of(raw_ds, devices)
    if hardware.peak(ds_config.compute_precision(raw_ds)) is None:
        problems.append(
            f"{name}: {ds_config.compute_precision(raw_ds)} is asked for, {hardware.name} has "
            f"none. Enable fp16 in the ds config, or use a newer device."
        )
    settings, flops, attention = with_sizes(settings, model, layout.replicas)
    named = dataclasses.replace(settings, deepspeed_config=name, model_config=model.path)
    problems += model_problems(named, model.config, raw_ds, devices)
    assert settings.seq_len is not None and settings.batch_tokens is not None
    fixed, found = ds_config.fixed_settings(
        raw_ds, seq_len=settings.seq_len, world_size=layout.replicas
    )
    problems += [f"{name}: {problem}" for problem in found]
    problems += ds_config.contradictions(fixed, settings, name)
    settings = budget.apply_fixed(settings, fixed, name)
    problems += budget.batch_problems(settings, layout.replicas)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    assert settings.seq_len is not None and settings.batch_tokens is not None
    per_rank = settings.batch_tokens // settings.seq_len // layout.replicas
    micro = settings.micro_batch_size or memory.fitting_micro_batch(
        per_rank,
        settings.seq_len // layout.sequence,
        config=parallel.part_of(model.config, layout),
        shapes=model.shapes,
        ds=raw_ds,
        world_size=devices,
        memory_bytes=int(hardware.memory_bytes),
        checkpointing=settings.gradient_checkpointing,
        loss_chunk_tokens=settings.loss_chunk_tokens or 0,
    )
    wanted = settings.loss_chunk_tokens
    if wanted is None and layout.tensor > 1:
        wanted = 0  # the head is DeepSpeed's
    chunk = loss_chunks.chunk_tokens(model.config, micro * settings.seq_len, wanted)
    settings = dataclasses.replace(settings, micro_batch_size=micro, loss_chunk_tokens=chunk)
    resolved = resolve(
        raw_ds,
        settings,
        hidden_size=memory.hidden_size(model.config),
        micro_batch_size=micro,
        accumulation=per_rank // micro,
        replicas=layout.replicas,
        on_gpu=True,
    )
    return Subject(model, settings, resolved, hardware, devices, devices_per_node, flops, attention)
