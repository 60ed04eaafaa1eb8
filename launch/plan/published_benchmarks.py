"""Published benchmarks of other trainers, predicted as runs of ours with ds_configs/zero3.json.

benchmarks/fit_plan.py fits `step_time.COSTS` and the attained shares to them; `published` prints
the table. published_runs.json has the reported figures, with sources.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.plan import hardware
from launch.plan.planned_run import PlannedRun, plan_run
from launch.plan.search import profile_of
from launch.plan.step_time import COSTS, Costs, step_time
from zerolm.common.records import read_json
from zerolm.config.settings import Recompute, Settings
from zerolm.model.model import Model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FILE = Path(__file__).with_name("published_runs.json")
# Of the layers' matrix products: `half` repeats every second one, as torchtitan's selective mode.
RECOMPUTE: dict[str, tuple[Recompute, float]] = {
    "none": (False, 0.0),
    "half": ("selective", 0.5),
    "full": (True, 1.0),
}
LOGIT_BYTES = 4  # of a fused loss


@dataclass(frozen=True)
class Benchmark:
    """A reported throughput.

    Attributes:
        entry: columns of published_runs.json.
        run: the same configuration, planned.
        kept_bytes: bytes of activations per token, with fused kernels; models of transformers keep
            more.
        held_out: prediction by a fit without this row.
    """

    entry: Mapping[str, Any]
    run: PlannedRun
    kept_bytes: float
    held_out: float

    @property
    def reported(self) -> float:
        """Return tokens per second and device."""
        return float(self.entry["tokens_per_second_per_device"])

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
            repeated=RECOMPUTE[self.entry["recompute"]][1],
            costs=costs,
        )
        return self.run.settings.batch_tokens / step.seconds / self.run.devices


def read() -> tuple[list[Benchmark], Mapping[str, Any]]:
    """Return the benchmarks, and what published_runs.json says about all of them."""
    values = read_json(FILE, "launch/plan/published_runs.json")["benchmarks"]
    known = hardware.devices_of(hardware.FILE)
    known |= hardware.parse(values["devices"], FILE, known)
    models = {name: _model(config, name) for name, config in values["models"].items()}
    rows = [dict(zip(values["columns"], row, strict=True)) for row in values["rows"]]
    held_out = values.get("held_out") or [0.0] * len(rows)
    found = [
        Benchmark(entry, _planned(entry, known, models), _kept_bytes(models[entry["model"]]), each)
        for entry, each in zip(rows, held_out, strict=True)
    ]
    return found, values


def _planned(
    entry: Mapping[str, Any], known: Mapping[str, hardware.Hardware], models: Mapping[str, Model]
) -> PlannedRun:
    device, count = known[entry["hardware"]], entry["devices"]
    batch = entry["micro_batch_size"] * entry["accumulation"] * count * entry["seq_len"]
    settings = Settings(
        seq_len=entry["seq_len"],
        batch_tokens=batch,
        total_tokens=batch,
        micro_batch_size=entry["micro_batch_size"],
        gradient_checkpointing=RECOMPUTE[entry["recompute"]][0],
        compile=entry["compiled"],
        fp8=entry["precision"] == "fp8",
        explicit=frozenset({"batch_tokens", "micro_batch_size"}),
    )
    per_node = min(entry["per_node"], count)
    return plan_run(models[entry["model"]], _profile(device), settings, device, count, per_node)


@cache
def _profile(device: hardware.Hardware) -> Any:
    return profile_of(3, "none", device)


def _model(values: Mapping[str, Any], name: str) -> Model:
    from transformers import AutoConfig

    return Model.from_config(AutoConfig.for_model(**values), name)


def _kept_bytes(model: Model) -> float:
    """Return the bf16 activations per token that fused kernels keep for the backward pass.

    In a layer: inputs and outputs of the two norms, queries, keys, values and the attention's
    output, and the MLP's two or three inner tensors.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), equation 2, without dropout and masks.
    """
    config: PretrainedConfig = model.config.get_text_config()
    width, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    inner = getattr(config, "intermediate_size", 0) or config.expansion_ratio * width
    inner *= getattr(config, "num_experts_per_tok", 1)
    matrices = 2 if config.model_type in ("mpt", "nanochat") else 3
    values = 4 * width + 2 * width * (1 + kv_heads / heads) + matrices * inner
    return 2 * values * config.num_hidden_layers + LOGIT_BYTES * config.vocab_size
