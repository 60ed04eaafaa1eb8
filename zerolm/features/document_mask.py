"""`--document_mask`: test before training whether the attention kernel separates documents."""

from typing import TYPE_CHECKING, Any

from zerolm.features.feature import Feature

if TYPE_CHECKING:
    from zerolm.engine.protocol import Engine


class DocumentMask(Feature):
    """Refuses to train with a kernel that ignores the mask.

    The flag is a core setting: the data, the kernels and the loss depend on it.
    """

    name = "document_mask"

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.document_mask)

    def change_engine(self, engine: "Engine") -> str:
        from zerolm.attention import mask_check

        precision = self.plan.ds.compute_precision
        return mask_check.check(engine, self.settings, precision, engine.device)
