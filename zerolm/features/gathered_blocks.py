"""Blocks whose weights ZeRO-3 gathers in a single operation."""

from typing import TYPE_CHECKING, Any

from zerolm.features.feature import Feature

if TYPE_CHECKING:
    from zerolm.engine.protocol import Engine


class GatheredBlocks(Feature):
    """Makes blocks leaf modules of DeepSpeed if zerolm/ds_config/gathering.py decides to."""

    name = "gathered_blocks"

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        from zerolm.ds_config.gathering import gathers_blocks

        return plan.ds.zero_stage == 3 and gathers_blocks(
            plan.ds,
            plan.model.block_sizes,
            hidden_size=plan.model.hidden_size,
            ranks=plan.world_size,
            compiled=plan.settings.compile,
        )

    def change_model(self, model: Any) -> None:
        from deepspeed.utils import set_z3_leaf_module

        from zerolm.model.architecture import decoder_blocks

        for block in decoder_blocks(model):
            set_z3_leaf_module(block, True)

    def change_engine(self, engine: "Engine") -> str:
        from zerolm.engine.zero3_hooks import bound_gathers

        if engine.device.type == "cuda":
            bound_gathers(engine)
        return ""
