"""Published benchmarks of other trainers, predicted as runs of ours with the nearest profile.

`fit` fits `step_time.COSTS` and the attained shares to the sources that are `fitted`; the others
only judge the fit. runs.json has the reported figures, with sources.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.estimate.collectives import Calls
from launch.estimate.estimate import device_memory
from launch.estimate.planned_run import PlannedRun, plan_run
from launch.estimate.search import profile_of
from launch.estimate.step_time import COSTS, MANY_DEVICES, Costs, step_time
from zerolm.common.records import read_json
from zerolm.config.settings import Recompute
from zerolm.ds_config.profile import Profile
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import hardware

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FILE = Path(__file__).with_name("runs.json")
# Of the layers' matrix products: `half` repeats every second one, as torchtitan's selective mode.
RECOMPUTE: dict[str, tuple[Recompute, float]] = {
    "none": (False, 0.0),
    "half": ("selective", 0.5),
    "full": (True, 1.0),
}
LOGIT_BYTES = 4  # of a fused loss
BY_LAYER, BY_OWNER, BY_DEEPSPEED = "layer", "owner", "deepspeed"  # how a trainer sends


@dataclass(frozen=True)
class Benchmark:
    """A reported throughput.

    Attributes:
        entry: columns of runs.json.
        run: the same configuration, planned.
        kept_bytes: bytes of activations per token, with fused kernels; None: of a model of
            transformers, which keeps more.
        is_fitted: whether the costs are fitted to its source.
        is_counted: whether the row is a benchmark rather than the hours of a run.
        sent: how its trainer sends weights and gradients: by layer, by the owner of a tensor, or as
            DeepSpeed does.
        held_out: prediction by a fit without this row.
    """

    entry: Mapping[str, Any]
    run: PlannedRun
    kept_bytes: float | None
    is_fitted: bool
    is_counted: bool
    sent: str
    held_out: float = 0.0

    @property
    def reported(self) -> float:
        """Return tokens per second and device."""
        return float(self.entry["tokens_per_second_per_device"])

    @property
    def is_large(self) -> bool:
        return self.run.devices > MANY_DEVICES

    @property
    def error(self) -> float:
        """Return the relative error of the prediction by a fit without this row."""
        return self.held_out / self.reported - 1

    @property
    def calls(self) -> Calls | None:
        """Collectives of the source's trainer.

        FSDP gathers each layer in both passes, and reduces all of its gradients in one call.
        InternEvo gives each tensor to one rank, which broadcasts it after the step
        (`broadcast_params` in internlm/solver/optimizer/hybrid_zero_optim.py).
        """
        if self.sent == BY_DEEPSPEED:
            return None
        layers = self.run.model.config.get_text_config().num_hidden_layers
        owners = min(len(self.run.model.shapes), self.run.layout.replicas)
        return Calls(3 * (layers + 1), owners if self.sent == BY_OWNER else 0)

    def predict(self, attained: Mapping[str, float], costs: Costs = COSTS) -> float:
        """Return tokens per second and device.

        Args:
            attained: share of the peak by the row's group, its devices and the year of its
                software.
        """
        device = dataclasses.replace(self.run.hardware, attained=attained[self.entry["attained"]])
        step = step_time(
            dataclasses.replace(self.run, hardware=device),
            kept_bytes=self.kept_bytes,
            repeated=_recompute(self.entry["recompute"])[1],
            costs=costs,
            calls=self.calls,
        )
        return self.run.settings.batch_tokens / step.seconds / self.run.devices


def read() -> tuple[list[Benchmark], Mapping[str, Any]]:
    """Return the benchmarks, and the properties in runs.json common to all of them."""
    values = read_json(FILE, "runs.json")["benchmarks"]
    known = hardware.devices_of(hardware.FILE)
    known |= hardware.parse(values["devices"], FILE, known)
    models = {name: _model(config, name) for name, config in values["models"].items()}
    rows = [dict(zip(values["columns"], row, strict=True)) for row in values["rows"]]
    held_out = iter(values["held_out"])
    found = []
    for entry in rows:
        source = values["sources"][entry["source"]]
        run = _planned(entry, source, known, models)
        fitted, sent = source.get("fitted", True), source.get("calls", BY_LAYER)
        kept = None if sent == BY_DEEPSPEED else kept_bytes(models[entry["model"]])
        row = Benchmark(entry, run, kept, fitted, source.get("counted", True), sent)
        each = next(held_out) if fitted else row.predict(values["attained"])
        found.append(dataclasses.replace(row, held_out=each))
    return found, values


def memory_ratios() -> list[float]:
    """Return, for each published figure, the reported memory divided by a plan's tensor bytes."""
    everything = read_json(FILE, "runs.json")
    values, known = everything["memory"], hardware.devices_of(hardware.FILE)
    models = everything["benchmarks"]["models"]
    # Compiled, our loss keeps no float32 logits; theirs do.
    same = {"recompute": "full", "precision": "bf16", "accumulation": 4, "compiled": False}
    found = []
    for row in values["rows"]:
        entry = dict(zip(values["columns"], row, strict=True)) | same
        model = _model(models[entry["model"]], entry["model"])
        run = _planned(entry, {}, known, {entry["model"]: model})
        found.append(entry["reported_bytes"] / device_memory(run).used)
    return found


def _planned(
    entry: Mapping[str, Any],
    source: Mapping[str, Any],
    known: Mapping[str, hardware.Hardware],
    models: Mapping[str, Model],
) -> PlannedRun:
    device, count = known[entry["hardware"]], entry["devices"]
    tensor = source.get("tensor_parallel", 1)
    sequences = entry["micro_batch_size"] * entry["accumulation"] * count // tensor
    batch = sequences * entry["seq_len"]
    settings = RunSettings(
        seq_len=entry["seq_len"],
        batch_tokens=batch,
        total_tokens=batch,
        micro_batch_size=entry["micro_batch_size"],
        gradient_checkpointing=_recompute(entry["recompute"])[0],
        compile=entry["compiled"],
        fp8=entry["precision"] == "fp8",
        explicit=frozenset({"batch_tokens", "micro_batch_size"}),
    )
    per_node = min(entry["per_node"], count)
    profile = _profile(device, source.get("zero_stage", 3), tensor)
    return plan_run(models[entry["model"]], profile, settings, device, count, per_node)


def _recompute(level: str | float) -> tuple[Recompute, float]:
    return RECOMPUTE[level] if isinstance(level, str) else ("selective", level)


@cache
def _profile(device: hardware.Hardware, stage: int, tensor: int) -> Profile:
    found = profile_of(stage, "none", device)
    if tensor == 1:
        return found
    return Profile.parse({**found.json, "tensor_parallel": {"autotp_size": tensor}})


def _model(values: Mapping[str, Any], name: str) -> Model:
    from transformers import AutoConfig

    return Model.from_config(AutoConfig.for_model(**values), name)


def kept_bytes(model: Model) -> float:
    """Return the bf16 activations per token that fused kernels keep for the backward pass.

    In a layer: inputs and outputs of the two norms, queries, keys, values and the attention's
    output, and the MLP's two or three inner tensors.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), equation 2, without dropout and masks.
    """
    config: PretrainedConfig = model.config.get_text_config()
    width, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    inner = getattr(config, "intermediate_size", 0) or getattr(config, "n_inner", 0)
    inner = inner or getattr(config, "expansion_ratio", 4) * width
    inner *= getattr(config, "num_experts_per_tok", 1)
    matrices = 2 if config.model_type in ("mpt", "nanochat", "gpt2") else 3
    values = 4 * width + 2 * width * (1 + kv_heads / heads) + matrices * inner
    return 2 * values * config.num_hidden_layers + LOGIT_BYTES * config.vocab_size
