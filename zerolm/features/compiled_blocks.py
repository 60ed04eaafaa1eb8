"""`--compile`: compile the model's blocks."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zerolm.features.feature import Case, Feature

if TYPE_CHECKING:
    from zerolm.engine.protocol import Engine


class CompiledBlocks(Feature):
    """Compiles the blocks as zerolm/model/compile.py describes.

    The flag is a core setting: other features, the kernels and the plan depend on it.
    """

    name = "compiled_blocks"

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        from zerolm.model import compile

        settings = case.settings
        if settings.compile and (why := compile.unsupported_reason(case.config, case.device)):
            yield (
                f"{settings.where('compile')}: true, but {why} ({settings.model_config}). Remove "
                f"the flag."
            )

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.compile)

    def change_model(self, model: Any) -> None:
        from zerolm.engine import zero3_hooks

        if self.plan.ds.zero_stage == 3:
            zero3_hooks.leave_partitions_out_of_graphs()

    def change_engine(self, engine: "Engine") -> str:
        from zerolm.model import compile

        return compile.compile_blocks(engine.module)
