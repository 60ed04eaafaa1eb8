"""`--loss_chunk_tokens`: compute the loss for a chunk of tokens at a time."""

from collections.abc import Iterable, Mapping
from typing import Any

from zerolm.features.feature import Case, Feature


class ChunkedLoss(Feature):
    """Replaces the output head with the one in zerolm/model/chunked_loss.py.

    The flag is a core setting: its default depends on the size of the logits, and the flag affects
    memory and time.
    """

    name = "chunked_loss"

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        from zerolm.model import loss_chunks

        settings = case.settings
        if settings.loss_chunk_tokens and (why := loss_chunks.unsupported_reason(case.config)):
            yield (
                f"{settings.where('loss_chunk_tokens')}: {settings.loss_chunk_tokens}, but {why} "
                f"({settings.model_config}). Remove the flag."
            )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        chunk = plan.settings.loss_chunk_tokens
        return {"loss": f"computed for {chunk:,} tokens at a time"} if chunk else {}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.loss_chunk_tokens)

    def change_model(self, model: Any) -> None:
        from zerolm.model import chunked_loss
        from zerolm.model.forward import has_losses

        if has_losses(model):
            chunked_loss.install(model, self.settings.loss_chunk_tokens)
