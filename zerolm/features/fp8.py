"""`--fp8`: run the matrix products of the blocks' linear layers in 8-bit floating point in
training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zerolm.config.flag import switch
from zerolm.features.feature import Case, Feature


class Fp8(Feature):
    """Converts the layers that zerolm/fp8 chooses."""

    name = "fp8"

    @dataclass(frozen=True)
    class Flags:
        fp8: bool = switch(
            "model",
            "multiply in 8-bit floating point in the blocks' linear layers during training",
            changes_curve=True,
            planned=True,
            not_with={"tensor": "DeepSpeed replaces the linear layers"},
        )

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        settings, config, profile = case.settings, case.config, case.profile
        if not settings.fp8:
            return
        from zerolm.fp8 import layers, linear

        where = f"{settings.where('fp8')}: true"
        if profile.json and profile.precision != "bf16":
            yield (
                f"{where} needs bf16 weights, but {settings.deepspeed_config} sets "
                f"{profile.precision}. Enable bf16 in it, or remove the flag."
            )
        if why := layers.unsupported_device(case.device):
            yield f"{where}, but {why}. Remove the flag."
        found = layers.layers_of(config)
        if not found.chosen:
            odd = f" whose sizes are multiples of {linear.MULTIPLE}" if found.odd else ""
            yield (
                f"{where}, but {config.model_type} has no linear layers{odd} in its blocks "
                f"({settings.model_config}). Use another model, or remove the flag."
            )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not plan.settings.fp8:
            return {}
        from zerolm.fp8 import layers, linear

        found = layers.layers_of(plan.model.config)
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in found.chosen)
        share = found.flops_per_token / plan.flops_per_token
        line = f"{len(found.chosen)} matrices ({', '.join(kinds)}), {share:.0%} of the FLOPs"
        odd = dict.fromkeys(name.rpartition(".")[2] for name in found.odd)
        if odd:
            line += (
                f"; without {', '.join(odd)}: their sizes are not multiples of {linear.MULTIPLE}"
            )
        return {"fp8": line + ("; emulated on a CPU, slowly" if plan.device == "cpu" else "")}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.fp8)

    def change_model(self, model: Any) -> None:
        from zerolm.fp8 import layers

        layers.install(model)
